"""Try every decoder that the installed transformers knows, and say of each whether aserve gives its tokens.

Of each model type a tiny checkpoint of random weights is written, with windows, caps, experts and latent heads where
its config has them. transformers' greedy answers to prompts on both sides of the windows are compared with those of the
whole engine, which computes them in one batch, in chunks. What comes of a type:

    right        all tokens are equal
    refused      aserve says in one line why it does not serve it
    untried      transformers itself cannot make or run it from its shrunken config
    wrong        a token differs
    traceback    aserve raised what is no refusal, or the process ended or took too long

Every type has a process of its own, with a limit of time and of memory.

    python scripts/sweep_architectures.py                     # all of them: 10 to 20 minutes on 2 cores
    python scripts/sweep_architectures.py llama phimoe moshi

The exit status is 1 where any is wrong or a traceback.
"""

import argparse
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aserve import LLM
from aserve.core.errors import CheckpointError, ConfigError
from aserve.core.foreign import first_line
from aserve.core.params import SamplingParams

RIGHT, REFUSED, UNTRIED, WRONG, TRACEBACK = OUTCOMES = ("right", "refused", "untried", "wrong", "traceback")
BAD: Final = {WRONG, TRACEBACK}
TIMEOUT_S: Final = 120.0
MEMORY_BYTES: Final = 6 * 2**30
"""Beyond what the parent has mapped."""
PROMPT_LENS: Final = (3, 23, 40, 100)
NUM_NEW: Final = 8
VOCAB_SIZE: Final = 320
WINDOW: Final = 24

SHAPE: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    **dict.fromkeys(
        ("hidden_size", "word_embed_proj_dim", "embedding_size", "d_embed", "hidden_size_per_layer_input"), 32
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_intermediate_size"), 48
    ),
    **dict.fromkeys(("n_inner", "d_ff", "d_inner", "ffn_hidden_size", "dense_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 8,
    **dict.fromkeys(("sliding_window", "attention_window_size", "sliding_window_size"), WINDOW),
    "attention_chunk_size": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), 5.0),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    "query_pre_attn_scalar": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_kv_shared_layers": 0,
    "layer_types": None,
    "layers_block_type": None,
    "rope_scaling": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "is_decoder": True,
    "rotary_dim": 8,
    "attention_types": [[["global", "local"], 2]],
    "default_language": "en_XX",
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "dropout": 0.0,
}
"""What of a config is made small, or switched on, by its own or its common name."""

LATENT: Final[Mapping[str, Any]] = {"num_key_value_heads": 4}
"""The same of configs with latent attention, whose keys and values come to be of as many heads as the queries."""

Answers = list[list[int]]


class Verdict(NamedTuple):
    """One type's outcome, and why."""

    model_type: str
    outcome: str
    reason: str


def model_types() -> list[str]:
    """Every type that transformers has a decoder for."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def shrunken(config_class: Any) -> Any:
    """A config of this class, tiny, its parts too."""
    default = config_class()
    names = {
        **{name: name for name in default.to_dict()},
        **{own: common for common, own in default.attribute_map.items()},
    }
    shape = {**SHAPE, **LATENT} if "kv_lora_rank" in names else SHAPE
    values = {own: shape[common] for own, common in names.items() if common in shape}
    if "kv_lora_rank" in names:
        values.pop("head_dim", None)  # follows from the parts
    values = {own: value for own, value in values.items() if not isinstance(getattr(config_class, own, None), property)}
    if values.get("layer_types", default) is None and getattr(default, "layer_types", None):
        values["layer_types"] = some_of(default.layer_types, SHAPE["num_hidden_layers"])
    for part, part_class in getattr(config_class, "sub_configs", {}).items():
        if part_class is not AutoConfig and getattr(default, part, None) is not None:
            values[part] = shrunken(part_class).to_dict()
        elif getattr(default, part, None) is not None:
            values[part] = shrunken(type(getattr(default, part))).to_dict()
    return config_class(**values)


def some_of(kinds: Sequence[str], number: int) -> list[str]:
    """The first of them, the last replaced so that one is there of a kind that only comes later."""
    first = list(kinds[:number])
    later = [kind for kind in kinds if kind not in first]
    return first[: number - 1] + later[:1] if later else first


def write_checkpoint(folder: Path, model_type: str) -> None:
    """Random weights, large enough that greedy choices differ clearly, biases and norms too."""
    config = shrunken(transformers.CONFIG_MAPPING[model_type])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + 0.2 * noise if parameter.dim() == 1 else 0.25 * noise)
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(folder)


def prompts() -> Answers:
    """Token ids, special ones apart."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(10, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENS]


def their_answers(folder: Path) -> Answers:
    """transformers' own, one by one, by its plainest attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0
            )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


def our_answers(folder: Path) -> Answers:
    """The engine's, all in one batch, the longest prompt in chunks."""
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    with LLM(
        str(folder),
        tokenizer="demo",
        device="cpu",
        dtype="float32",
        kv_cache_memory_bytes=2**26,
        max_num_batched_tokens=48,
        generation_config="none",
    ) as llm:
        return [list(answer.token_ids) for answer in llm.generate(prompts(), params, use_tqdm=False)]


def judge(model_type: str, folder: Path) -> Verdict:
    """Try one type, in this process. Writes to the folder."""
    try:
        write_checkpoint(folder, model_type)
        theirs = their_answers(folder)
    except Exception as error:
        return Verdict(model_type, UNTRIED, f"{type(error).__name__}: {first_line(error)}")
    try:
        ours = our_answers(folder)
    except (CheckpointError, ConfigError) as error:
        return Verdict(model_type, REFUSED, error.message.replace(f"{folder}: ", ""))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Verdict(
            model_type, TRACEBACK, f"{type(error).__name__} at {place.filename}:{place.lineno}: {first_line(error)}"
        )
    differing = [len(prompt) for prompt, one, other in zip(prompts(), ours, theirs, strict=True) if one != other]
    if differing:
        return Verdict(model_type, WRONG, f"after prompts of {', '.join(map(str, differing))} tokens")
    return Verdict(model_type, RIGHT, "")


def _judge_in_child(model_type: str, folder: Path, pipe: multiprocessing.connection.Connection) -> None:
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))
    torch.set_num_threads(1)
    pipe.send(judge(model_type, folder))


def judge_apart(model_type: str, timeout_s: float = TIMEOUT_S) -> Verdict:
    """The verdict of a process of its own, forked from this one: transformers is imported once."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        child = context.Process(target=_judge_in_child, args=(model_type, Path(folder), theirs))
        child.start()
        theirs.close()
        try:
            if not ours.poll(timeout_s):
                return Verdict(model_type, TRACEBACK, f"no answer after {timeout_s:g} s")
            verdict: Verdict = ours.recv()
            return verdict
        except EOFError:
            child.join()
            code = child.exitcode or 0
            return Verdict(
                model_type, TRACEBACK, f"ended by {signal.Signals(-code).name if code < 0 else f'exit {code}'}"
            )
        finally:
            child.kill()
            child.join()


def sweep(types: Sequence[str], timeout_s: float = TIMEOUT_S) -> Iterator[Verdict]:
    """The verdict of each, one after the other."""
    for model_type in types:
        yield judge_apart(model_type, timeout_s)


def table(verdicts: Sequence[Verdict]) -> str:
    """A line for each, by outcome, and the counts."""
    width = max(len(verdict.model_type) for verdict in verdicts)
    lines = [
        f"{verdict.outcome:<10} {verdict.model_type:<{width}}  {verdict.reason}".rstrip()
        for verdict in sorted(verdicts, key=lambda verdict: (OUTCOMES.index(verdict.outcome), verdict.model_type))
    ]
    counts = Counter(verdict.outcome for verdict in verdicts)
    lines.append(
        f"transformers {transformers.__version__}: " + ", ".join(f"{counts[name]} {name}" for name in OUTCOMES)
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types of transformers; all by default")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help="of one type")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    verdicts = []
    for verdict in sweep(args.types or model_types(), args.timeout):
        verdicts.append(verdict)
        print(f"{len(verdicts)} {verdict.model_type}: {verdict.outcome}", file=sys.stderr, flush=True)
    print(table(verdicts))
    return 1 if BAD & {verdict.outcome for verdict in verdicts} else 0


if __name__ == "__main__":
    sys.exit(main())
