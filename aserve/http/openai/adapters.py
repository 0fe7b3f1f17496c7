"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies and answers."""

from typing import Literal

import msgspec
from starlette.responses import PlainTextResponse

from aserve.engine import Engine
from aserve.http.endpoint import Exchange, Handler
from aserve.http.openai.schema import parse


class LoadAdapterFields(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: Literal[False] | None = None


class UnloadAdapterFields(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/unload_lora_adapter. lora_int_id: vLLM's, which changes nothing here."""

    lora_name: str
    lora_int_id: int | None = None


def load_adapter(engine: Engine) -> Handler:
    """The handler that adds an adapter, which answers as a model from then on."""

    async def handle(exchange: Exchange) -> None:
        fields = parse(exchange.fields, LoadAdapterFields)
        await engine.adapters.add(fields.lora_name, fields.lora_path)
        text = f"Success: LoRA adapter '{fields.lora_name}' added successfully."
        await exchange.reply(PlainTextResponse(text))

    return handle


def unload_adapter(engine: Engine) -> Handler:
    """The handler that forgets one. Requests that it answers go on."""

    async def handle(exchange: Exchange) -> None:
        fields = parse(exchange.fields, UnloadAdapterFields)
        engine.adapters.remove(fields.lora_name)
        text = f"Success: LoRA adapter '{fields.lora_name}' removed successfully."
        await exchange.reply(PlainTextResponse(text))

    return handle
