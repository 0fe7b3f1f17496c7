"""A rank's own process, as far as it can be run in this one."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aserve.core.config import Options
from aserve.core.errors import ConfigError
from aserve.parallel import rank
from aserve.parallel import task as tasks
from aserve.parallel.task import RankTask, rank_device
from aserve.runner.rank_messages import Close, Failed, PipeReader, decode_answer

pytestmark = pytest.mark.torch

PR_GET_PDEATHSIG = 2


def test_ranks_have_a_gpu_each_from_the_one_that_was_named_on(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for name, indices in (("cuda", [0, 1, 2]), ("cuda:0", [0, 1, 2]), ("cuda:2", [2, 3, 0])):
        monkeypatch.setattr(tasks, "choose_device", torch.device)
        assert [rank_device(name, rank, 3).index for rank in range(3)] == indices
        assert [device.index for device in taken[-2:]] == indices[1:], "ranks in processes of their own"
    with pytest.raises(ConfigError, match="torch finds 4 GPUs here"):
        rank_device("cuda", 0, 5)


class Ended(Exception):
    """The process would have, with an exit code."""


def test_one_that_cannot_load_says_why_before_it_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches an end without a word, of which rank 0 could tell no more than the exit code."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(rank, "os", SimpleNamespace(_exit=end))
    read_fd, write_fd = os.pipe()
    options = Options(model=str(tmp_path), device="cpu", tensor_parallel_size=2)
    task = RankTask(options, 1, str(tmp_path / "meeting"), torch.get_num_threads())
    with pytest.raises(Ended, match=str(rank.EXIT_FAILED)):
        rank.Rank(task, read_fd, write_fd)._load()
    os.close(write_fd)
    [answer] = map(decode_answer, PipeReader(read_fd).read() or [])
    os.close(read_fd)
    assert isinstance(answer, Failed)
    assert answer.kind == "CheckpointError"
    assert f"{tmp_path}: there is no config.json" in answer.message


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it sees its pipe end")
def test_one_asks_the_kernel_to_be_killed_with_whoever_started_it() -> None:
    """Catches one that stays for ever: it is stopped when rank 0 is killed, and cannot see its pipe end."""
    program = f"""
import ctypes, sys
from aserve.parallel.child import main
sys.argv[1:] = "", "0", "1", "-1"
try:
    main()
except SystemExit:
    signum = ctypes.c_int()
    ctypes.CDLL(None).prctl({PR_GET_PDEATHSIG}, ctypes.byref(signum), 0, 0, 0)
    print(signum.value)
"""
    asked = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    assert int(asked.stdout) == signal.SIGKILL


@pytest.mark.parametrize("is_loaded", [True, False])
def test_one_that_is_told_to_close_gives_back_what_it_has_made(
    monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    done: list[object] = []
    monkeypatch.setattr(rank, "os", SimpleNamespace(_exit=done.append))
    read_fd, write_fd = os.pipe()
    task = RankTask(Options(model="demo", device="cpu", tensor_parallel_size=2), 1, "meeting", torch.get_num_threads())
    one = rank.Rank(task, read_fd, write_fd)
    if is_loaded:
        monkeypatch.setattr(one, "_made", SimpleNamespace(close=lambda: done.append("closed")))
    one._heed(Close())
    assert done == (["closed", 0] if is_loaded else [0])
    os.close(read_fd)
    os.close(write_fd)
