"""Triton's interpreter, made quicker: it does the same with the same checks, in half of the time. And mended.

What it repeats without need is done once:

- For every launch, and for every call of a device function in it, it replaces the functions of `triton.language`, some
  500 names, by its own. What is replaced stays replaced here: nothing in a process that interprets compiles.
- For every operation on integers it works out in ten more whether it overflows, and throws that away unless it was
  asked to debug. It works out nothing here that it throws away.
- Which type of NumPy's stands for one of Triton's is worked out in a dictionary that is made for each question.

What it gets wrong: float32 becomes float8 by torch, as a GPU rounds. It rounds 127.5 to 64, and makes 384 of what is no
number.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def make_quick() -> None:
    """Change the interpreter that is loaded, unless it has been or is of a version whose insides are others."""
    from triton.runtime import interpreter

    needed = ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "_convert_float")
    if hasattr(interpreter, "is_quick") or not all(hasattr(interpreter, name) for name in needed):
        return
    interpreter.is_quick = True
    interpreter._patch_lang = patched_once(interpreter._patch_lang, interpreter._LangPatchScope)
    interpreter._get_np_dtype = looked_up_once(interpreter._get_np_dtype)
    interpreter._convert_float = rounding_as_a_gpu(interpreter._convert_float, interpreter.tl)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def patched_once(patch: Callable[[Any], Any], nothing_to_restore: Callable[[], Any]) -> Callable[[Any], Any]:
    """Replaces what a function's module sees of `triton.language` the first time only, and for good."""
    seen = set()

    def patch_once(fn: Any) -> Any:
        if fn.__module__ not in seen:
            seen.add(fn.__module__)
            patch(fn)
        return nothing_to_restore()

    return patch_once


def looked_up_once(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's type for one of Triton's: a block's is that of its elements, and types of one name are the same."""
    known: dict[str, Any] = {}

    def known_or_looked_up(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    return known_or_looked_up


def rounding_as_a_gpu(convert: Callable[..., Any], tl: Any) -> Callable[..., Any]:
    """Converts numbers between types of floats; float32 to float8 (e4m3) to the nearest, at most the largest."""
    import torch

    def rounded_or_converted(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(numbers, source, target, rounding)
        return torch.from_numpy(numbers).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    return rounded_or_converted
