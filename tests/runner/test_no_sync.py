"""Launching a step never waits for the device.

A step is built and executed on torch's meta device, whose tensors have shapes and no values: whatever would have to
read a value back (`item`, a condition on a tensor, `nonzero`, a mask as an index) raises there, and waits on a GPU.
What would copy between host and device, which waits too unless the host's side is pinned, is caught as it is called.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from aserve.core import columns
from aserve.core.ids import Row
from aserve.core.plan import TO_COME, RowControls, RowSampling, StepPlan
from aserve.kernels.ops import AttentionBatch, LogitControls, SamplingBatch, Scores, TokenMasks
from aserve.models.interface import CausalLM
from aserve.models.layers import DenseMethod
from aserve.models.loader import native_model
from aserve.models.rope import rope_table
from aserve.models.sharding import ALONE
from aserve.models.spec import read_spec
from aserve.models.weights import Part
from aserve.runner import mixed_graphs
from aserve.runner.batch import BatchBuilder
from aserve.runner.controls import ControlTable
from aserve.runner.device import TORCH_DTYPES, Array
from aserve.runner.draft_model import DraftModel
from aserve.runner.flight import Landed
from aserve.runner.graphs import DecodeGraphs
from aserve.runner.kv_store import allocate_kv
from aserve.runner.masks import MaskMaker
from aserve.runner.rows import RowTable
from aserve.runner.step import EagerStep
from aserve.runner.warm_up import AnyToken
from tests.checkpoints import BACKEND_RECIPES, RECIPES, SHAPE
from tests.runner.toy import chunk, fed, init

pytestmark = pytest.mark.torch

META = torch.device("meta")
BLOCK_SIZE = 8
FILTERED = RowSampling(
    columns.NEUTRAL._replace(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1, seed=3),
    banned_ids=(4, 5),
    banned_before=99,
)
CONTROLS = RowControls(
    columns.PenaltyColumns(0.1, 0.1, 1.2),
    ((3, 1.0),),
    (3, 4, 5),
    ((4, 5), (3,)),
    prompt_ids=(1, 2),
    output_ids=(3, 3),
)
ROUTED = ("mixtral", "phimoe")
"""Mixtures of experts: transformers finds out on the host which experts a step takes, or where phimoe's rope is."""

PREFILL = StepPlan(0, (chunk(0, 0, [1, 2, 3], 1), chunk(1, 0, [4] * 11, 2, 3)), (init(0), init(1)))
MIXED = StepPlan(
    1,
    (fed(0, 3), chunk(2, 8, [5, 6], 4), chunk(3, 0, [7] * 9, 5, 6, num_samples=0), fed(1, 11)),
    (init(2, 9, sampling=FILTERED), init(3)),
)
DECODE = StepPlan(2, (fed(0, 4), fed(1, 12), fed(2, 10)))
CHUNK_ALONE = StepPlan(3, (chunk(3, 9, [8, 8], num_samples=0),))
CONTROLLED = StepPlan(
    4,
    (chunk(2, 0, [1, 2], 7), fed(0, 5)),
    (init(2, sampling=msgspec.structs.replace(FILTERED, controls=CONTROLS, num_logprobs=3)),),
)
DRAFTING = (
    StepPlan(6, (chunk(1, 0, [1, 2, 3], 0), chunk(0, 0, [4] * 9, 0, 0)), (init(1), init(0))),
    StepPlan(6, (fed(1, 3), fed(0, 9))),
)
DRAFTED = StepPlan(
    6,
    (chunk(2, 2, [3, 4, 5], num_samples=3), chunk(0, 6, [3, TO_COME, TO_COME], num_samples=3), fed(1, 13)),
    drafting=DRAFTING,
)
SCORED = StepPlan(5, (msgspec.structs.replace(chunk(3, 11, [8, 8], num_samples=0), target_ids=(8, 9)), fed(2, 2)))


class NoCopies(TorchDispatchMode):
    """Refuses operations with a tensor on the host among their inputs and outputs."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, *(kwargs or {}).values(), out) if isinstance(x, Tensor)]
        assert all(x.device == META for x in tensors), f"{func} has a tensor on the host"
        return out


class NoHostValues(TorchFunctionMode):
    """Refuses tensors of values from the host, for whose copy torch waits."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func not in (torch.tensor, torch.as_tensor, Tensor.new_tensor), f"{func} copies from the host"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting() -> Iterator[None]:
    with NoCopies(), NoHostValues():
        yield


class MetaDevice:
    """A `StepDevice` whose uploads have no values."""

    compiles = False
    is_host = False

    def stepping(self) -> AbstractContextManager[None]:
        return nullcontext()

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        return [torch.empty(array.shape, dtype=TORCH_DTYPES[array.dtype], device=META) for array in arrays]


class MetaOps:
    """`Ops` that check what they are given, and return empty tensors."""

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        assert x_TE.stride(-1) == 1
        return torch.empty(x_TE.shape, dtype=x_TE.dtype, device=META)

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.rms_norm(x_TE, weight_E, eps), self.rms_norm(residual_TE, weight_E, eps)

    def silu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        return torch.empty_like(gate_up_TF2[:, : gate_up_TF2.shape[1] // 2])

    gelu_and_mul = silu_and_mul

    def rope_and_write_kv(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cos_sin_LD: Tensor,
        positions_T: Tensor,
        k_cache_BPKD: Tensor,
        v_cache_BPKD: Tensor,
        slots_T: Tensor,
    ) -> Tensor:
        assert cos_sin_LD.dtype == torch.float32
        assert positions_T.dtype == torch.int64
        self.write_kv(k_TKD, v_TKD, k_cache_BPKD, v_cache_BPKD, slots_T)
        return torch.empty(q_THD.shape, dtype=q_THD.dtype, device=META)

    def write_kv(
        self, k_TKD: Tensor, v_TKD: Tensor, k_cache_BPKD: Tensor, v_cache_BPKD: Tensor, slots_T: Tensor
    ) -> None:
        assert k_TKD.stride(-1) == v_TKD.stride(-1) == 1
        assert k_TKD.shape[1:] == v_TKD.shape[1:] == k_cache_BPKD.shape[2:]
        assert k_TKD.dtype == v_TKD.dtype == k_cache_BPKD.dtype
        assert (slots_T.dtype, slots_T.shape) == (torch.int64, k_TKD.shape[:1])

    def attend(
        self,
        q_THD: Tensor,
        k_cache_BPKD: Tensor,
        v_cache_BPKD: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        assert q_THD.stride(-1) == 1
        assert q_THD.dtype == k_cache_BPKD.dtype
        integers = (batch.block_table_SM, batch.seq_lens_S, batch.query_starts_S1)
        assert [x.dtype for x in integers] == [torch.int32] * 3
        assert all(x.stride(-1) == 1 for x in integers)
        return torch.empty(q_THD.shape, dtype=q_THD.dtype, device=META)

    def sample(self, logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
        assert logits_SV.dtype in (torch.float32, torch.bfloat16)
        assert logits_SV.stride(-1) == 1
        assert (batch.columns_S.top_k.dtype, batch.columns_S.seed.dtype, batch.positions_S.dtype) == (
            torch.int32,
            torch.int64,
            torch.int64,
        )
        return torch.empty(len(logits_SV), dtype=torch.int64, device=META)

    def control_logits(self, logits_SV: Tensor, controls: LogitControls) -> None:
        assert logits_SV.dtype in (torch.float32, torch.bfloat16)
        assert logits_SV.stride(-1) == 1
        assert controls.counts_RV is not None
        assert controls.bias_RV is not None
        assert controls.bad_words is not None

    def mask_logits(self, logits_SV: Tensor, masks: TokenMasks) -> None:
        assert logits_SV.dtype == torch.float32
        assert (masks.rows_Q.dtype, masks.words_QW.dtype) == (torch.int64, torch.int32)
        assert masks.words_QW.shape == (len(masks.rows_Q), -(-logits_SV.shape[1] // 32))

    def score(self, logits_SV: Tensor, targets_S: Tensor, num_top: int) -> Scores:
        assert logits_SV.dtype in (torch.float32, torch.bfloat16)
        assert logits_SV.stride(-1) == 1
        assert (targets_S.dtype, targets_S.shape) == (torch.int64, logits_SV.shape[:1])
        top_ids_SK = torch.empty((len(logits_SV), num_top), dtype=torch.int64, device=META)
        return Scores(targets_S.float(), targets_S, top_ids_SK, top_ids_SK.float(), targets_S.float())


class NoWeights:
    """`Weights` of the right shapes."""

    shard = ALONE

    def shape(self, name: str) -> tuple[int, ...]:
        """Such as an even share comes of."""
        return (3 * 2**20, 3 * 2**20)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)

    def fill(self, out: Tensor, name: str, part: Part | None = None) -> None:
        """Nothing to fill."""

    def skip(self, name: str) -> None:
        """Nothing to skip."""


def native(architecture: str, **config: object) -> CausalLM:
    spec = read_spec({"architectures": [architecture], **SHAPE, **config})
    assert spec.rope is not None
    cos_sin_LD = rope_table(spec.rope, spec.head_dim, spec.context_len, META)
    return native_model(architecture)(spec, MetaOps(), NoWeights(), DenseMethod(), cos_sin_LD)


def by_transformers(recipe: str) -> CausalLM:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from aserve.models.transformers_backend import ATTENTION, TransformersModel, attend_in_cache
    from aserve.models.transformers_probe import rule_mask

    AttentionInterface.register(ATTENTION, attend_in_cache)
    AttentionMaskInterface.register(ATTENTION, rule_mask)
    config = AutoConfig.for_model(**(SHAPE | RECIPES[recipe]))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.bfloat16)
    served = TransformersModel(model.eval(), recipe, MetaOps())  # which looks at what layers are told, on the host
    served._decoder.to(META)
    served._head.to(META)
    served._mask = served._mask.to(META)
    return served


def check_steps(model: CausalLM) -> None:
    """Every kind of step, launched without waiting."""
    rows = RowTable(num_rows=4, max_blocks_per_seq=8, device=META)
    kv = allocate_kv(model.spec, num_blocks=1, block_size=BLOCK_SIZE, dtype=torch.bfloat16, device=META)
    controls = ControlTable(num_rows=4, vocab_size=model.spec.vocab_size, torch_device=META, device=MetaDevice())
    builder, step = BatchBuilder(rows, controls, MetaDevice(), BLOCK_SIZE), EagerStep(model, MetaOps(), kv.layers, rows)
    masks, over = MaskMaker(model.spec.vocab_size, MetaDevice()), Landed()
    over.set_result(RuntimeError())
    mask = AnyToken(model.spec.vocab_size)
    masked = StepPlan(9, DECODE.slices, (msgspec.structs.replace(PREFILL.inits[0], row=Row(1), mask=mask),))
    draft_model = DraftModel(model, MetaOps(), kv, MetaDevice(), num_rows=2, max_model_len=64, most=2)
    for plan in (PREFILL, MIXED, DECODE, CHUNK_ALONE, CONTROLLED, DRAFTED, SCORED, masked):
        with torch.inference_mode(), no_waiting():
            batch = builder.build(plan, draft_model.make(plan.drafting))
            assert batch is not None
            if (pending := masks.start(plan, over)) is not None:
                batch = replace(batch, masks=pending.made)
            ids_N = step.execute(batch).ids_N
        assert (ids_N.shape, ids_N.dtype) == ((sum(piece.num_samples for piece in plan.slices),), torch.int64)
    masks.close()


class MetaGraphs:
    """A `GraphDevice` whose replays launch the work again."""

    num_replays = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.num_replays += 1
            work()

        return replay


def test_a_captured_step_is_loaded_and_replayed_without_waiting():
    model = native("Qwen3ForCausalLM", head_dim=16)
    rows = RowTable(num_rows=5, max_blocks_per_seq=8, device=META)
    kv = allocate_kv(model.spec, num_blocks=1, block_size=BLOCK_SIZE, dtype=torch.bfloat16, device=META)
    controls = ControlTable(num_rows=5, vocab_size=model.spec.vocab_size, torch_device=META, device=MetaDevice())
    builder, step = BatchBuilder(rows, controls, MetaDevice(), BLOCK_SIZE), EagerStep(model, MetaOps(), kv.layers, rows)
    meta_graphs = MetaGraphs()
    graphs = DecodeGraphs(meta_graphs, MetaDevice(), rows, builder, step, max_model_len=64)
    with torch.inference_mode(), no_waiting():
        assert graphs.execute(PREFILL) is None
        builder.build(PREFILL)
        outputs = [graphs.execute(StepPlan(2 + k, (fed(0, 3 + k), fed(1, 11 + k)))) for k in range(5)]
        outputs.append(graphs.execute(StepPlan(9, (fed(1, 16, 4),))))
    assert meta_graphs.num_replays == 4
    shapes = [None if output is None else tuple(output.ids_N.shape) for output in outputs]
    assert shapes == [None, None, (2,), (2,), (2,), (1,)]


NATIVES = MappingProxyType(
    {
        "LlamaForCausalLM": {},
        "MistralForCausalLM": {"sliding_window": 24},
        "Qwen2ForCausalLM": {},
        "Qwen3ForCausalLM": {"head_dim": 16},
    }
)


@pytest.mark.parametrize("architecture", NATIVES)
def test_a_native_model_is_launched_without_waiting(architecture):
    check_steps(native(architecture, **NATIVES[architecture]))


@pytest.mark.parametrize("recipe", [name for name in BACKEND_RECIPES if name not in ROUTED])
def test_a_model_of_transformers_is_launched_without_waiting(recipe):
    check_steps(by_transformers(recipe))


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.tolist(),
        lambda x: bool(x[0] > 0),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.to("cpu"),
        lambda x: torch.tensor([1], device=x.device),
        lambda x: x + torch.ones(3),
        lambda x: x.masked_fill(x > 0, torch.tensor(1.0)),
    ],
    ids=["tolist", "condition", "mask", "nonzero", "to host", "from host", "mixed", "scalar from host"],
)
def test_what_would_wait_is_noticed(waits):
    x = torch.empty(3, device=META)
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), no_waiting():
        waits(x)


def test_a_captured_step_with_prompts_is_loaded_and_replayed_without_waiting(monkeypatch):
    monkeypatch.setattr(mixed_graphs, "CAPTURE_AFTER", 0)
    model = native("Qwen3ForCausalLM", head_dim=16)
    rows = RowTable(num_rows=5, max_blocks_per_seq=8, device=META)
    kv = allocate_kv(model.spec, num_blocks=1, block_size=BLOCK_SIZE, dtype=torch.bfloat16, device=META)
    controls = ControlTable(num_rows=5, vocab_size=model.spec.vocab_size, torch_device=META, device=MetaDevice())
    builder, step = BatchBuilder(rows, controls, MetaDevice(), BLOCK_SIZE), EagerStep(model, MetaOps(), kv.layers, rows)
    meta_graphs = MetaGraphs()
    graphs = DecodeGraphs(meta_graphs, MetaDevice(), rows, builder, step, max_model_len=64)
    with torch.inference_mode(), no_waiting():
        outputs = [graphs.execute(plan) for plan in (PREFILL, MIXED, CHUNK_ALONE, CONTROLLED)]
    assert meta_graphs.num_replays == 2
    shapes = [None if output is None else tuple(output.ids_N.shape) for output in outputs]
    assert shapes == [(2,), None, (0,), None]  # of MIXED a row bans tokens
