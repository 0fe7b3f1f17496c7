"""The architecture, held by tests: who may import whom, who must not load torch, and how long things may get."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "aserve"

ENGINE = {
    *("core", "scheduler", "tenants", "text", "metrics"),
    *(
        "adapters",
        "answers",
        "edges",
        "engine_loop",
        "stepping",
        "intake",
        "mailbox",
        "preparation",
        "structures",
        "workers",
        "texts",
        "engine_parts",
        "encoding",
        "vectors",
        "engine",
        "observe",
        "recording",
    ),
}
LOWER_FLOORS = ENGINE | {
    "batch",
    "stores",
    "constraints",
    "kv_cache",
    "routing",
    "drafting",
    "kernels",
    "models",
    "runner",
    "http",
    "model_folder",
    "model_text",
    "planning",
    "weight_plan",
    "load",
    "measuring",
    "drafters",
    "telling",
    "loading",
    "scheduling",
    "recorders",
    "replay",
    "simulation",
    "parallel",
    "poolers",
    "build",
    "loop_thread",
    "llm",
    "server",
    "cli",
    "terminal",
    "ray",
}

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "kv_cache": {"core"},
    "scheduler": {"core", "kv_cache"},
    "text": {"core"},
    "drafting": {"core"},
    "metrics": {"core"},
    "tenants": {"core"},
    "routing": {"core", "kv_cache"},
    "constraints": {"core", "text"},
    "kernels": {"core"},
    "models": {"core", "kernels"},
    "runner": {"core", "kernels", "models"},
    "edges": {"core"},
    "mailbox": ENGINE,
    "engine_loop": ENGINE,
    "observe": {"core", "scheduler"},
    "recording": {"core", "edges", "scheduler"},
    "stepping": {"core", "edges", "metrics", "observe", "scheduler"},
    "intake": {"core", "tenants", "text"},
    "adapters": {"core", "edges"},
    "answers": {"core", "mailbox"},
    "preparation": {"core", "intake", "scheduler"},
    "structures": {"core", "constraints", "text", "workers"},
    "workers": {"core"},
    "texts": {"core", "intake", "text", "workers"},
    "engine_parts": {"adapters", "core", "scheduler", "text"},
    "encoding": {"texts"},
    "vectors": {"answers", "core", "edges", "mailbox", "text", "texts", "workers"},
    "engine": ENGINE,
    "stores": {"core"},
    "http": {"core", "edges", "engine", "mailbox", "metrics", "observe", "routing", "stores", "tenants", "workers"},
    "loop_thread": {"core"},
    "model_folder": {"core", "models"},
    "model_text": {"core", "model_folder", "models", "text"},
    "planning": {"core", "models", "runner"},
    "weight_plan": {"core", "models"},
    "load": set(),
    "measuring": {"core", "kernels", "models", "planning", "runner"},
    "drafters": {"core", "drafting", "kernels", "models", "runner"},
    "loading": {"core", "engine_parts", "kernels", "models", "text"},
    "scheduling": {"core", "drafters", "kv_cache", "scheduler"},
    "recorders": {"core", "models", "recording", "scheduler", "scheduling"},
    "replay": {"core", "edges", "recording"},
    "simulation": {"core", "load", "recording", "scheduler", "scheduling"},
    "parallel": {"core", "kernels", "loading", "measuring", "model_folder", "models", "runner"},
    "poolers": LOWER_FLOORS,
    "telling": {"core", "drafters", "engine_parts", "kv_cache", "models", "text"},
    "build": LOWER_FLOORS,
    "llm": LOWER_FLOORS,
    "batch": LOWER_FLOORS,
    "server": LOWER_FLOORS,
    "terminal": LOWER_FLOORS,
    "cli": LOWER_FLOORS,
    "ray": LOWER_FLOORS,
    "__main__": LOWER_FLOORS,
    "__init__": LOWER_FLOORS,
}
"""Floor by floor, from design.md: what each package may import of aserve besides itself."""

ONLY_STDLIB_AND = {
    "core": {"msgspec"},
    "kv_cache": {"msgspec"},
    "scheduler": {"msgspec"},
    "drafting": set(),
    "routing": {"msgspec"},
}
"""Packages whose third-party imports are counted."""

WITHOUT_TORCH = [
    "core",
    "kv_cache",
    "scheduler",
    "drafting",
    "text",
    "metrics",
    "tenants",
    "routing",
    "observe",
    "recording",
    "replay",
    "edges",
    "mailbox",
    "engine_loop",
    "stepping",
    "intake",
    "loop_thread",
    "adapters",
    "answers",
    "preparation",
    "constraints",
    "structures",
    "workers",
    "texts",
    "engine_parts",
    "encoding",
    "vectors",
    "engine",
    "stores",
    "http",
    "model_folder",
    "model_text",
    "planning",
    "weight_plan",
    "load",
    "cli",
]

MAY_READ_ENVIRONMENT = {"cli/commands.py"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_NATIVE_LINES = 1500
"""Of C++, blank lines and comments aside: as much as one reads in an afternoon."""
LONG_ON_PURPOSE = {
    "kernels/decode_attention.py:_decode_kernel": "one pass over the blocks, whose state lives in registers",
    "kernels/prefill_attention.py:_prefill_kernel": "one pass over the blocks, whose state lives in registers",
}
"""A file ("models/x.py") or function ("models/x.py:function") that is longer, and why."""


def sources(package: str) -> list[Path]:
    """The files of a package or module of aserve."""
    folder = PACKAGE / package
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{package}.py"]


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports: at its top, under TYPE_CHECKING, and inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            yield node.module
            if node.module == "aserve":
                yield from (f"aserve.{alias.name}" for alias in node.names)


def existing(packages: list[str]) -> list[str]:
    return [package for package in packages if all(path.exists() for path in sources(package))]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length in lines of each function of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def test_every_package_has_its_floor():
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert packages | modules <= set(MAY_IMPORT)


@pytest.mark.parametrize("package", existing(list(MAY_IMPORT)))
def test_imports_point_down(package: str):
    allowed = MAY_IMPORT[package] | {package}
    for path in sources(package):
        of_aserve = {module.split(".")[1] for module in imported_modules(path) if module.startswith("aserve.")}
        assert {name for name in of_aserve if not name.startswith("__")} <= allowed, name_of(path)


@pytest.mark.parametrize(("face", "other"), [("anthropic", "openai"), ("openai", "anthropic")])
def test_the_faces_of_http_do_not_know_each_other(face: str, other: str):
    """What they share is beside them."""
    for path in sources(f"http/{face}"):
        others = f"aserve.http.{other}"
        assert not [name for name in imported_modules(path) if f"{name}.".startswith(f"{others}.")], name_of(path)


def test_no_module_imports_itself_in_a_circle():
    """Under TYPE_CHECKING neither: two modules that name each other's types are one idea in two files."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    imports = {name: set(imported_modules(path)) & set(files) for name, path in files.items()}
    while leaves := {name for name, others in imports.items() if not others}:
        imports = {name: others - leaves for name, others in imports.items() if name not in leaves}
    assert imports == {}, f"these import each other, or what does: {sorted(imports)}"


@pytest.mark.parametrize("package", existing(list(ONLY_STDLIB_AND)))
def test_the_core_needs_little_of_others(package: str):
    allowed = sys.stdlib_module_names | ONLY_STDLIB_AND[package] | {"aserve"}
    for path in sources(package):
        assert {module.split(".")[0] for module in imported_modules(path)} <= allowed, name_of(path)


def test_torch_is_loaded_by_the_floors_that_compute_and_by_nobody_else():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in existing(WITHOUT_TORCH)
        for path in sources(package)
    ]
    program = """
import importlib, json, sys
culprits = []
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    if "torch" in sys.modules:
        culprits.append(name)
        break
print(json.dumps(culprits))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(modules)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=name_of)
def test_files_and_functions_fit_on_a_screen_or_say_why_not(path: Path):
    name = name_of(path)
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_FILE_LINES or name in LONG_ON_PURPOSE, f"{name}: {num_lines} lines"
    for function, length in functions(path):
        assert length <= MAX_FUNCTION_LINES or f"{name}:{function}" in LONG_ON_PURPOSE, f"{function}: {length} lines"


def test_exceptions_to_the_lengths_are_still_needed():
    for entry, reason in LONG_ON_PURPOSE.items():
        name, _, function = entry.partition(":")
        assert reason
        if function:
            assert dict(functions(PACKAGE / name))[function] > MAX_FUNCTION_LINES, entry
        else:
            assert len((PACKAGE / name).read_text().splitlines()) > MAX_FILE_LINES, entry


def test_the_environment_is_read_in_one_place():
    for path in PACKAGE.rglob("*.py"):
        names = {
            node.attr if isinstance(node, ast.Attribute) else node.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute | ast.alias)
        }
        assert name_of(path) in MAY_READ_ENVIRONMENT or not names & {"environ", "environb", "getenv"}, name_of(path)


def test_what_is_compiled_is_small_enough_to_read():
    files = {path.name: path.read_text().splitlines() for path in (PACKAGE / "kernels/native/src").iterdir()}
    code = [line for lines in files.values() for line in map(str.strip, lines) if line and not line.startswith("//")]
    assert MAX_NATIVE_LINES / 2 < len(code) <= MAX_NATIVE_LINES
    assert {name for name, lines in files.items() if len(lines) > MAX_FILE_LINES} == set()


def test_no_test_patches_what_it_tests():
    for path in (ROOT / "tests").rglob("*.py"):
        assert not {"mock", "unittest.mock"} & set(imported_modules(path)), path
