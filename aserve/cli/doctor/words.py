"""A plan in words for somebody who has never run a model."""

import textwrap
from collections.abc import Iterator
from typing import Final

from aserve.cli.doctor.machine import Kernels, size
from aserve.cli.doctor.plan import KVPlan, Machine, Plan

NAMED: Final = 13
"""Columns of what a line is about."""


def in_words(plan: Plan, width: int, *, has_options: bool = False) -> str:
    """Lines of so many columns at most. has_options: more than the model was given."""
    lines = [*textwrap.wrap(f"{plan.model} on this machine, {_machine(plan.machine)}", max(30, width)), ""]
    for name, told in _told(plan):
        wrapped = textwrap.wrap(told, max(30, width - NAMED), break_on_hyphens=False)
        lines += [f"{name if i == 0 else '':{NAMED}}{line}" for i, line in enumerate(wrapped)]
    lines.append("")
    if not plan.problems:
        lines.append("Nothing is missing.")
    for problem in plan.problems:
        helps = f" What helps: {problem.help}." if problem.help else ""
        told = f"{'It cannot run so' if problem.stops else 'Note'}: {problem.what}.{helps}"
        lines += textwrap.wrap(told, max(30, width), break_on_hyphens=False)
    if plan.can_run:
        lines.append(f"Start it with: aserve serve {plan.model}{' and the same options' if has_options else ''}")
    return "\n".join(lines)


def _machine(machine: Machine) -> str:
    kind = f"a GPU ({machine.name})" if machine.device == "cuda" else f"on the CPU ({machine.name})"
    return f"{kind}, {size(machine.free_bytes)} of {size(machine.total_bytes)} of memory free"


def _told(plan: Plan) -> Iterator[tuple[str, str]]:
    """What each line is about, and what it says."""
    weights, about = plan.weights, "" if plan.is_exact else "about "
    by = "aserve's own code" if plan.is_native else "transformers, which is slower than aserve's own code"
    yield "Model", f"{plan.architecture}, {_count(weights.num_parameters)} parameters, computed by {by}"
    kept = plan.dtype if plan.quantization is None else f"{plan.quantization} (embeddings as {plan.dtype})"
    yield "Weights", f"{about}{size(weights.memory_bytes)} in memory, as {kept}"
    if plan.num_ranks > 1:
        each = "on a GPU of its own" if plan.machine.device == "cuda" else "on its part of the cores"
        yield "Ranks", f"{plan.num_ranks} processes compute each step together, {each}, with a part of every layer each"
    if plan.task != "generate":
        yield "Task", f"{plan.task}: it makes numbers of a text, and answers no chats"
    if (kv := plan.kv) is not None:
        where = " in each rank" if plan.num_ranks > 1 else ""
        shorter = plan.context_len is not None and kv.max_model_len < plan.context_len
        why = "as you wish" if plan.max_model_len is not None else "all that there is room for"
        less = f" ({why}; the model could do {plan.context_len})" if shorter else ""
        yield "Context", f"{kv.max_model_len} tokens, prompt and answer of a request together{less}"
        yield (
            "KV cache",
            f"{about}{size(kv.num_bytes)}{where}: what is remembered of running requests, {size(kv.bytes_per_token)} "
            f"a token. Room for {kv.num_tokens} tokens, in {kv.num_blocks} blocks of {kv.block_size}",
        )
        yield "At once", f"{about}{_at_once(kv)}; others wait"
    if plan.tokens_per_s is not None:
        yield (
            "Speed",
            f"at most about {_rounded(plan.tokens_per_s)} tokens a second for one answer: each token reads "
            f"{size(weights.bytes_per_token)} of weights, and this memory was just read at "
            f"{plan.machine.read_bytes_per_s / 1e9:.1f} GB/s. Many answers at once come to more",
        )
    if plan.machine.kernels is not None:
        yield "Kernels", _kernels(plan.machine.kernels)
    yield "Texts", _texts(plan)


def _at_once(kv: KVPlan) -> str:
    if kv.num_full_len == kv.max_num_seqs:
        return f"{kv.max_num_seqs} requests, even of that full length"
    return f"{kv.num_full_len} requests of that full length, or up to {kv.max_num_seqs} shorter ones"


def _kernels(kernels: Kernels) -> str:
    if kernels.kind == "native":
        return f"aserve's own, compiled for {kernels.detail}"
    if kernels.kind == "to_compile":
        return f"aserve's own for {kernels.detail}, which the first start compiles in some 10 seconds"
    return f"torch's, at a half to two thirds of the speed of aserve's own: {kernels.detail}"


def _texts(plan: Plan) -> str:
    if not plan.has_tokenizer:
        return "no tokenizer"
    template = "a chat template" if plan.has_chat_template else "no chat template"
    calls = f"calls of tools as {plan.call_format} writes them" if plan.call_format else "no calls of tools"
    thoughts = f"thoughts as {plan.thought_format} writes them" if plan.thought_format else "no thoughts"
    return f"a tokenizer, {template}; {calls}; {thoughts}"


def _count(number: int) -> str:
    for unit, bound in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if number >= bound:
            return f"{number / bound:.1f} {unit}"
    return str(number)


def _rounded(number: float) -> str:
    """Two digits that mean something."""
    return f"{float(f'{number:.2g}'):,.0f}" if number >= 10 else f"{number:.1f}"
