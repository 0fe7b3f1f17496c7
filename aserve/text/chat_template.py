"""ChatTemplate: a conversation to the text that the model was trained to go on from.

Renders the checkpoint's own Jinja template as transformers' apply_chat_template does, in a sandbox that bounds what a
hostile template can cost (template_sandbox.py). Templates come from the checkpoint, messages from anybody: whatever
goes wrong here is the request's error. Does not tokenize: the text has its special tokens, add none when encoding it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import jinja2
import msgspec

from aserve.core.errors import ConfigError, ContextLengthError, InvalidRequestError
from aserve.core.rules import check, series, shown, text
from aserve.text.template_budget import TemplateLengthError, TemplateLimitError
from aserve.text.template_sandbox import TemplateSandbox
from aserve.text.tokenizer_config import read_tokenizer_config

MAX_RENDERED_CHARS: Final = 4 * 2**20
MAX_ERROR_CHARS: Final = 200
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
CONTINUE_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the message to continue. The space at its end tells whether the template trims messages."""
TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template's own mistakes, met with these messages, are in Python."""
_MESSAGES: Final = series("a sequence of messages")
ENGINE_VARIABLES: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Names that a request's template variables may not take."""


class ChatTemplate:
    """A checkpoint's templates, compiled in `warm_up` or when first used; safe to use from several threads."""

    def __init__(
        self,
        templates: Mapping[str, str],
        named_tokens: Mapping[str, str],
        *,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        """templates: by name, possibly none. named_tokens: e.g. {"bos_token": "<s>"}, variables of every template."""
        self._sources = templates
        self._named_tokens = dict(named_tokens)
        self._compiled: dict[str, tuple[jinja2.Template, frozenset[str]]] = {}
        self._sandbox = TemplateSandbox(max_chars)

    @classmethod
    def load(cls, folder: str | Path, template_file: str | Path | None = None) -> Self:
        """Read a checkpoint folder. template_file: a Jinja file that takes the place of all the folder's templates.

        Raises `CheckpointError` for malformed files, and `ConfigError` for a template file that cannot be used; a
        folder without a template, or with one that is malformed, is no error.
        """
        config = read_tokenizer_config(Path(folder))
        if template_file is None:
            return cls(config.templates, config.named_tokens)
        try:
            source = Path(template_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: cannot read {template_file}: {error}") from error
        template = cls({"default": source}, config.named_tokens)
        if template.problem is not None:
            raise ConfigError(f"chat_template: {template_file}: {template.problem}")
        return template

    @property
    def source(self) -> str:
        """All templates, one after the other."""
        return "\n".join(self._sources.values())

    @property
    def problem(self) -> str | None:
        """What every chat will be refused for, if there is a template and it cannot be compiled. Compiles it."""
        try:
            self._template(with_tools=False)
        except InvalidRequestError as error:
            return error.message if self._sources else None
        return None

    @property
    def takes_tools(self) -> bool:
        """Whether tools are told to the model. Raises `InvalidRequestError` where there is no template."""
        return "tool_use" in self._sources or "tools" in self._template(with_tools=True)[1]

    def warm_up(self) -> None:
        """Compile the default template, which takes as long as ten steps. One that is malformed says so when used."""
        with suppress(InvalidRequestError):
            self._template(with_tools=False)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = {},
        hints: Mapping[str, Any] = {},
        max_chars: int | None = None,
        roles: Sequence[str] = ROLES,
    ) -> str:
        """The prompt of a conversation. roles: those that messages may have.

        tools: in the API's words, for a template that reads them.

        continue_final_message: end inside the last message, which the model is to continue.
        max_chars: a longer one is a `ContextLengthError`.
        variables: more template variables, such as enable_thinking; only ones that the template reads.
        hints: others, which a template that does not read them may pass over.
        Raises `InvalidRequestError`: param "messages" for what the messages or the template are to blame for, else the
        field at fault.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        template, _ = self._template(with_tools=tools is not None)
        for complaint in self.unread(variables, with_tools=tools is not None).values():
            raise InvalidRequestError(complaint, "chat_template_kwargs")
        settable = self._settable(with_tools=tools is not None)
        turns = [_turn(index, message, roles) for index, message in enumerate(check("messages", _MESSAGES, messages))]
        if not turns:
            raise InvalidRequestError("messages is empty", "messages")
        if continue_final_message:
            _tag_final(turns)
        context = {
            **self._named_tokens,
            **{name: value for name, value in hints.items() if name in settable},
            **variables,
            "messages": turns,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._rendered(template, context, max_chars)
        return _cut_at_tag(text) if continue_final_message else text

    def unread(self, names: Iterable[str], *, with_tools: bool) -> dict[str, str]:
        """Those that are none of the template's variables, and what is said of each.

        Raises `InvalidRequestError` where there is no template.
        """
        settable = self._settable(with_tools=with_tools)
        known = ", ".join(sorted(settable)) or "none"
        return {
            name: f"the chat template takes no variable {name!r} (it takes: {known})"
            for name in names
            if name not in settable
        }

    def _settable(self, *, with_tools: bool) -> frozenset[str]:
        return self._template(with_tools=with_tools)[1] - self._named_tokens.keys() - ENGINE_VARIABLES

    def _rendered(self, template: jinja2.Template, context: Mapping[str, Any], max_chars: int | None) -> str:
        try:
            return self._sandbox.render(template, context, max_chars)
        except TemplateLengthError as error:
            raise ContextLengthError(f"the conversation has over {error.max_chars} characters", "messages") from error
        except TemplateLimitError as error:
            raise InvalidRequestError(f"the chat template was stopped: {error}", "messages") from error
        except TEMPLATE_ERRORS as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {_line(error)}", "messages"
            ) from error

    def _template(self, *, with_tools: bool) -> tuple[jinja2.Template, frozenset[str]]:
        """The compiled template and the variables it reads; with tools, the "tool_use" one where there is one."""
        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise InvalidRequestError(
                "the model has no chat template; use /v1/completions, or a chat-tuned checkpoint", "messages"
            )
        if name not in self._compiled:
            source = self._sources[name]
            try:
                self._compiled[name] = self._sandbox.compile_template(source), self._sandbox.variables(source)
            except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
                raise InvalidRequestError(
                    f"the model's chat template is malformed: {_line(error)}", "messages"
                ) from error
        return self._compiled[name]


def _line(error: Exception) -> str:
    """The error in one line, cut: a template's own message may quote the whole conversation."""
    return " ".join(str(error).split())[:MAX_ERROR_CHARS]


def _turn(index: int, message: Mapping[str, Any], roles: Sequence[str]) -> dict[str, Any]:
    """A message as templates expect it: content is one text, and what is null is left out."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"messages[{index}] must be a mapping with role and content, got {shown(message)}", "messages"
        )
    role = message.get("role")
    if role not in roles:
        raise InvalidRequestError(
            f"messages[{index}].role must be one of {', '.join(roles)}, got {shown(role)}", "messages"
        )
    turn = {name: value for name, value in message.items() if value is not None}
    turn |= {"role": text(role), "content": _text_content(index, message)}
    thoughts = turn.get("reasoning") or turn.get("reasoning_content")
    if thoughts:  # templates call them one or the other, and gpt-oss's has them in place of content
        turn |= {"reasoning": thoughts, "reasoning_content": thoughts}
        turn |= {} if turn["content"] else {"thinking": thoughts}
    if turn.get("tool_calls"):
        turn["tool_calls"] = [_call(call) for call in turn["tool_calls"]]
    return turn


def _call(call: Any) -> Any:
    """A call as templates expect it: its arguments are a mapping, where they are the JSON of one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _text_content(index: int, message: Mapping[str, Any]) -> str | None:
    content = message.get("content")
    is_assistant = message["role"] == "assistant"
    if isinstance(content, str) or (content is None and is_assistant):
        told = text(content or "")
    elif isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        told = "\n".join(_part_texts(index, content))
    else:
        raise InvalidRequestError(
            f"messages[{index}].content must be a string or a list of parts, got {shown(content)}", "messages"
        )
    # Templates test for null to tell a call from an answer; clients that add up a stream have "" there.
    return None if is_assistant and message.get("tool_calls") and not told else told


def _part_texts(index: int, parts: Sequence[Any]) -> Iterator[str]:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise InvalidRequestError(
                f"messages[{index}].content: a part of type {shown(kind)} is not supported, only text is", "messages"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f'messages[{index}].content: a text part needs a string "text"', "messages")
        yield part["text"]


def _tag_final(turns: list[dict[str, Any]]) -> None:
    if not turns[-1]["content"]:
        raise InvalidRequestError("continue_final_message: the last message has no text to continue", "messages")
    turns[-1]["content"] += CONTINUE_TAG


def _cut_at_tag(text: str) -> str:
    """The text up to the end of the tagged message; where the template trimmed the message, trim it here too."""
    end = text.rfind(CONTINUE_TAG.strip())
    if end < 0:
        raise InvalidRequestError("continue_final_message: the template drops the last message", "messages")
    return text[:end] if text.startswith(CONTINUE_TAG, end) else text[:end].rstrip()
