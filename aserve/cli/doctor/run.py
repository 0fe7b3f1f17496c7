"""`aserve doctor MODEL`: loads torch, to ask it what is there, and no weight."""

import shutil
from collections.abc import Mapping

import msgspec

from aserve.cli.doctor.plan import Machine, here, make_plan
from aserve.cli.doctor.words import in_words
from aserve.cli.settings import Parsed
from aserve.cli.tool_flags import ReportOptions
from aserve.core.config import Options
from aserve.core.errors import CheckpointError


def run(parsed: Parsed, _environ: Mapping[str, str]) -> int:
    """Tell the plan; the exit status is 1 where the model cannot be served so."""
    options = on_this_machine(parsed.of(Options))
    machine, copies_tied_head = _measured(options)
    plan = make_plan(options, machine, copies_tied_head=copies_tied_head)
    if ReportOptions in parsed.groups and parsed.of(ReportOptions).json:
        print(msgspec.json.format(msgspec.json.encode({"can_run": plan.can_run} | msgspec.to_builtins(plan))).decode())
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        print(in_words(plan, width, has_options=bool(parsed.given - {"model", "dry_run"})))
    return 0 if plan.can_run else 1


def on_this_machine(options: Options) -> Options:
    """With an id's folder in the cache in its place. Raises `CheckpointError` for one that is not there: a plan
    downloads nothing.
    """
    from aserve.model_folder import may_be_id

    if not may_be_id(options.model):
        return options
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            options.model, revision=options.revision, cache_dir=options.download_dir, local_files_only=True
        )
    except HFValidationError as error:
        raise CheckpointError(f"{options.model}: neither a folder nor an id of the hub") from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{options.model}: not a local folder and not in the cache; aserve serve {options.model} downloads it"
        ) from error
    return msgspec.structs.replace(options, model=folder)


def _measured(options: Options) -> tuple[Machine, bool]:
    """This machine, and whether the output head is a copy of the embedding table where it is tied to it."""
    import torch

    from aserve.kernels.native.native_linear import can_be_native
    from aserve.loading import choose_device
    from aserve.model_folder import find_model
    from aserve.models.loader import read_dtype

    device = choose_device(options.device)
    dtype = read_dtype(find_model(options)[0], options.dtype)
    machine = here(device, options.device)
    if device.type == "cuda" or dtype == torch.float16:
        return machine, False
    is_native = machine.kernels is not None and machine.kernels.kind != "torch" and can_be_native(dtype)
    return machine, not is_native
