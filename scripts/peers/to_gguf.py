"""A checkpoint of make_models.py as GGUF, by the converter in llama.cpp's own source tree.

    python scripts/peers/to_gguf.py peers/llama MODEL OUT.gguf float32        or bfloat16, or int8, which is Q8_0

The converter recognises a tokenizer by a hash of what it makes of one text, and has never seen ours; its splitting is
Qwen2's, so that is what it is told. peers/llama: what install_llama.sh made, with the sources in `src`.
"""

import sys
from pathlib import Path

LLAMA, MODEL, OUT = map(Path, sys.argv[1:4])
for folder in ("python", "src/gguf-py", "src"):
    sys.path.insert(0, str(LLAMA / folder))

import gguf  # type: ignore[import-not-found]  # noqa: E402  found where the lines above point
import torch  # noqa: E402
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class  # type: ignore[import-not-found]  # noqa: E402

FILE_TYPES = {
    "float32": gguf.LlamaFileType.ALL_F32,
    "bfloat16": gguf.LlamaFileType.MOSTLY_BF16,
    "int8": gguf.LlamaFileType.MOSTLY_Q8_0,
}


def main() -> None:
    architecture = get_model_architecture(ModelBase.load_hparams(MODEL, False), ModelType.TEXT)
    found = get_model_class(architecture, mmproj=False)
    told = {"model_arch": found.model_arch, "get_vocab_base_pre": lambda self, tokenizer: "qwen2"}
    converter = type("Converter", (found,), told)
    with torch.inference_mode():
        converter(MODEL, FILE_TYPES[sys.argv[4]], OUT).write()


if __name__ == "__main__":
    main()
