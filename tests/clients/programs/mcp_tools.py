"""openai-agents with tools of an MCP server over stdio, which is this file too: what each run comes to, as JSON."""

import asyncio
import json
import sys

QUESTION = "What is the weather in Rome?"
SERVE = "serve"


def serve():
    """An MCP server with one tool."""
    from mcp.server import MCPServer

    server = MCPServer("weather", log_level="ERROR")

    @server.tool()
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        return f"It rains in {city[:8]}."

    server.run()


async def ask(url):
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner
    from agents.mcp import MCPServerStdio
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    found = {}
    async with MCPServerStdio({"command": sys.executable, "args": [__file__, SERVE]}) as tools:
        for face, make in (("chat", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel)):
            for choice in (None, "required", "get_weather"):
                settings = ModelSettings(temperature=0, tool_choice=choice)
                agent = Agent(
                    name="assistant", model=make("demo", client), model_settings=settings, mcp_servers=[tools]
                )
                found[f"{face}, {choice or 'auto'}"] = told(await Runner.run(agent, QUESTION, max_turns=4))
    return found


def told(result):
    return {
        "kinds": [type(item).__name__ for item in result.new_items],
        "arguments": [
            json.loads(item.raw_item.arguments) for item in result.new_items if item.type == "tool_call_item"
        ],
        "outputs": [item.output for item in result.new_items if item.type == "tool_call_output_item"],
        "answer": result.final_output,
    }


if sys.argv[1] == SERVE:
    serve()
else:
    from agents import set_tracing_disabled

    set_tracing_disabled(True)
    print(json.dumps(asyncio.run(ask(sys.argv[1]))))
