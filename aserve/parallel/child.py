"""What the process of a rank begins with, before it imports what takes seconds: nobody's signals but rank 0's end it.

A terminal's Ctrl-C is rank 0's affair, which goes on until its requests have ended. When rank 0 is killed, so is this
process, by the kernel where it can (Linux), even while it is stopped; elsewhere it ends when it sees its pipe end.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Read the command line (a task, two file descriptors and rank 0's process), and be a rank until told to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    task, told_fd, answer_fd, parent = sys.argv[1:]
    if os.getppid() != int(parent):  # it was gone before it could be asked for
        sys.exit(1)

    import msgspec

    from aserve.parallel.rank import Rank
    from aserve.parallel.task import RankTask

    Rank(msgspec.json.decode(task, type=RankTask), int(told_fd), int(answer_fd)).serve()
