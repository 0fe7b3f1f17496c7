"""Train the bundled demo model from text that demo_text composes, and score what was saved.

    python scripts/train_demo.py --out aserve/demo

Seeds, step count and thread count are fixed, so that the same machine and the same torch give the same weights.
Knows tokenizing, packing and training; what the text says is demo_text's, what is asked is tests/demo/questions.py's.
"""

import argparse
import itertools
import math
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from demo_text.compose import Document, documents
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

ROOT: Final = Path(__file__).resolve().parent.parent
QUESTIONS: Final = runpy.run_path(str(ROOT / "tests/demo/questions.py"))
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS: Final = [END_OF_TEXT, TURN_START, TURN_END]
IGNORED: Final = -100  # a label that has no loss
SEED: Final = 20
VOCAB_SIZE: Final = 2048
CONTEXT_LEN: Final = 2048
TOKENS_PER_STEP: Final = 2048
# Most windows are short, so that most documents start near position 0, where most prompts do; some are as long as the
# context, so that every position has been seen.
WINDOW_LENS: Final = (256, 256, 256, 1024, 256, 256, 256, 512, 256, 256, 256, 1024, 256, 256, 256, 2048)
NUM_WAITING: Final = 32  # documents among which a window finds what fits its rest
NUM_STEPS: Final = 4000
PEAK_LR: Final = 2e-3
NUM_WARMUP_STEPS: Final = 100


def main() -> int:
    """Train, save, score. Returns 1 if a fixed question is answered wrongly."""
    args = parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    tokenizer = train_tokenizer()
    model = LlamaForCausalLM(model_config(tokenizer))
    print(f"{model.num_parameters() / 1e6:.2f} M parameters, a vocabulary of {len(tokenizer)} tokens", flush=True)
    train(model, tokenizer, args.steps, args.minutes)
    save(model, tokenizer, args.out)
    num_wrong = score(args.out)
    return 1 if num_wrong else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train aserve's demo model.")
    parser.add_argument("--out", type=Path, default=ROOT / "aserve/demo", help="folder to write the checkpoint to")
    parser.add_argument(
        "--steps", type=int, default=NUM_STEPS, help="optimizer steps; the default makes the bundled model"
    )
    parser.add_argument(
        "--minutes", type=float, help="end the schedule after this time at the latest (not reproducible)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; another number changes rounding")
    return parser.parse_args()


# ---- text to tokens


def held_out_texts() -> frozenset[str]:
    """What the user says in the held-out questions; no training document may contain it."""
    return frozenset(messages[-1]["content"] for messages, _ in QUESTIONS["HELD_OUT"])


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that splits numbers every two digits, so that the operands of a small sum are one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=sorted(alphabet), show_progress=False
    )
    sample = itertools.islice(documents(SEED, held_out_texts()), 20_000)
    tokenizer.train_from_iterator((words_of(d) for d in sample), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=SPECIAL_TOKENS[1:],
        model_max_length=CONTEXT_LEN,
        clean_up_tokenization_spaces=False,
        chat_template=(Path(__file__).parent / "demo_text/chat_template.jinja").read_text().rstrip("\n"),
    )


def words_of(document: Document) -> str:
    """All that a document says, without chat markup."""
    said = [document.text, *(m["content"] for m in document.messages)]
    return "\n".join([*said, *(str(t) for t in document.tools)])


def encode(tokenizer: PreTrainedTokenizerFast, document: Document) -> tuple[list[int], list[int]]:
    """(token ids, labels) of one document; a label is IGNORED where the model would not be the speaker."""
    if document.text:
        ids: list[int] = tokenizer.encode(document.text + END_OF_TEXT, add_special_tokens=False)
        return ids, ids
    text = tokenizer.apply_chat_template(list(document.messages), tools=list(document.tools) or None, tokenize=False)
    ids = tokenizer.encode(text + END_OF_TEXT, add_special_tokens=False)
    return ids, assistant_labels(tokenizer, ids)


def assistant_labels(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[int]:
    """Labels for the answers of the assistant, each with its closing token."""
    header = tokenizer.encode(f"{TURN_START}assistant\n", add_special_tokens=False)
    turn_end = tokenizer.convert_tokens_to_ids(TURN_END)
    labels = [IGNORED] * len(ids)
    answering = False
    for i, token_id in enumerate(ids):
        if answering:
            labels[i] = token_id
            answering = token_id != turn_end
        elif ids[i + 1 - len(header) : i + 1] == header:
            answering = True
    return labels


def windows(
    tokenizer: PreTrainedTokenizerFast, window_len: int, held_out: frozenset[str]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of whole documents, for ever. A document that is longer than a window is left out."""
    encoded = (encode(tokenizer, d) for d in documents(SEED + window_len, held_out))
    fitting = (e for e in encoded if len(e[0]) <= window_len)
    waiting = list(itertools.islice(fitting, NUM_WAITING))
    while True:
        ids: list[int] = []
        labels: list[int] = []
        room = window_len
        chosen: tuple[list[int], list[int]] | None = waiting[0]  # the oldest: nothing waits for ever
        while chosen:
            waiting.remove(chosen)
            waiting.append(next(fitting))
            ids, labels = ids + chosen[0], labels + chosen[1]
            room = window_len - len(ids)
            chosen = max((e for e in waiting if len(e[0]) <= room), key=lambda e: len(e[0]), default=None)
        yield torch.tensor(ids + [tokenizer.pad_token_id] * room), torch.tensor(labels + [IGNORED] * room)


# ---- training


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """A Llama of 3.3 M parameters: 6.7 MB in bfloat16."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_steps: int, minutes: float | None) -> None:
    """AdamW under a cosine schedule, on batches of TOKENS_PER_STEP tokens."""
    held_out = held_out_texts()
    streams = {n: windows(tokenizer, n, held_out) for n in set(WINDOW_LENS)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    start, mean_loss, step = time.monotonic(), math.nan, 0
    while step < num_steps:
        elapsed = (time.monotonic() - start) / 60
        done = max(step / num_steps, elapsed / minutes if minutes else 0.0)
        if done >= 1:
            break
        optimizer.param_groups[0]["lr"] = learning_rate(step, done)
        window_len = WINDOW_LENS[step % len(WINDOW_LENS)]
        loss = train_step(model, optimizer, take(streams[window_len], TOKENS_PER_STEP // window_len))
        mean_loss = loss if math.isnan(mean_loss) else 0.98 * mean_loss + 0.02 * loss
        step += 1
        if step % 100 == 0:
            print(f"step {step}/{num_steps}  loss {mean_loss:.3f}  {elapsed:.1f} min", flush=True)


def learning_rate(step: int, done: float) -> float:
    """Linear warm-up, then a cosine from the peak to zero. done is the finished share of the training."""
    return PEAK_LR * min((step + 1) / NUM_WARMUP_STEPS, 0.5 * (1 + math.cos(math.pi * done)))


def take(stream: Iterator[tuple[Tensor, Tensor]], num: int) -> tuple[Tensor, Tensor]:
    """The next num windows, stacked: (ids, labels), each [num, window_len]."""
    ids, labels = zip(*itertools.islice(stream, num), strict=True)
    return torch.stack(ids), torch.stack(labels)


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    """One update; returns the loss. Scores are computed only where there is a label."""
    ids, labels = batch
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    targets = labels[:, 1:]
    asked = targets != IGNORED
    loss = nn.functional.cross_entropy(model.lm_head(hidden[asked]), targets[asked])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


# ---- the checkpoint


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the weights in bfloat16, the configs and the tokenizer. Each file is replaced in one move."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        eos_token_id=tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT]),
        pad_token_id=tokenizer.pad_token_id,
    )
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            file.chmod(0o644)
            os.replace(file, out / file.name)
    num_bytes = sum(f.stat().st_size for f in out.iterdir())
    print(f"saved {num_bytes / 1e6:.2f} MB to {out}")


def score(folder: Path) -> int:
    """Ask the saved model every fixed question greedily; print the wrong answers and return how many there are."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    num_wrong = 0
    for name in ("QUESTIONS", "HELD_OUT", "STORIES"):
        asked = [(m, expected, answer(model, tokenizer, m)) for m, expected in QUESTIONS[name]]
        wrong = [a for a in asked if not is_right(a[1], a[2])]
        for messages, expected, given in wrong:
            print(f"wrong: {messages[-1]['content']!r}\n  expected {expected!r}\n  answered {given!r}")
        print(f"{name}: {len(asked) - len(wrong)} of {len(asked)} right", flush=True)
        num_wrong += len(wrong)
    return num_wrong


def answer(model: Any, tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """The model's greedy answer."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(**prompt, do_sample=False, temperature=None, top_p=None, max_new_tokens=300)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def is_right(expected: str | tuple[str, ...], given: str) -> bool:
    """A string must be the whole answer; of a tuple every word must be in it."""
    return given == expected if isinstance(expected, str) else all(word in given for word in expected)


if __name__ == "__main__":
    sys.exit(main())
