"""A rank without a model, for tests of how ranks are told and watched: answers at once, and does as the tests want.

Its arguments are how it behaves, the file descriptors of both pipes, and the process that started it.
"""

import os
import sys
import time

from aserve.runner.rank_messages import (
    AdapterRead,
    Close,
    Failed,
    Load,
    Loaded,
    PipeReader,
    PipeWriter,
    Run,
    decode_told,
    frame,
)


def main() -> None:
    behaviour, told_fd, answer_fd, _parent = sys.argv[1:]
    reader, writer = PipeReader(int(told_fd)), PipeWriter(int(answer_fd))
    if behaviour == "cannot load":
        writer.write(frame(Failed("CheckpointError", "no such folder")))
        os._exit(70)
    writer.write(frame(Loaded()))
    while (payloads := reader.read()) is not None:
        for payload in payloads:
            told = decode_told(payload)
            if isinstance(told, Close) and behaviour != "does not end":
                time.sleep(0.3 if behaviour == "slow to end" else 0.0)
                os._exit(0)
            if isinstance(told, Load):
                refuses = behaviour in ("no adapters", "out of memory")
                writer.write(frame(AdapterRead(told.ticket, told.folder if refuses else None)))
            if isinstance(told, Run) and behaviour == "out of memory":
                writer.write(frame(Failed("InsufficientMemoryError", "memory ran out")))
            if isinstance(told, Run) and behaviour == "exits":
                os._exit(3)
    os._exit(1)
