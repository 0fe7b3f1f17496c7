"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies and answers."""

from starlette.responses import PlainTextResponse

from aserve.engine import AsyncEngine
from aserve.http.endpoint import Exchange, Handler
from aserve.http.openai.schema import LoadAdapterFields, UnloadAdapterFields, parse


def load_adapter(engine: AsyncEngine) -> Handler:
    """The handler that adds an adapter, which answers as a model from then on."""

    async def handle(exchange: Exchange) -> None:
        fields = parse(exchange.fields, LoadAdapterFields)
        await engine.adapters.add(fields.lora_name, fields.lora_path)
        text = f"Success: LoRA adapter '{fields.lora_name}' added successfully."
        await exchange.reply(PlainTextResponse(text))

    return handle


def unload_adapter(engine: AsyncEngine) -> Handler:
    """The handler that forgets one. Requests that it answers go on."""

    async def handle(exchange: Exchange) -> None:
        fields = parse(exchange.fields, UnloadAdapterFields)
        engine.adapters.remove(fields.lora_name)
        text = f"Success: LoRA adapter '{fields.lora_name}' removed successfully."
        await exchange.reply(PlainTextResponse(text))

    return handle
