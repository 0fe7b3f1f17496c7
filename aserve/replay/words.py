"""A step, and what a replay found, in words for people."""

from collections.abc import Iterator, Sequence
from typing import Final

from aserve.core.columns import NEUTRAL, SamplingColumns
from aserve.core.ids import SeqId
from aserve.core.plan import BlockOps, StepResult
from aserve.recording.records import Header, Init, Landed, Plan, Planned
from aserve.replay.comparing import Comparison, Difference
from aserve.replay.forced import runs
from aserve.replay.replaying import Replayed

MAX_SHOWN: Final = 12
"""Numbers of a list that are shown; of the others, how many there are."""


def header_line(header: Header, num_bytes: int) -> str:
    """What was recorded, in a line."""
    has = "with prompts" if header.has_prompts else "without prompts"
    logprobs = ", with logprobs" if header.has_logprobs else ""
    return (
        f"{header.model} as {header.dtype} on {header.device}, recorded by aserve {header.version} {has}{logprobs}, "
        f"{num_bytes / 1e6:.1f} MB"
    )


def step_lines(
    planned: Planned, landed: Landed | None, inits: dict[SeqId, Init], found: StepResult | None = None
) -> Iterator[str]:
    """A step: its rows, its block moves, its slices and what was sampled; what a replay sampled, where it differs."""
    plan = planned.plan
    num_tokens = sum(piece.num_tokens for piece in plan.slices)
    took = "it did not land" if landed is None else f"took {landed.took_s * 1e3:.2f} ms"
    size = f"{_count(len(plan.slices), 'row')}, {_count(num_tokens, 'token')}"
    yield f"step {plan.step_id} at {planned.at_s:.6f} s: {size}; {took}"
    for init in plan.inits:
        yield f"  set up {_init(init)}"
    if plan.block_ops is not None:
        yield from _moves(plan.block_ops)
    if plan.drafting:
        yield f"  drafts by a model, in {_count(len(plan.drafting), 'step')}"
    recorded = {} if landed is None else _by_sequence(plan, landed.token_ids, landed.num_accepted)
    replayed = {} if found is None else _by_sequence(plan, found.token_ids, found.num_accepted)
    for piece in plan.slices:
        whose = inits.get(piece.seq_id)
        name = "?" if whose is None else f"request {whose.request_id} choice {whose.index}"
        last = piece.start + piece.num_tokens
        kind = f", {_count(piece.num_samples - 1, 'draft')}" if piece.num_samples > 1 else ""
        blocks = f", new blocks {shown(piece.new_blocks)}" if piece.new_blocks else ""
        sampled = f" -> {shown(recorded[piece.seq_id])}" if piece.seq_id in recorded else ""
        differs = piece.seq_id in replayed and replayed[piece.seq_id] != recorded.get(piece.seq_id)
        other = f"   replayed: {shown(replayed[piece.seq_id])}" if differs else ""
        where = f"positions {piece.start} to {last - 1}" if piece.num_tokens > 1 else f"position {piece.start}"
        yield f"  row {piece.row}: {name}, {where}{kind}{blocks}{sampled}{other}"


def _by_sequence(plan: Plan, token_ids: Sequence[int], num_accepted: Sequence[int]) -> dict[SeqId, Sequence[int]]:
    return {
        piece.seq_id: token_ids[places.start : places.stop] for piece, places in runs(plan, token_ids, num_accepted)
    }


def _init(init: Init) -> str:
    columns = SamplingColumns[float](*init.columns)
    told = [
        f"{name} {value:g}"
        for name, value, neutral in zip(columns._fields, columns, NEUTRAL, strict=True)
        if value != neutral and name != "seed"
    ]
    told += ["greedy"] if columns.temperature == 0.0 else [f"seed {columns.seed}"]
    told += ["masked"] if init.has_mask else []
    told += [f"adapter {init.adapter}"] if init.adapter is not None else []
    told += ["with penalties, biases or bans"] if init.controls is not None or init.banned_ids else []
    blocks = f"blocks {shown(init.block_ids)}" if init.block_ids else "no blocks"
    return f"row {init.row} for request {init.request_id} choice {init.index}: {blocks}, {', '.join(told)}"


def _moves(ops: BlockOps) -> Iterator[str]:
    for what, moves in (("swap out", ops.swap_outs), ("copy", ops.copies), ("swap in", ops.swap_ins)):
        if moves:
            yield f"  {what}: {shown([f'{source} to {target}' for source, target in moves])}"
    if ops.scrubs:
        yield f"  scrub: {shown(ops.scrubs)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shown(items: Sequence[object]) -> str:
    """A list, of which a long one is cut."""
    more = f" and {len(items) - MAX_SHOWN} more" if len(items) > MAX_SHOWN else ""
    return ", ".join(map(str, items[:MAX_SHOWN])) + more


def outcome_lines(replayed: Replayed, *, checked: bool) -> Iterator[str]:
    """What came of a replay."""
    comparison = replayed.comparison
    yield (
        f"{_count(comparison.num_steps, 'step')} replayed in {replayed.seconds:.2f} s; "
        f"in the recording they took {replayed.recorded_s:.2f} s"
    )
    if checked:
        yield from _checked(comparison)


def _checked(found: Comparison) -> Iterator[str]:
    if found.first is None:
        yield f"all {_count(found.num_tokens, 'token')} of {_count(found.num_sequences, 'sequence')} are equal"
    else:
        yield f"the first difference: {difference(found.first)}"
        equal = found.num_sequences - len(found.differing)
        yield (
            f"{found.num_equal} of {found.num_tokens} tokens are equal, and {equal} of {found.num_sequences} "
            "sequences; behind a token that differs a sequence has another past"
        )
    if found.num_logprobs:
        if found.first_logprob is None:
            yield f"all {found.num_logprobs} logprobs are equal, bit by bit"
        else:
            yield f"the first logprob that differs: {difference(found.first_logprob)}"
            yield f"the largest distance of two of {found.num_logprobs} logprobs: {found.largest_logprob:.3g}"
    if found.num_forced:
        yield f"{found.num_forced} tokens of masked answers were not compared: they are the only ones that were allowed"


def difference(one: Difference) -> str:
    """Where it is, and what."""
    where = f"step {one.step_id}, row {one.row}, request {one.request_id} choice {one.choice}, position {one.position}"
    if one.what == "failure":
        told = ("failed", "had a token")
        return f"{where}: it {told[not one.recorded]} when recorded and {told[not one.found]} in the replay"
    values = ("nothing" if value is None else f"{one.what} {value!r}" for value in (one.recorded, one.found))
    return f"{where}: recorded {', found '.join(values)}"
