"""A whole engine without a model: a real scheduler, tokenizer and chat template over a scripted runner. No torch.

The tokenizer is byte-level: a token for each byte (0 to 255), and the special tokens EOS, SYSTEM, USER, ASSISTANT.
"""

from collections.abc import Callable, Sequence
from typing import Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from aserve.core.config import EngineConfig, ModelInfo
from aserve.core.params import DEFAULT_MAX_LOGPROBS
from aserve.core.pooling import Pooling
from aserve.engine import Engine, EngineParts, Loader, Progress
from aserve.scheduler.scheduler import Scheduler
from aserve.text.chat_template import ChatTemplate
from aserve.text.tokenizer import Tokenizer
from aserve.text.tokenizer_config import TokenizerConfig
from tests.fakes import FakePooler, FakeScript, ScriptedRunner

EOS: Final = 256
SPECIAL_TOKENS: Final = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE: Final = 256 + len(SPECIAL_TOKENS)
TEMPLATE: Final = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(special_tokens: Sequence[str] = SPECIAL_TOKENS) -> Tokenizer:
    """A tokenizer whose ids are the bytes themselves, and the special tokens after them."""
    spelled = dict(zip(range(256), byte_characters(), strict=True))
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: byte for byte, char in spelled.items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special_tokens])
    return Tokenizer(backend, TokenizerConfig({"eos_token": SPECIAL_TOKENS[0]}, (), (), {}))


def byte_characters() -> list[str]:
    """GPT-2's spelling of each byte: itself where it can be seen, else the next unused character from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(unseen)) for byte in range(256)]


def says(text: str) -> tuple[int, ...]:
    """The token ids of an answer: the bytes of `text`, and the end."""
    return (*text.encode(), EOS)


def scripted_loader(
    answer: Sequence[int] = says("Hello, world!"),
    *,
    runner: ScriptedRunner | None = None,
    names: tuple[str, ...] = ("scripted", "also/scripted"),
    max_model_len: int = 128,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    template: str = TEMPLATE,
    call_format: str | None = None,
    thought_format: str | None = None,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    pooling: Pooling | None = None,
    max_logprobs: int = DEFAULT_MAX_LOGPROBS,
) -> Loader:
    """A loader of an engine in which every request is answered by `answer`, over and over until it ends.

    runner: to be used instead of one that follows the script. special_tokens: begin with SPECIAL_TOKENS. pooling: what
    it makes of inputs, by a FakePooler, in place of answers.
    """

    def load(report: Callable[[Progress], None]) -> EngineParts:
        report(Progress("weights", 1, 1))
        config = EngineConfig(
            block_size=8,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            watermark=0.0,
            enable_prefix_caching=True,
        )
        return EngineParts(
            info=ModelInfo(
                names=names,
                root="/models/scripted",
                vocab_size=256 + len(special_tokens),
                max_model_len=max_model_len,
                eos_ids=frozenset({EOS}),
                created_s=1_700_000_000,
                call_format=call_format,
                thought_format=thought_format,
                pooling=pooling,
                max_logprobs=max_logprobs,
            ),
            config=config,
            scheduler=Scheduler(
                block_size=config.block_size,
                num_blocks=config.num_blocks,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len + (pooling is not None),
                watermark=config.watermark,
            ),
            runner=runner or ScriptedRunner(model=FakeScript(answer) if pooling is None else FakePooler()),
            tokenizer=byte_tokenizer(special_tokens),
            chat_template=ChatTemplate({"default": template}, {}),
        )

    return load


def scripted_engine(answer: Sequence[int] = says("Hello, world!"), **loader_options: object) -> Engine:
    """An engine that is not entered yet. loader_options: of `scripted_loader`."""
    return Engine(scripted_loader(answer, **loader_options))
