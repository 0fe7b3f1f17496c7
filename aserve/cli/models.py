"""`aserve models`: what lies in the cache of the Hugging Face hub, and the bundled model; looks at headers alone.

Loads neither torch nor a weight. Whether a model fits is told by its weights and one request at its full length.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from aserve.cli.checks import device_of
from aserve.cli.doctor.machine import free_memory_bytes, size
from aserve.cli.settings import Parsed
from aserve.cli.tool_flags import ReportOptions
from aserve.core.config import Options
from aserve.core.errors import AserveError
from aserve.model_folder import DEMO_FOLDER, DEMO_MODEL, find_model
from aserve.models.spec import DTYPE_BYTES, dtype_name
from aserve.planning import spec_of
from aserve.weight_plan import plan_weights

SHORTEST: Final = 512
"""Tokens that a request is taken to need, where a model could take more than fit."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A model on this machine. disk_bytes: of its files. memory_bytes: of its weights, once loaded.

    problem: why it cannot be served; None where it can. fits: whether this machine's free memory holds it.
    """

    name: str
    folder: str
    disk_bytes: int
    revision: str | None = None
    architecture: str | None = None
    task: str | None = None
    memory_bytes: int | None = None
    fits: bool | None = None
    problem: str | None = None


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """cache: the folder that was looked into. problem: why nothing was found there; None where something was."""

    cache: str
    problem: str | None
    free_bytes: int
    device: str
    models: tuple[Found, ...]


def run(parsed: Parsed, _environ: Mapping[str, str]) -> int:
    """Tell them; the exit status is 0."""
    listing = list_models(parsed.of(Options))
    if parsed.of(ReportOptions).json:
        print(msgspec.json.format(msgspec.json.encode(listing)).decode())
        return 0
    for line in in_lines(listing, shutil.get_terminal_size((100, 24)).columns):
        print(line)
    return 0


def list_models(options: Options) -> Listing:
    """All that are there, by name, after the bundled one."""
    free_bytes = free_memory_bytes()
    of_demo = sum(path.stat().st_size for path in DEMO_FOLDER.iterdir() if path.is_file())
    found = [look(options, DEMO_MODEL, DEMO_FOLDER, of_demo, free_bytes)]
    cache, problem = _cache_folder(options.download_dir), None
    try:
        cached = list(_cached(cache))
    except AserveError as error:
        cached, problem = [], error.message
    if not cached and problem is None:
        problem = f"{cache} has no model of text"
    for name, revision, folder, disk_bytes in cached:
        one = look(options, name, folder, disk_bytes, free_bytes)
        found.append(msgspec.structs.replace(one, revision=revision))
    return Listing(
        cache=str(cache),
        problem=problem,
        free_bytes=free_bytes,
        device=device_of(options),
        models=tuple(found),
    )


def look(options: Options, name: str, folder: Path, disk_bytes: int, free_bytes: int) -> Found:
    """What is to be known of one without loading it."""
    found = Found(name=name, folder=str(folder), disk_bytes=disk_bytes)
    wished = msgspec.structs.replace(options, model=DEMO_MODEL if name == DEMO_MODEL else str(folder))
    try:
        checkpoint, pooling = find_model(wished)
        architectures = checkpoint.config.get("architectures") or [None]
        spec = spec_of(checkpoint)
        weights = plan_weights(checkpoint, spec, wished)
        dtype_bytes = DTYPE_BYTES[dtype_name(checkpoint.config, wished.dtype)]
    except AserveError as error:
        return msgspec.structs.replace(found, problem=_without(error.message, str(folder)))
    kv_bytes = 0
    if spec is not None and pooling is None:
        kv_bytes = min(spec.context_len, SHORTEST) * spec.kv_bytes_per_token(dtype_bytes)
    return msgspec.structs.replace(
        found,
        architecture=architectures[0],
        task="generate" if pooling is None else pooling.pooling.task,
        memory_bytes=weights.memory_bytes,
        fits=weights.memory_bytes + kv_bytes <= free_bytes,
    )


def in_lines(listing: Listing, width: int) -> Iterator[str]:
    """A table, and what to do with it."""
    names = max(len(model.name) for model in listing.models)
    yield f"{'MODEL':{names}}  {'ON DISK':>9}  {'IN MEMORY':>9}  FITS  ARCHITECTURE"
    for model in listing.models:
        begin = f"{model.name:{names}}  {size(model.disk_bytes):>9}"
        if model.problem is not None:
            yield _cut(f"{begin}  cannot be served: {model.problem}", width)
            continue
        fits = "yes" if model.fits else "no"
        task = "" if model.task == "generate" else f" ({model.task})"
        memory = size(model.memory_bytes or 0)
        yield _cut(f"{begin}  {memory:>9}  {fits:4}  {model.architecture}{task}", width)
    yield ""
    if listing.problem is not None:
        yield f"From the hub: none, since {listing.problem}."
    where = "memory are free" if listing.device == "cpu" else "host memory are free; aserve doctor tells of the GPU's"
    yield f"{size(listing.free_bytes)} of {where}. More of one: aserve doctor MODEL. Start one: aserve serve MODEL"


def _cache_folder(given: str | None) -> Path:
    if given is not None:
        return Path(given).expanduser()
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _cached(cache: Path) -> Iterator[tuple[str, str, Path, int]]:
    """Name, revision, folder and bytes of each model in the cache, its newest snapshot. Raises `AserveError`."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos: Any = scan_cache_dir(cache).repos
    except CacheNotFound:
        raise AserveError(f"there is no cache at {cache}") from None
    except (ValueError, OSError) as error:
        raise AserveError(f"{cache} cannot be read: {error}") from None
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        revisions = sorted(repo.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified))
        if repo.repo_type == "model" and revisions:
            newest = revisions[-1]
            yield repo.repo_id, newest.commit_hash, newest.snapshot_path, newest.size_on_disk


def _without(message: str, folder: str) -> str:
    """A complaint without the folder, which stands beside it."""
    return message.removeprefix(folder).lstrip(": /")


def _cut(line: str, width: int) -> str:
    """To the terminal's width, where it is shown on one."""
    return line[: width - 1] + "…" if sys.stdout.isatty() and len(line) > width else line
