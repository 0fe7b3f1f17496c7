"""The calls between floors, found in the code: who in one room calls what of another.

A room is a package of aserve, or one of its modules (docs/design.md, "Floors"). A seam is a function that another room
imports and uses, or a method of a class that another room imports, by name: where a module that knows the class says
`.name`. What holds no state and works on nothing but its arguments' own fields is none: core, whose rules and values
all rooms share, properties, and classes that are values or errors. Nor is what is called before the first request or
after the last one: by rooms that start and end a server, by loaders and warm-ups.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import aserve

ROOT = Path(aserve.__file__).parent
STARTING = frozenset({"build", "cli", "llm", "loop_thread", "terminal", "telling", "measuring", "drafters"}) | {
    *(
        "batch",
        "loading",
        "load",
        "model_folder",
        "model_text",
        "planning",
        "weight_plan",
        "parallel",
        "poolers",
        "scheduling",
        "recorders",
        "replay",
        "ray",
        "simulation",
        "demo",
        "__main__",
        "__init__",
    ),
}
"""Rooms whose calls are made where there is no request yet, or that are somebody's own application, or a process of
their own (what fails there is in tests/parallel)."""
VALUES = frozenset({"Struct", "NamedTuple", "Protocol", "Enum", "StrEnum", "IntEnum", "TypedDict", "Exception"})

Seam = tuple[str, str]
"""A module, and what in it is called."""


def room_of(module: str) -> str:
    """The package or module of aserve in which a module is."""
    return module.split(".")[1] if "." in module else "__init__"


class _Module:
    """One file: what it defines, what it imports of aserve, and which attributes it uses."""

    def __init__(self, path: Path, root: Path) -> None:
        relative = path.relative_to(root.parent).with_suffix("")
        self.name = ".".join(relative.parts).removesuffix(".__init__")
        self.tree = ast.parse(path.read_text())
        self.imported: set[Seam] = set()
        self.names: set[str] = set()
        self.made: set[str] = set()
        self.attributes: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aserve."):
                self.imported |= {(node.module or "", alias.name) for alias in node.names}
            elif isinstance(node, ast.Attribute):
                self.attributes.add(node.attr)
            elif isinstance(node, ast.Name):
                self.names.add(node.id)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                self.made.add(node.func.id)


def seams(root: Path = ROOT) -> dict[Seam, set[str]]:
    """Each call between floors, and the modules that make it. root: the package's folder, "aserve"."""
    modules = {module.name: module for path in sorted(root.rglob("*.py")) for module in [_Module(path, root)]}
    defined = {name: _definitions(module.tree) for name, module in modules.items()}
    found: dict[Seam, set[str]] = defaultdict(set)
    for caller in modules.values():
        if room_of(caller.name) in STARTING:
            continue
        for module, name in caller.imported:
            if module not in modules or room_of(module) in (room_of(caller.name), "core"):
                continue
            for called in _called(defined[module].get(name), name, caller):
                found[module, called].add(caller.name)
    return dict(found)


def _definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in tree.body if isinstance(node, kinds)}


def _called(node: ast.stmt | None, name: str, caller: _Module) -> Iterator[str]:
    """What a module that imports a name calls of it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name in caller.names:
        yield name
    if not isinstance(node, ast.ClassDef) or _is_value(node):
        return
    for method in node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or _is_property(method):
            continue
        if method.name in caller.attributes or (method.name == "__init__" and name in caller.made):
            yield f"{name}.{method.name}"


def _is_value(node: ast.ClassDef) -> bool:
    """Whether a class holds fields, or says what others have to have, and does nothing."""
    bases = {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases}
    is_dataclass = any("dataclass" in ast.dump(decorator) for decorator in node.decorator_list)
    return is_dataclass or bool(bases & VALUES) or any(base.endswith("Error") for base in bases)


def _is_property(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(getattr(one, "id", getattr(one, "attr", "")) in ("property", "setter") for one in method.decorator_list)
