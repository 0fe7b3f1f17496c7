"""Compiled CPU kernels: which variant is taken, where it is made, and that every variant that can run here agrees."""

import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

from aserve.kernels.cpu import CpuOps
from aserve.kernels.dispatch import describe, select_ops
from aserve.kernels.native import library as native
from aserve.kernels.native.library import NativeUnavailableError, choose_variant, compile_variant
from aserve.kernels.native.native_ops import NativeOps
from tests.kernels.cases import native_ops

pytestmark = pytest.mark.torch

AVX2 = frozenset(["avx2", "fma", "f16c", "bmi2"])
XEON = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}


@pytest.mark.parametrize(
    ("machine", "flags", "variant"),
    [
        ("x86_64", XEON | {"amx_tile", "amx_bf16"}, "amx"),
        ("x86_64", XEON | {"amx_bf16"}, "avx512-bf16"),  # Linux lets nobody use its tiles
        ("x86_64", XEON, "avx512-bf16"),
        ("x86_64", XEON - {"avx512_bf16"}, "avx512-vnni"),
        ("x86_64", XEON - {"avx512_vnni"}, "avx512"),
        ("x86_64", AVX2, "avx2"),
        ("aarch64", frozenset(["asimd", "fphp"]), "neon"),
    ],
)
def test_the_fastest_variant_that_the_processor_has_is_taken(machine, flags, variant):
    assert choose_variant(machine, flags) == variant


@pytest.mark.parametrize("may", [True, False])
def test_tiles_are_taken_where_linux_lets_a_process_have_them(monkeypatch, may):
    monkeypatch.setattr(native.Path, "read_text", lambda _path: "model name : Xeon\nflags : avx2 amx_bf16 amx_tile\n")
    monkeypatch.setattr(native, "_may_use_tiles", partial(bool, may))
    assert native._processor_flags() == {"avx2", "amx_bf16"} | ({"amx_tile"} if may else set())


@pytest.mark.parametrize(("machine", "flags"), [("x86_64", frozenset({"sse2"})), ("riscv64", XEON), ("", frozenset())])
def test_a_processor_without_a_variant_is_told(machine, flags):
    with pytest.raises(NativeUnavailableError, match=f"none for this {machine or 'unknown'} processor"):
        choose_variant(machine, flags)


def test_without_a_compiler_torch_serves_and_says_what_would_change_it(monkeypatch, tmp_path):
    native_ops()  # skips where there is nothing to take away
    monkeypatch.setattr(native, "_places", lambda variant: iter([tmp_path / f"{variant}.so"]))
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    native.library.cache_clear()
    try:
        ops = select_ops(torch.device("cpu"))
    finally:
        native.library.cache_clear()
    assert type(ops) is CpuOps
    assert "no C++ compiler was found (g++, clang++, c++): install one" in describe(ops)[0]


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    def fail(command, **options):
        raise subprocess.CalledProcessError(1, command, stderr="rows.cpp:1: no such header")

    monkeypatch.setattr(native.shutil, "which", lambda name: name)
    monkeypatch.setattr(native.subprocess, "run", fail)
    with pytest.raises(NativeUnavailableError, match=r"g\+\+ failed: rows.cpp:1: no such header"):
        compile_variant("avx2", tmp_path)


def test_where_the_first_folder_cannot_be_written_the_next_is_taken(monkeypatch, tmp_path):
    native_ops()
    (tmp_path / "file").write_text("")
    places = [tmp_path / "file" / "lib" / "kernels.so", tmp_path / "cache" / "kernels.so"]
    monkeypatch.setattr(native, "_places", lambda variant: iter(places))
    compiled = []
    monkeypatch.setattr(native, "_run", lambda command: compiled.append(Path(command[-1]).write_text("")))
    made = native._compile_somewhere("avx2")
    assert made.parent == tmp_path / "cache"
    assert made.exists()


def test_changed_sources_have_another_name(monkeypatch, tmp_path):
    native._file_name.cache_clear()
    before = native._file_name("avx2")
    (tmp_path / "rows.cpp").write_text("// changed")
    monkeypatch.setattr(native, "_SOURCES", tmp_path)
    native._file_name.cache_clear()
    try:
        assert native._file_name("avx2") != before
    finally:
        native._file_name.cache_clear()


def test_kernels_run_on_the_threads_that_torch_has():
    """A second OpenMP would bring a pool of its own, which spins against the first."""
    native_ops().rms_norm(torch.ones(64, 1024), torch.ones(1024), 1e-6)
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split(maxsplit=5)[5] for line in maps if "libgomp" in line or "libomp" in line}) == 1


@pytest.mark.parametrize(("variant", "is_told"), [("avx2", False), ("amx", False), ("neon", True)])
def test_int8_that_saves_no_time_is_told(variant, is_told):
    """The same file under other names: what is said goes by the name alone."""
    ops = NativeOps(native.Library(native.find_or_compile(native.own_variant()), variant))
    saves_memory_alone = "quantization: int8-g128 saves memory and no time here"
    told = [line.startswith(saves_memory_alone) for line in describe(ops, "int8-g128")]
    assert any(told) == is_told
    assert len(describe(ops)) == len(describe(CpuOps(), "int8")) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_variant_gives_what_torch_gives(variant_ops, dtype):
    torch.manual_seed(0)
    plain, tolerance = CpuOps(), {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    for rows, width in ((1, 64), (3, 100), (40, 896)):
        x_TE, weight_E, gate_up = (
            torch.randn(*shape).to(dtype) for shape in ((rows, width), (width,), (rows, 2 * width))
        )
        for name, inputs in (
            ("rms_norm", (x_TE, weight_E, 1e-6)),
            ("silu_and_mul", (gate_up,)),
            ("gelu_and_mul", (gate_up,)),
        ):
            actual, expected = getattr(variant_ops, name)(*inputs), getattr(plain, name)(*inputs)
            torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 16, 100, 896, 5000])
def test_a_row_has_the_same_bits_with_any_others_on_any_threads(dtype, width):
    ops = native_ops()
    torch.manual_seed(0)
    x_TE, y_TE, weight_E = (torch.randn(*shape).to(dtype) for shape in ((70, width), (70, width), (width,)))
    gate_up = torch.randn(70, 2 * width).to(dtype)
    calls = {
        "rms_norm": lambda rows: ops.rms_norm(x_TE[rows], weight_E, 1e-6),
        "add_rms_norm": lambda rows: torch.stack(ops.add_rms_norm(x_TE[rows], y_TE[rows], weight_E, 1e-6), 1),
        "silu_and_mul": lambda rows: ops.silu_and_mul(gate_up[rows]),
        "gelu_and_mul": lambda rows: ops.gelu_and_mul(gate_up[rows]),
    }
    num_threads = torch.get_num_threads()
    try:
        for name, call in calls.items():
            torch.set_num_threads(2)
            together = call(slice(0, 70))
            torch.set_num_threads(1)
            for row in (0, 33, 69):
                assert torch.equal(call(slice(row, row + 1))[0], together[row]), (name, row)
    finally:
        torch.set_num_threads(num_threads)


def test_what_is_not_finite_stays_in_its_row():
    ops = native_ops()
    x_TE = torch.randn(4, 100, dtype=torch.bfloat16)
    x_TE[2, 5], x_TE[3, 7] = float("nan"), float("inf")
    out_TE = ops.rms_norm(x_TE, torch.ones(100, dtype=torch.bfloat16), 1e-6)
    assert out_TE[:2].isfinite().all()
    assert out_TE[2].isnan().all()
    assert not out_TE[3].isfinite().all()
