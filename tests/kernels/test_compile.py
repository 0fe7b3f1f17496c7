"""Every kernel, in the head sizes and types that models have, becomes machine code for an H100 or H200 that fits it.

The strongest check that needs no GPU: the interpreter takes more than the compiler does. What the machine code takes of
a processor is held to figures, so that a change that halves the programs side by side, or has registers spill, is seen.
Triton 3.6 too, where TRITON_3_6 names a folder that has it: pip install --target FOLDER --no-deps triton==3.6.0
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kernels.machine_code import Loop, matrix_loops, programs_per_sm

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SHARED_BYTES_OF_A_HOPPER_SM = 227 * 1024
SHARED_BYTES_OF_AN_ADA_SM = 99 * 1024
MAX_STACK_BYTES = 64
"""A thread's, in the largest heads: a few registers in and out of the first cache, beside hundreds that stay."""
MAX_SPILLED_BYTES = 4
"""A register's, which the floor of a row that is filtered takes under Triton 3.6."""
ROOT = Path(__file__).parents[2]
OLD_TRITON = os.environ.get("TRITON_3_6")

Variants = list[dict[str, object]]
"""What offline_shapes.py reports of each variant of each kernel, and offline.py of each kernel."""


class Figures(NamedTuple):
    """programs_per_sm: at least. instructions: of an inner loop, at most. wgmma, mma: how many of them multiply."""

    programs_per_sm: int
    instructions: int
    wgmma: int
    mma: int


FIGURES = {
    ("_prefill_kernel", 64, "long prompts"): Figures(2, 330, 8, 0),
    ("_prefill_kernel", 128, "long prompts"): Figures(1, 610, 16, 0),
    ("_prefill_kernel", 256, "long prompts"): Figures(1, 415, 18, 0),
    ("_prefill_kernel", 64, "short prompts"): Figures(3, 345, 8, 0),
    ("_prefill_kernel", 128, "short prompts"): Figures(2, 445, 12, 0),
    ("_decode_kernel", 64, "decode"): Figures(3, 460, 0, 32),
    ("_decode_kernel", 128, "decode"): Figures(3, 440, 0, 32),
    ("_decode_kernel", 256, "decode"): Figures(3, 450, 0, 32),
    ("_decode_kernel", 128, "decode, crowded"): Figures(4, 710, 0, 64),
    ("_decode_kernel", 128, "decode, alone"): Figures(3, 440, 0, 32),
    ("_decode_kernel", 128, "decode, split"): Figures(4, 710, 0, 64),
    ("_decode_kernel", 128, "decode of float8"): Figures(3, 720, 0, 32),
    ("_decode_kernel", 128, "decode, split of float8"): Figures(4, 1215, 0, 64),
    ("_few_rows_kernel", None, "3 rows"): Figures(1, 100, 8, 0),
    ("_few_rows_kernel", None, "64 rows"): Figures(1, 130, 8, 0),
    ("_few_rows_kernel", None, "3 rows of float8"): Figures(1, 110, 8, 0),
    ("_few_rows_kernel", None, "64 rows of float8"): Figures(1, 140, 8, 0),
    ("_few_rows_kernel", None, "128 rows of float8"): Figures(1, 195, 8, 0),
}
"""By kernel, head dimension if any, and step, in bfloat16 without a window or a cap."""
PROGRAMS_PER_SM = {
    "_tile_max_kernel": 6,
    "_tile_mass_kernel": 7,
    "_draw_kernel": 4,
    "_weigh_kernel": 5,
    "_set_aside_kernel": 3,
    "_floor_kernel": 3,
    "_mask_kernel": 8,
    "_rms_norm_kernel": 3,
    "_rope_kernel": 8,
    "_gated_kernel": 8,
    "_quantize_rows_kernel": 8,
    "_sum_splits_kernel": 8,
}
"""Of kernels that wait for memory, at least."""


OVERLAPPING = {
    "_combine_kernel",
    "_decode_kernel",
    "_few_rows_kernel",
    "_gated_kernel",
    "_quantize_rows_kernel",
    "_rms_norm_kernel",
    "_rope_kernel",
    "_sum_splits_kernel",
    "_thin_linear_kernel",
}
"""Of a decoding step, one launch after another."""


def compiled_by(module: str, folder: Path, triton: str | None, *arguments: str) -> Variants:
    """What a module reports, given its arguments; compiled anew but for what the folder has."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(folder)
    if triton is not None:
        env["PYTHONPATH"] = os.pathsep.join([triton, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", f"tests.kernels.{module}", *arguments]
    child = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()]


@pytest.fixture(scope="module", params=["installed", "3.6"])
def triton(request: pytest.FixtureRequest) -> str | None:
    """The folder of a Triton, or None for the one that is installed."""
    if request.param == "installed":
        return None
    if OLD_TRITON is None:
        pytest.skip("TRITON_3_6 names no folder that has Triton 3.6")
    return OLD_TRITON


def compiled_variants(folder: Path, triton: str | None, *arguments: str) -> Variants:
    return compiled_by("offline_shapes", folder, triton, *arguments)


@pytest.fixture(scope="module")
def folder(triton: str | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of compiled kernels, empty at first: what two tests ask for is compiled once."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def variants(triton: str | None, folder: Path) -> Iterator[Variants]:
    """For an H100 or H200: the most usual shapes, each part in a process of its own."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = pool.map(lambda part: compiled_variants(folder, triton, part), ("attention", "fixed", "others"))
        yield [variant for part in parts for variant in part]


@pytest.fixture(scope="module")
def all_variants(triton: str | None, folder: Path) -> Iterator[Variants]:
    """Of the other shapes, too, which takes minutes."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [("attention", "--thorough"), ("fixed", "others", "--thorough")]
        parts = pool.map(lambda arguments: compiled_variants(folder, triton, *arguments), jobs)
        yield [variant for part in parts for variant in part]


def test_every_kernel_compiles(variants: Variants) -> None:
    """A new kernel belongs into offline_shapes.py."""
    sources = [path.read_text() for path in (ROOT / "aserve/kernels").glob("*.py")]
    written = {name for source in sources for name in re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE)}
    assert {variant["kernel"] for variant in variants} == written


def test_shared_memory_and_registers_suffice(variants: Variants) -> None:
    assert_fit(variants, SHARED_BYTES_OF_A_HOPPER_SM)
    assert [v for v in variants if v["stack_bytes"] and is_usual(v)] == []


def is_usual(variant: dict[str, object]) -> bool:
    """Whether it has to do without a stack. Prompts over keys of float8 have two registers there."""
    return variant.get("head_dim") in (64, 128) and variant.get("step") != "long prompts of float8"


def assert_fit(variants: Variants, shared_bytes: int) -> None:
    assert [v for v in variants if v["shared_bytes"] > shared_bytes] == []
    assert [v for v in variants if v["stack_bytes"] > MAX_STACK_BYTES] == []


def assert_busy(variants: Variants, cases: set[tuple[str, int, str]]) -> None:
    """Spills, fewer programs side by side, another kind of product or a longer loop: each would cost what it costs."""
    found = set()
    for variant in variants:
        case = variant["kernel"], variant.get("head_dim"), variant.get("step")
        if case not in cases or variant["dtype"] != "torch.bfloat16" or "soft_cap" in variant:
            continue
        found.add(case)
        limit = FIGURES[case]
        assert variant["stack_bytes"] == 0, variant
        assert variant["programs_per_sm"] >= limit.programs_per_sm, variant
        assert variant["instructions"] <= limit.instructions, variant
        assert (variant["wgmma"], variant["mma"]) == (limit.wgmma, limit.mma), variant
    assert found == cases


def test_matrix_products_keep_a_processor_busy(variants: Variants) -> None:
    assert_busy(variants, {case for case in FIGURES if case[1] in (128, None)})


@pytest.mark.parametrize("kernel", PROGRAMS_PER_SM)
def test_kernels_that_wait_for_memory_share_a_processor(variants: Variants, kernel: str) -> None:
    assert min(v["programs_per_sm"] for v in variants if v["kernel"] == kernel) >= PROGRAMS_PER_SM[kernel]


def test_what_starts_early_waits(variants: Variants) -> None:
    assert {v["kernel"] for v in variants if v["overlaps"]} == OVERLAPPING
    for variant in variants:
        overlaps = int(variant["overlaps"])
        lets_start = overlaps and variant["kernel"] != "_rope_kernel"
        assert (variant["waits"], variant["lets_start"]) == (overlaps, lets_start), variant


@pytest.fixture(scope="module")
def kernels(triton: str | None, folder: Path, variants: Variants) -> Variants:
    """What offline.py reports of each kernel, over steps of many sizes, lengths and alignments."""
    return compiled_by("offline", folder, triton)


def test_the_kernels_of_a_model_fit(kernels: Variants) -> None:
    assert len(kernels) == 13
    for kernel in kernels:
        assert kernel["spilled_bytes"] <= MAX_SPILLED_BYTES, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES_OF_A_HOPPER_SM, kernel


def test_no_kernel_is_compiled_again_as_lengths_change(kernels: Variants) -> None:
    """Decode attention is compiled for one split and for several, whatever their number, and for crowded tiles."""
    expected = {kernel["kernel"]: 3 if kernel["kernel"] == "_decode_kernel" else 1 for kernel in kernels}
    assert {kernel["kernel"]: kernel["variants"] for kernel in kernels} == expected


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_every_shape_compiles_and_fits(all_variants: Variants) -> None:
    assert_fit(all_variants, SHARED_BYTES_OF_A_HOPPER_SM)
    usual = [v for v in all_variants if is_usual(v) and v["dtype"] == "torch.bfloat16"]
    assert [v for v in usual if v["stack_bytes"]] == []
    assert_busy(all_variants, set(FIGURES))


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_attention_fits_an_ada(triton: str | None, folder: Path) -> None:
    """An L4 or RTX 40, whose tiles are smaller."""
    ada = compiled_variants(folder, triton, "attention", "--thorough", "--capability=89")
    assert {"_decode_kernel", "_combine_kernel", "_prefill_kernel"} <= {variant["kernel"] for variant in ada}
    assert_fit(ada, SHARED_BYTES_OF_AN_ADA_SM)


@pytest.mark.parametrize(
    ("registers", "num_warps", "shared_bytes", "programs"),
    [(166, 4, 72192, 3), (128, 8, 66560, 2), (129, 8, 66560, 1), (244, 8, 164864, 1), (32, 1, 0, 32), (255, 4, 0, 2)],
)
def test_programs_per_sm(registers: int, num_warps: int, shared_bytes: int, programs: int) -> None:
    """By hand, as CUDA's occupancy calculator has it: a register too many halves the programs."""
    assert programs_per_sm(registers, num_warps, shared_bytes) == programs


def test_the_inner_loop_is_found_in_machine_code() -> None:
    """An outer loop around two, of which one multiplies; a branch forward; a predicate."""
    sass = """
        /*0000*/                   MOV R1, R2 ;
        /*0010*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0020*/               @P1 BRA 0x0010 ;
        /*0030*/              @!P0 BRA 0x0080 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0060*/              @!P2 BRA 0x0040 ;
        /*0070*/                   BRA 0x0000 ;
        /*0080*/                   EXIT ;
        /*0090*/                   BRA 0x90;
    """
    assert matrix_loops(sass) == [Loop(instructions=3, wgmma=1, mma=1)]
