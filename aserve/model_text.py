"""What a model's folder has for texts: a tokenizer and a chat template, and whether they are of its vocabulary."""

from pathlib import Path

from aserve.core.config import Options
from aserve.core.errors import CheckpointError, ConfigError
from aserve.core.foreign import foreign
from aserve.model_folder import DEMO_FOLDER, DEMO_MODEL
from aserve.models.checkpoint import Checkpoint, resolve_tokenizer
from aserve.text.chat_template import ChatTemplate
from aserve.text.tokenizer import Tokenizer, tokenizer_file


def load_text(options: Options, checkpoint: Checkpoint, vocab_size: int) -> tuple[Tokenizer, ChatTemplate]:
    """Tokenizer and chat template. vocab_size: the model's. Raises `CheckpointError` for what is malformed or amiss."""
    folder = _tokenizer_folder(options, checkpoint)
    with foreign(f"{folder}: the tokenizer"):
        tokenizer = Tokenizer.load(folder)
    with foreign(f"{folder}: the chat template"):
        chat_template = ChatTemplate.load(folder, options.chat_template)
        chat_template.warm_up()
    _check_ids(checkpoint, tokenizer, vocab_size, is_own=options.tokenizer is None)
    return tokenizer, chat_template


def check_text_files(options: Options, checkpoint: Checkpoint) -> None:
    """Raise what `load_text` would for files that are missing or malformed, as far as a moment tells it.

    So a model is refused before its weights are read. A tokenizer that is named apart may have to be fetched: then not.
    """
    if options.tokenizer is not None:
        return
    folder = _tokenizer_folder(options, checkpoint)
    tokenizer_file(folder)
    with foreign(f"{folder}: the chat template"):
        ChatTemplate.load(folder, options.chat_template)


def check_draft_vocabulary(draft: Checkpoint, draft_vocab_size: int, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise `ConfigError` for a draft model whose tokens are not those of the model."""
    if draft_vocab_size != vocab_size:
        raise ConfigError(
            f"speculative_config: the draft model {draft.path} has {draft_vocab_size} tokens, the model {vocab_size}; "
            "they must have one vocabulary"
        )
    if not draft.has_tokenizer:
        return
    with foreign(f"{draft.path}: the tokenizer"):
        others = Tokenizer.load(draft.path).token_strings(range(vocab_size))
    for token_id, (other, own) in enumerate(zip(others, tokenizer.token_strings(range(vocab_size)), strict=True)):
        if other != own:
            raise ConfigError(
                f"speculative_config: token {token_id} is {other!r} to the draft model {draft.path} and {own!r} to the "
                "model; they must have one vocabulary"
            )


def _check_ids(checkpoint: Checkpoint, tokenizer: Tokenizer, vocab_size: int, *, is_own: bool) -> None:
    """Refuse ids that the model has no row for. Tokens added to a vocabulary may be over it: requests are checked.

    is_own: the tokenizer is said to be the model's.
    """
    beyond = sorted(token_id for token_id in checkpoint.eos_ids if token_id >= vocab_size)
    if beyond:
        raise CheckpointError(
            f"{checkpoint.path}: eos_token_id {beyond[0]} is not in [0, {vocab_size}), the vocabulary"
        )
    if is_own and checkpoint.has_tokenizer and tokenizer.num_base_tokens > vocab_size:
        raise CheckpointError(
            f"{checkpoint.path}: tokenizer.json has {tokenizer.num_base_tokens} tokens, but config.json's vocab_size "
            f"is {vocab_size}"
        )


def _tokenizer_folder(options: Options, checkpoint: Checkpoint) -> Path:
    """Random weights from a config alone borrow the demonstration model's tokenizer: text is noise either way."""
    borrows = options.load_format == "dummy" and not checkpoint.has_tokenizer
    if options.tokenizer == DEMO_MODEL or (options.tokenizer is None and borrows):
        return DEMO_FOLDER
    if options.tokenizer is None:
        return checkpoint.path
    return resolve_tokenizer(options.tokenizer, options.revision, options.download_dir)
