"""The header of a safetensors file: which tensors are in it, of which type and shape. Read without torch.

    8 bytes: n, little-endian  |  n bytes of JSON: {name: {dtype, shape, data_offsets}, ...}  |  the tensors' bytes

Checked as strictly as the format allows: what passes lies in the file, without gaps or overlaps. The format is
described at https://github.com/huggingface/safetensors. Does not know what a tensor is for.
"""

import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec

from aserve.core.errors import CheckpointError

LFS_POINTER: Final = b"version "
"""How the text begins that a clone without Git LFS has in a file's place."""
MAX_HEADER_BYTES: Final = 2**25
MAX_TENSORS: Final = 2**15
"""In a file. DeepSeek-V3 has 91,000, in 163 files."""
MAX_NAME: Final = 200
BITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Of an element, by the format's names of types."""

Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class TensorHeader(msgspec.Struct, frozen=True, gc=False):
    """One tensor. data_offsets: its first byte and the one after its last, counted from the end of the header."""

    dtype: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=8)]
    data_offsets: tuple[Size, Size]

    @property
    def num_elements(self) -> int:
        """1 for a scalar."""
        return math.prod(self.shape)


_entries: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tensor: Final = msgspec.json.Decoder(TensorHeader)


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of a file, by name. Raises `CheckpointError`, naming file and tensor, for what is no safetensors."""
    raw, num_data_bytes = _read_raw(path)
    tensors = _decode(path, raw)
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        bits = BITS.get(tensor.dtype)
        if bits is None:
            raise _refusal(path, f"tensor {name} has dtype {tensor.dtype[:40]!r}, not one of {', '.join(BITS)}")
        start, stop = tensor.data_offsets
        if start != end:
            kind = "overlaps the one before it" if start < end else "leaves a gap before it"
            raise _refusal(path, f"tensor {name} {kind}: its data_offsets begin at {start}, and {end} is next")
        num_bytes = -(-tensor.num_elements * bits // 8)
        if stop - start != num_bytes:
            raise _refusal(
                path,
                f"tensor {name} has data_offsets of {stop - start} bytes, but {tensor.dtype} {list(tensor.shape)} "
                f"takes {num_bytes}",
            )
        end = stop
        if end > num_data_bytes:
            raise _refusal(
                path, f"tensor {name} ends at byte {end}, but the file has {num_data_bytes} after its header"
            )
    if end != num_data_bytes:
        raise _refusal(path, f"{num_data_bytes} bytes follow the header, but its tensors take {end}")
    return tensors


def _read_raw(path: Path) -> tuple[bytes, int]:
    """The header's JSON, and how many bytes follow it."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            begin = file.read(8)
            num_bytes = int.from_bytes(begin, "little")
            if status.st_size < 8 or not stat.S_ISREG(status.st_mode):
                raise _refusal(path, f"it has {status.st_size} bytes; the header's length alone takes 8")
            if begin == LFS_POINTER:
                raise _refusal(
                    path, "it is a pointer of Git LFS; git lfs pull, in the clone, fetches what it points to"
                )
            allowed = min(status.st_size - 8, MAX_HEADER_BYTES)
            if num_bytes > allowed:
                raise _refusal(path, f"its header claims {num_bytes} bytes; {allowed} are there or allowed")
            return file.read(num_bytes), status.st_size - 8 - num_bytes
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _decode(path: Path, raw: bytes) -> dict[str, TensorHeader]:
    num_tensors = raw.count(b'"data_offsets"')
    if num_tensors > MAX_TENSORS:
        raise _refusal(path, f"its header names {num_tensors} tensors; {MAX_TENSORS} are allowed")
    try:
        entries = _entries.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _refusal(path, f"its header is no JSON object: {error}") from error
    entries.pop("__metadata__", None)
    tensors = {}
    while entries:
        name, entry = entries.popitem()
        if not name.isprintable() or len(name) > MAX_NAME:
            raise _refusal(path, f"tensor {name[:40]!a}... is no name of at most {MAX_NAME} printable characters")
        try:
            tensors[name] = _tensor.decode(entry)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise _refusal(path, f"tensor {name}: {error}") from error
    return tensors


def _refusal(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: not readable as safetensors: {reason}")
