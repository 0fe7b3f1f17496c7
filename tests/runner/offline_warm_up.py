"""Which kernels start-up compiles, and which are compiled later all the same; for a GPU, on a machine without one.

Run in a process of its own (`python -m tests.runner.offline_warm_up`), for the reasons that tests/kernels/offline.py
gives. A model runs warm-up and then steps of many kinds; kernels only compile, so what it computes means nothing.
Prints one JSON line: the number of compilations of each kernel in `warm_up`, and in the steps after it.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec
import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from aserve.core import columns
from aserve.core.plan import RowSampling, SeqSlice, StepPlan
from aserve.kernels.ops import KVLayer, SamplingBatch
from aserve.kernels.triton_ops import TritonOps
from aserve.models.interface import ForwardBatch
from aserve.models.layers import DenseMethod
from aserve.models.qwen3 import qwen3
from aserve.models.rope import rope_table
from aserve.models.spec import ModelSpec, RopeSpec
from aserve.models.weights import RandomWeights
from aserve.runner.kv_store import allocate_kv
from aserve.runner.runner import ModelRunner
from aserve.runner.warm_up import CONTROLLED, DRAWN, FILTERED, GREEDY, AnyToken, warm_up_plans
from tests.kernels.offline import compile_only
from tests.runner.toy import chunk, fed, init

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
MAX_MODEL_LEN, MAX_NUM_SEQS, BLOCK_SIZE = 5000, 64, 16
SPEC = ModelSpec(
    architecture="Qwen3ForCausalLM",
    num_layers=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=64,
    intermediate_size=96,
    vocab_size=9000,
    context_len=MAX_MODEL_LEN,
    norm_eps=1e-6,
    windows=(None,),
    rope=RopeSpec(kind="default", theta=1e6),
    tie_embeddings=True,
    qk_norm=True,
)
SCORED = msgspec.structs.replace(FILTERED, num_logprobs=1)
BANNING = RowSampling(columns.NEUTRAL._replace(temperature=1.0, seed=1), banned_ids=(3, 4), banned_before=9999)


class CompilingOps(TritonOps):
    """Kernels only compile; a token that is sampled is 0, so that the next step can look it up."""

    def sample(self, logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
        return super().sample(logits_SV, batch).zero_()


class Model:
    """A model with numbers for logits, whatever the kernels left undone."""

    spec = SPEC

    def __init__(self, ops: TritonOps) -> None:
        cos_sin_LD = rope_table(RopeSpec(kind="default", theta=1e6), SPEC.head_dim, MAX_MODEL_LEN, CPU)
        self._inner = qwen3(SPEC, ops, RandomWeights(DTYPE, CPU, 0), DenseMethod(), cos_sin_LD)

    def forward(self, token_ids_T: Tensor, kv: Sequence[KVLayer], batch: ForwardBatch) -> Tensor:
        return self._inner.forward(token_ids_T, kv, batch)

    def logits(self, hidden_SE: Tensor) -> Tensor:
        return self._inner.logits(hidden_SE).zero_()


def steps(rng: random.Random) -> Iterator[StepPlan]:
    """Mixtures of decoding and prompts of many lengths, over contexts of many lengths; no block but the null block."""
    for step_id in range(80):
        samplings = rng.choice(
            [
                *([GREEDY], [GREEDY, DRAWN], [DRAWN, FILTERED], [GREEDY, BANNING], [FILTERED, BANNING]),
                *([SCORED], [GREEDY, SCORED], [DRAWN, CONTROLLED], [BANNING, CONTROLLED], [BANNING, SCORED]),
            ]
        )
        pieces: list[SeqSlice] = []
        for row in range(rng.choice([1, 2, 5, MAX_NUM_SEQS])):
            start = rng.randrange(rng.choice([2, 200, MAX_MODEL_LEN - 200]))
            length = rng.choice([1, 1, 1, rng.randrange(2, 200)])
            pieces.append(fed(row, start) if length == 1 else chunk(row, start, [0] * length))
        blocks = [0] * -(-MAX_MODEL_LEN // BLOCK_SIZE)
        inits = [init(p.row, *blocks, sampling=rng.choice(samplings)) for p in pieces]
        masked = (
            msgspec.structs.replace(i, mask=AnyToken(SPEC.vocab_size)) if rng.random() < 0.1 else i for i in inits
        )
        yield StepPlan(step_id, tuple(pieces), tuple(masked))


def main() -> None:
    compiled: dict[str, dict[int, CompiledKernel]] = defaultdict(dict)
    compile_only(compiled)
    ops = CompilingOps(num_sms=132)
    kv = allocate_kv(SPEC, num_blocks=1, block_size=BLOCK_SIZE, dtype=DTYPE, device=CPU)
    runner = ModelRunner(Model(ops), ops, kv, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN)
    sizes = MAX_MODEL_LEN, BLOCK_SIZE, SPEC.vocab_size
    for plan in warm_up_plans(*sizes, max_num_seqs=MAX_NUM_SEQS, compiles=True):
        runner.run(plan)
    warm_up = {name: len(kernels) for name, kernels in compiled.items()}
    for plan in steps(random.Random(0)):
        runner.run(plan)
    runner.close()
    later = {name: len(kernels) - warm_up.get(name, 0) for name, kernels in compiled.items()}
    print(json.dumps({"warm_up": warm_up, "later": later}))


if __name__ == "__main__":
    main()
