"""A server in a process of its own, over a scripted engine.

    python -m tests.server.scripted_server WHAT DRAIN_TIMEOUT_S [KEYS]

WHAT: "talks" answers for ever, "ends" ends after some thousand tokens, "loads" never gets its model, "lacks" has none.
KEYS: a file of API keys.
"""

import sys
import threading
from pathlib import Path

from aserve.core.errors import CheckpointError
from aserve.engine import Engine
from aserve.http import Keyring, create_app
from aserve.server import ServerConfig, logging_to, run
from tests.engines import EOS, scripted_loader


def _never(report):
    threading.Event().wait()


def _lacking(report):
    raise CheckpointError("no-such-model: there is no such folder")


def main(what: str, drain_timeout_s: str, keys: str | None = None) -> int:
    answer = b"a" * 20_000 if what == "ends" else b"a" * 10_000_000
    loaders = {"loads": _never, "lacks": _lacking}
    load = loaders.get(what) or scripted_loader((*answer, EOS), max_model_len=10_000_000, num_blocks=200_000)
    engine = Engine(load)
    keyring = None if keys is None else Keyring(path=Path(keys), tenants=engine.tenants)
    app = create_app(engine, keyring=keyring)
    config = ServerConfig(port=0, drain_timeout_s=float(drain_timeout_s))
    with logging_to(sys.stderr, "info", "text") as say:
        on_hangup = keyring and keyring.reload
        return run(engine, app, config, on_ready=lambda _: say("ready"), say=say, on_hangup=on_hangup)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
