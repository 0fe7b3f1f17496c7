"""A world whose clients all ask where their time went, and one of them asks for it once more afterwards."""

import json
from collections.abc import Mapping
from typing import Any

from tests.faults.small_world import ASKED, SmallWorld
from tests.faults.world import TEXT, WHOSE, Answer

ASKER = "asker"
EXPLAIN = {"x_aserve": {"explain": True}}


class ExplainedWorld(SmallWorld):
    """Explanations, whose ids and times are never the same, are taken out of what is compared."""

    asked: Mapping[str, tuple[str, dict[str, Any]]] = {
        **{name: (path, body | EXPLAIN) for name, (path, body) in ASKED.items()},
        "two prompts": (TEXT, {"prompt": ["one", "two"], "max_tokens": 2, "temperature": 0} | EXPLAIN),
    }

    async def answers(self) -> dict[str, Answer]:
        """Of all clients, each without its explanation; and then of the one who asks for the first one's."""
        answers = await super().answers()
        for name in self.asked:
            answers[name] = _plain(answers[name])
        token = WHOSE.set(ASKER)  # of this request alone: worlds come one after the other in one task
        try:
            asked = await self.ask(ASKER, "/v1/requests/plain", b"", method="GET")
        finally:
            WHOSE.reset(token)
        if asked.status in (200, 404):  # its explanation may be what failed
            asked = Answer(200, escaped=asked.escaped, broken=asked.broken)
        return answers | {ASKER: asked}


def _plain(answer: Answer) -> Answer:
    """Without what is told of x_aserve, which has to be there in an answer that is whole."""
    if not answer.is_whole or answer.status != 200:
        return answer
    if answer.is_stream:
        assert b'"x_aserve"' in answer.body or answer.error is not None, answer.body
        return answer
    body = json.loads(answer.body)
    assert set(body.pop("x_aserve")) <= {"explanation", "explanations"}
    answer.body = bytearray(json.dumps(body).encode())
    return answer
