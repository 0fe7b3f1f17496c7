"""Answers that are JSON by a schema, one of some choices, or whatever a regular expression says."""

import asyncio
import json

from aserve import AsyncEngine, SamplingParams, StructuredOutputs

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "born": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "born"],
    "additionalProperties": False,
}


async def main() -> None:
    async with AsyncEngine("demo") as engine:
        person = StructuredOutputs(json=PERSON)
        completion = await engine.complete("A person as JSON: ", SamplingParams(structured=person, max_tokens=120))
        print(json.loads(completion.text))

        yes_or_no = StructuredOutputs(choice=("yes", "no"))
        completion = await engine.complete("Is a fox an animal?", SamplingParams(structured=yes_or_no))
        print(completion.text)

        code = StructuredOutputs(regex="[A-Z]{2}-[0-9]{3}")
        completion = await engine.complete("The code is ", SamplingParams(structured=code))
        print(completion.text)


if __name__ == "__main__":
    asyncio.run(main())
