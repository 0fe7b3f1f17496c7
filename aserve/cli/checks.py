"""What can be found wrong with a command before torch is loaded: in a fraction of a second.

Whatever passes here is looked at again where it is used, which is where the words come from, wherever they can.
"""

import ctypes
import socket
from pathlib import Path
from typing import Final

from aserve.cli.flags import ServerOptions
from aserve.cli.settings import Parsed
from aserve.cli.tool_flags import ClientOptions
from aserve.core.config import Options, resolve
from aserve.core.errors import ConfigError
from aserve.core.quantization import why_no_cache
from aserve.models.checkpoint import Checkpoint
from aserve.planning import check_ranks, cpu_facts, is_native, spec_of, why_not_quantized

DRIVER: Final = "libcuda.so.1"


def check_early(parsed: Parsed) -> None:
    """Raise `ConfigError` or `CheckpointError` for a command that cannot go well."""
    if parsed.command == "models" or _asks_elsewhere(parsed):
        return
    options = parsed.of(Options)
    check_device(options.device)
    check_files(options)
    check_parsers(options)
    is_plan = parsed.command == "doctor" or (parsed.command == "serve" and parsed.of(ServerOptions).dry_run)
    check_model(options, with_texts=not is_plan)  # a plan says what of them is amiss, and what helps
    if parsed.command == "serve" and not is_plan:
        server = parsed.of(ServerOptions)
        if server.api_keys_file is not None and not Path(server.api_keys_file).is_file():
            raise ConfigError(f"--api-keys-file: {server.api_keys_file} is no file")
        check_tls(server)


def _asks_elsewhere(parsed: Parsed) -> bool:
    """Whether a server is asked, so that no model is loaded here. Raises `ConfigError` for options that would be."""
    if ClientOptions not in parsed.groups or parsed.of(ClientOptions).url is None:
        return False
    of_model = parsed.given & set(Options.__struct_fields__) - {"model", "seed"}
    if of_model:
        option = "--" + min(of_model).replace("_", "-")
        raise ConfigError(
            f"{option} is of a model in this process, and --url asks one elsewhere: leave one of them out"
        )
    return True


def check_device(wish: str) -> None:
    """Raise `ConfigError` for cuda where there is none, with the reason."""
    if wish == "cuda" and (reason := why_no_gpu()) is not None:
        raise ConfigError(f"device cuda: {reason}; --device cpu serves without one")


def why_no_gpu() -> str | None:
    """Why torch will find no GPU here; None where it should. Asks the driver and the name of torch's build."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return f"there is no NVIDIA driver here ({DRIVER} is not found)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver shows no GPU to this process"
    from importlib.metadata import PackageNotFoundError, version

    try:
        if "+cpu" in version("torch"):
            return f"torch {version('torch')} is built without CUDA; install one from pytorch.org that has it"
    except PackageNotFoundError:
        return "torch is not installed"
    return None


def device_of(options: Options) -> str:
    """Which device torch should find: cpu or cuda."""
    return "cpu" if options.device == "cpu" or why_no_gpu() is not None else "cuda"


def check_files(options: Options) -> None:
    """Raise `ConfigError` for files and folders that are named and are not there."""
    if options.chat_template is not None and not Path(options.chat_template).is_file():
        raise ConfigError(f"--chat-template: {options.chat_template} is no file")
    if options.record is not None and Path(options.record).exists():
        raise ConfigError(f"--record: {options.record} exists, and a recording is written over nothing")
    if options.record is not None and not Path(options.record).absolute().parent.is_dir():
        raise ConfigError(f"--record: {Path(options.record).absolute().parent} is no folder")
    if options.lora_root is not None and not Path(options.lora_root).is_dir():
        raise ConfigError(f"--lora-root: {options.lora_root} is no folder")
    for name, folder in options.lora_modules:
        if not Path(folder).is_dir():
            raise ConfigError(f"--lora-modules: {folder}, of {name}, is no folder")


def check_parsers(options: Options) -> None:
    """Raise `ConfigError` for names of formats that there are not."""
    from aserve.text.formats.choice import check_names

    check_names(calls=options.tool_call_parser, thoughts=options.reasoning_parser)


def check_model(options: Options, *, with_texts: bool = True) -> None:
    """Raise `CheckpointError` or `ConfigError` for a folder that cannot be served so; an id is looked up later."""
    from aserve.model_folder import find_model, may_be_id

    if may_be_id(options.model):
        return
    checkpoint, pooling = find_model(options)
    check_ranks(options, checkpoint)
    if with_texts:
        check_texts(options, checkpoint)
    if pooling is not None:
        return
    if options.quantization is not None and (reason := why_not_quantized(options, checkpoint, device_of(options))):
        raise ConfigError(reason)
    if reason := why_no_cache(options.kv_cache_dtype, device_of(options)):
        raise ConfigError(reason)
    if not is_native(checkpoint):
        return
    if options.device == "cpu" or options.kv_cache_memory_bytes is not None or not _has_driver():
        spec = spec_of(checkpoint)
        assert spec is not None, "a native family's is exact"
        resolve(options, cpu_facts(options, checkpoint, spec))


def check_texts(options: Options, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` or `ConfigError` for a tokenizer, a template or sampling defaults that cannot be."""
    from aserve.loading import sampling_defaults
    from aserve.model_text import check_text_files

    check_text_files(options, checkpoint)
    sampling_defaults(options, checkpoint)


def _has_driver() -> bool:
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


def check_tls(server: ServerOptions) -> None:
    """Raise `ConfigError` for files with which a server cannot encrypt what it says."""
    from aserve.server.sockets import tls_context

    tls_context(server.ssl_certfile, server.ssl_keyfile)


def check_address(parsed: Parsed) -> None:
    """Raise `ConfigError` where a server cannot listen now; later it perhaps can, since who is there may leave."""
    if parsed.command != "serve":
        return
    from aserve.server.sockets import listen

    server = parsed.of(ServerOptions)
    if not server.dry_run and server.uds is None and server.port != 0:
        sock = listen(server.host, server.port, 1)
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()
