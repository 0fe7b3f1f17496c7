"""What a checkpoint folder says about its tokenizer beside tokenizer.json: named tokens, added tokens, chat templates.

Knows the files and which of them wins, as transformers 5 decides it; does not know what a token or a template is for.

    tokenizer_config.json            named tokens, added_tokens_decoder, chat_template (one, or a list of named ones)
    special_tokens_map.json          named tokens of older checkpoints; read only where there is no added_tokens_decoder
    chat_template.jinja              the default template; with additional_chat_templates/ it replaces the config's
    additional_chat_templates/*.jinja    templates by name
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from aserve.core.errors import CheckpointError

NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class AddedToken(msgspec.Struct, frozen=True):
    """A token outside the model's own vocabulary, with the flags of `tokenizers.AddedToken`."""

    content: str
    special: bool = False
    normalized: bool = True
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False


class TokenizerConfig(msgspec.Struct, frozen=True):
    """named_tokens: e.g. {"bos_token": "<s>"}. special_tokens: others that are special too (an image token, say).

    added_tokens: by ascending id. templates: chat templates by name; the usual one is "default".
    response_template: how answers are to be read, as transformers has it; None where nothing is said.
    """

    named_tokens: Mapping[str, str]
    special_tokens: tuple[str, ...]
    added_tokens: tuple[AddedToken, ...]
    templates: Mapping[str, str]
    response_template: Any = None


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Read all of the above; a missing file is an empty one. Raises `CheckpointError` for a file that is malformed."""
    raw = _read_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in raw:
        raw |= _read_object(folder / "special_tokens_map.json")
    try:
        added = msgspec.convert(raw.get("added_tokens_decoder", {}), dict[int, AddedToken], strict=False)
        return TokenizerConfig(
            named_tokens={name: text for name in NAMED_TOKENS if (text := _content(raw.get(name))) is not None},
            special_tokens=tuple(_other_special_tokens(raw)),
            added_tokens=tuple(token for _, token in sorted(added.items())),
            templates=_template_files(folder) or _config_templates(raw.get("chat_template")),
            response_template=raw.get("response_template"),
        )
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not a JSON object ({error})") from error


def _content(token: Any) -> str | None:
    """A named token is written as its text, or as an object whose "content" is its text."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _other_special_tokens(raw: Mapping[str, Any]) -> Iterator[str]:
    listed = raw.get("extra_special_tokens") or raw.get("additional_special_tokens") or ()
    values = list(listed.values() if isinstance(listed, dict) else listed)
    values += [value for name, value in raw.items() if name.endswith("_token") and name not in NAMED_TOKENS]
    yield from (text for value in values if (text := _content(value)) is not None)


def _template_files(folder: Path) -> dict[str, str]:
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (default := folder / "chat_template.jinja").is_file():
        paths["default"] = default
    try:
        return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{folder}: a chat template is not UTF-8 ({error})") from error


def _config_templates(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    return {named.name: named.template for named in msgspec.convert(value, list[_NamedTemplate])}


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str
