"""Texts: a model's tokenizer and chat template, worked within bounds that are looked at first, and off the event loop.

    messages --> template --> text --> too many characters? --> its pieces, too many tokens? --> token ids --> too many?
                                       yes: 400, and nothing    yes: 400, and twice the context   yes: 400
                                       was tokenized            was tokenized

So a text that cannot fit costs what its context costs, however long it is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Unpack

from aserve.core.answer_events import AnswerParser
from aserve.core.config import ModelInfo
from aserve.core.errors import ContextLengthError, InvalidRequestError
from aserve.core.pooling import InputTerms, TokenizedInput, checked_terms
from aserve.core.rules import check, flag, integers
from aserve.core.rules import text as a_text
from aserve.core.structured import ThoughtRules
from aserve.intake import check_ids, check_input, check_room, prompt_ids
from aserve.text.chat_template import ChatTemplate
from aserve.text.formats.choice import answer_format, thought_markers
from aserve.text.formats.families import CHANNELS
from aserve.text.formats.parser import parser_of
from aserve.text.formats.reading import Schemas
from aserve.text.formats.syntax import AnswerFormat
from aserve.text.inputs import Cut, TextInput, cut_ids, tokenized
from aserve.text.tokenizer import Tokenizer
from aserve.workers import Workers

OFF_LOOP_CHARS: Final = 2048
"""Texts longer than this are tokenized in a thread; below it the hop costs more than the work."""
MAX_TEXT_CHARS: Final = 2**20
"""Of a text that need not fit the context, unless a longer one could: about a second of tokenizing."""
MAX_BATCH_TOKENS: Final = 2**18
"""Of several prompts of token ids in one request, unless the context has more."""
MAX_DECODED_TOKENS: Final = 2**17
"""Of tokens that are decoded, unless the context has more."""
MEASURED_CHARS_PER_TOKEN: Final = 8
"""A prompt with more for each token of the context is measured first, at the price of tokenizing it twice if it fits:
ordinary text has 4."""
CHAR_BYTES: Final = 4
"""Of a character in UTF-8 at most."""
ESCAPED_CHAR_BYTES: Final = 12
"""Of one in JSON, where it may be two escapes."""
PIECE_CHARS: Final = 16 * 1024
"""What is measured at a time, in a few milliseconds."""
INPUTS_AT_ONCE: Final = 64
"""Texts that a thread tokenizes before it looks whether anybody waits for them."""
TAIL_TOKENS: Final = 16
"""Of a prompt, in which the marker is that begins a thought."""


class Texts:
    """Of one engine. info: its model's."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate, info: ModelInfo, workers: Workers) -> None:
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._info = info
        self._workers = workers
        per_token = tokenizer.max_chars_per_token
        self._max_prompt_chars = None if per_token is None else per_token * info.max_model_len
        self._max_chars = max(MAX_TEXT_CHARS, self._max_prompt_chars or 0)
        self._max_batch = max(MAX_BATCH_TOKENS, info.max_model_len)
        self._max_decoded = max(MAX_DECODED_TOKENS, info.max_model_len)
        self._decodable = f"a sequence of at most {self._max_decoded} token ids"

    def check_length(self, prompt: str | Sequence[int], param: str = "prompt") -> None:
        """Raise for a prompt that cannot fit, as far as its length tells, or has ids that are none."""
        if not isinstance(prompt, str):
            check_room(self._info, len(prompt), param)
            check_ids(param, prompt, self._info.vocab_size)
        elif self._max_prompt_chars is not None and len(prompt) > self._max_prompt_chars:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} characters, and no more than {self._max_prompt_chars} can fit: "
                f"the context is {self._info.max_model_len} tokens",
                param,
            )

    def check_num_ids(self, num_ids: int) -> None:
        """Raise `ContextLengthError` for a prompt of so many token ids, where they cannot fit."""
        check_room(self._info, num_ids)

    def check_batch(self, num_ids: int) -> None:
        """Raise `InvalidRequestError` for prompts with so many token ids together, where those are too many."""
        if num_ids > self._max_batch:
            raise InvalidRequestError(
                f"prompt: at most {self._max_batch} token ids in all prompts together, got {num_ids}", "prompt"
            )

    def check_json(self, prompt: bytes, *, must_fit: bool) -> None:
        """Raise what `encode` does for a text that is too long, by its length as a JSON string."""
        num_chars = len(prompt) // (ESCAPED_CHAR_BYTES if b"\\u" in prompt else CHAR_BYTES)
        if must_fit and self._max_prompt_chars is not None and num_chars > self._max_prompt_chars:
            raise ContextLengthError(
                f"the prompt has over {num_chars} characters, and no more than {self._max_prompt_chars} can fit: "
                f"the context is {self._info.max_model_len} tokens",
                "prompt",
            )
        if not must_fit and num_chars > self._max_chars:
            raise InvalidRequestError(
                f"prompt: at most {self._max_chars} characters are tokenized, got over {num_chars}", "prompt"
            )

    def check_num_decoded(self, token_ids: Sequence[int]) -> None:
        """Raise `InvalidRequestError` for more tokens than are decoded at a time."""
        if len(token_ids) > self._max_decoded:
            raise InvalidRequestError(f"tokens must be {self._decodable}, got {len(token_ids)} of them", "tokens")

    def tokenizer_info(self) -> dict[str, Any]:
        """What a tokenizer_config.json would say of the tokenizer and its chat template."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._info.max_model_len,
            **self.tokenizer.info(),
            "chat_template": self._chat_template.source or None,
        }

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, must_fit: bool = False, param: str = "prompt"
    ) -> tuple[int, ...]:
        """Token ids of a text.

        must_fit: it is a prompt, and one that leaves no room to answer is a `ContextLengthError`, as soon as that is
        known. Raises `InvalidRequestError`, naming `param`, for what is no text, or longer than any that is tokenized.
        """
        text = check("text", a_text, text)
        add_special_tokens = check("add_special_tokens", flag, add_special_tokens)
        if must_fit:
            self.check_length(text, param)
            await self._measure(text, param)
        elif len(text) > self._max_chars:
            raise InvalidRequestError(
                f"{param}: at most {self._max_chars} characters are tokenized, got {len(text)}", param
            )
        if len(text) <= OFF_LOOP_CHARS:
            token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, param=param)
        else:
            token_ids = await self._workers.run(
                self.tokenizer.encode, text, add_special_tokens=add_special_tokens, param=param
            )
        if must_fit:
            check_room(self._info, len(token_ids), param)
        return token_ids

    async def encode_inputs(
        self, inputs: Sequence[str | Sequence[int]], params: Sequence[str], **terms: Unpack[InputTerms]
    ) -> list[TokenizedInput]:
        """Texts and token ids, as a model that pools takes them. params: what each is called in errors.

        Raises `ContextLengthError` for one that is too long, and `InvalidRequestError` for what is no text and no ids.
        """
        terms = checked_terms(terms)
        cut = self._cut(terms)
        found: dict[int, TokenizedInput] = {}
        of_text: dict[int, str] = {}
        for index, (given, param) in enumerate(zip(inputs, params, strict=True)):
            if isinstance(given, str):
                of_text[index] = given
                continue
            token_ids = cut_ids(prompt_ids(given, param), cut)
            check_ids(param, token_ids, self._info.vocab_size)
            found[index] = TokenizedInput(token_ids)
        names = [params[index] for index in of_text]
        encoded = await self._encoded(list(of_text.values()), names, terms.get("add_special_tokens", True), cut)
        found.update(zip(of_text, encoded, strict=True))
        tokens = [found[index] for index in range(len(inputs))]
        for each, param in zip(tokens, params, strict=True):
            check_input(self._info, len(each.token_ids), param)
        return tokens

    async def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        params: Sequence[str],
        *,
        variables: Mapping[str, Any] = MappingProxyType({}),
        **terms: Unpack[InputTerms],
    ) -> list[TokenizedInput]:
        """Queries with documents: as one text by the chat template where one was given for them, else side by side.

        params, variables: what each pair is called in errors; of the template. Otherwise as `encode_inputs`.
        """
        terms = checked_terms(terms)
        cut = self._cut(terms)
        pooling = self._info.pooling
        inputs: list[TextInput] = list(pairs)
        special = terms.get("add_special_tokens", True)
        if pooling is not None and pooling.takes_templates:
            special = False
            inputs = list(await self._workers.run(self._written, pairs, variables))
        elif variables:
            raise InvalidRequestError(
                "instruction and chat_template_kwargs are for a template of pairs: start aserve with --chat-template",
                "chat_template_kwargs",
            )
        tokens = await self._encoded(inputs, params, special, cut)
        for each, param in zip(tokens, params, strict=True):
            check_input(self._info, len(each.token_ids), param)
        return tokens

    def _written(self, pairs: Sequence[tuple[str, str]], variables: Mapping[str, Any]) -> list[str]:
        return [
            self._chat_template.render(
                [{"role": "query", "content": query}, {"role": "document", "content": document}],
                add_generation_prompt=False,
                variables=variables,
                max_chars=self._max_chars,
                roles=("query", "document"),
            )
            for query, document in pairs
        ]

    def _cut(self, terms: InputTerms) -> Cut | None:
        limit = terms.get("truncate_prompt_tokens")
        if limit is None:
            return None
        most = self._info.max_model_len
        return Cut(most if limit == -1 else min(limit, most), terms.get("truncation_side", "right"))

    async def _encoded(
        self, inputs: Sequence[TextInput], params: Sequence[str], special: bool, cut: Cut | None
    ) -> list[TokenizedInput]:
        """Tokenized, in a thread where they are long together, and no more than a thread's worth at a time."""
        lens = [len(text) if isinstance(text, str) else len(text[0]) + len(text[1]) for text in inputs]
        for text, param, num_chars in zip(inputs, params, lens, strict=True):
            if cut is not None and num_chars > self._max_chars:
                raise InvalidRequestError(
                    f"{param}: at most {self._max_chars} characters are tokenized, got {num_chars}", param
                )
            if cut is None and num_chars > MEASURED_CHARS_PER_TOKEN * self._info.max_model_len:
                whole = text if isinstance(text, str) else "".join(text)
                self.check_length(whole, param)
                await self._measure(whole, param)
        if sum(lens) <= OFF_LOOP_CHARS:
            return tokenized(self.tokenizer, inputs, params, special=special, cut=cut)
        found: list[TokenizedInput] = []
        for start in range(0, len(inputs), INPUTS_AT_ONCE):
            part = slice(start, start + INPUTS_AT_ONCE)
            encode = partial(tokenized, self.tokenizer, inputs[part], params[part], special=special, cut=cut)
            found += await self._workers.run(encode)
        return found

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
        hints: Mapping[str, Any] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = False,
        must_fit: bool = False,
    ) -> tuple[int, ...]:
        """Token ids of a conversation; see `ChatTemplate.render` and `encode`. Raises for tools it does not take."""
        if tools is not None and not self._chat_template.takes_tools:
            raise InvalidRequestError("the model's chat template takes no tools", "tools")
        num_chars = 0 if must_fit else sum(_num_chars(message.get("content")) for message in messages)
        if num_chars > self._max_chars:  # told before it is rendered, which takes longer
            raise ContextLengthError(f"the conversation has over {self._max_chars} characters", "messages")
        text = await self._workers.run(
            self._chat_template.render,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            hints=hints,
            tools=tools,
            max_chars=self._max_prompt_chars if must_fit else self._max_chars,
        )
        return await self.encode(text, add_special_tokens=add_special_tokens, must_fit=must_fit, param="messages")

    def unread_variables(self, names: Iterable[str], *, with_tools: bool) -> dict[str, str]:
        """Those of `variables` that the chat template does not take; see `ChatTemplate.unread`."""
        return self._chat_template.unread(names, with_tools=with_tools)

    def has_role(self, role: str) -> bool:
        """Whether the chat template knows messages of a role that not all templates have."""
        return role in self._chat_template.source

    def format(self, *, with_calls: bool, is_bare: bool = False) -> AnswerFormat | None:
        """How the model's answers are read; see `answer_format`."""
        return answer_format(self._info, with_calls=with_calls, is_bare=is_bare)

    def parsers(self, format: AnswerFormat, schemas: Schemas, prompt: Sequence[int]) -> Callable[[], AnswerParser]:
        """Makes a parser for each answer to a prompt. schemas: of the tools that may be called."""
        in_thought = self.begins_thought(prompt) and format.channels is None
        return lambda: parser_of(format, schemas, in_thought=in_thought)

    def begins_thought(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends where a thought has just begun, as many a chat template has it."""
        if (thoughts := thought_markers(self._info)) is None:
            return False
        return self.tokenizer.decode(prompt[-TAIL_TOKENS:]).rstrip().endswith(thoughts.begin)

    def thoughts_before(self, prompt: Sequence[int]) -> ThoughtRules | None:
        """What may come before the structure of an answer; None where the prompt says that it thinks no more."""
        name, thoughts = self._info.thought_format, thought_markers(self._info)
        if name is None or thoughts is None:
            return None
        in_thought = self.begins_thought(prompt)
        has_ended = self.tokenizer.decode(prompt[-TAIL_TOKENS:]).rstrip().endswith(thoughts.end)
        return None if has_ended and name not in CHANNELS else ThoughtRules(format=name, in_thought=in_thought)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids. Raises `InvalidRequestError` for an id outside the vocabulary, and for too many."""
        skip_special_tokens = check("skip_special_tokens", flag, skip_special_tokens)
        given = check("tokens", integers(at_most=self._max_decoded, allowed=self._decodable), token_ids)

        def check_and_decode() -> str:
            check_ids("tokens", given, self._info.vocab_size)
            return self.tokenizer.decode(given, skip_special_tokens=skip_special_tokens)

        return await self._workers.run(check_and_decode)

    async def _measure(self, text: str, param: str) -> None:
        """Raise `ContextLengthError` for a text whose pieces have twice the tokens that the context has.

        A cut changes the few tokens around it, and so do all cuts together: they cannot double what there is. Where
        pieces have fewer tokens than that, nothing is said.
        """
        max_tokens = self._info.max_model_len
        if len(text) <= MEASURED_CHARS_PER_TOKEN * max_tokens:
            return
        num_tokens = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            num_tokens += await self._workers.run(self.tokenizer.count, piece, param=param)
            if num_tokens > 2 * max_tokens:
                raise ContextLengthError(
                    f"the prompt has {len(text)} characters, and {num_tokens} tokens in the first "
                    f"{start + len(piece)} of them: the context is {max_tokens} tokens",
                    param,
                )


def _num_chars(content: object) -> int:
    """Of a message's text, or of all its parts'."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Mapping):
        return _num_chars(content.get("text"))
    return sum(map(_num_chars, content)) if isinstance(content, list | tuple) else 0
