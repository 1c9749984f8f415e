"""Ranks that fail, die, or are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from compact_logits.cli.launch import RankFailed, launch

Tick = Callable[[], None]


def work(rank: int, world: int, init_method: str, tick: Tick, what: str) -> Any:
    tick()
    if what == "raise" and rank == 1:
        raise ValueError("two\nlines\tof it")
    if what == "die" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("raise", "die"):
        time.sleep(600)
    return rank, world, os.getpid()


def test_results_in_order_and_ticks_of_rank_0() -> None:
    ticks = []
    results = launch(2, work, "return", on_progress=lambda: ticks.append(1))
    assert [result[:2] for result in results] == [(0, 2), (1, 2)]
    assert len(ticks) == 1
    for _, _, pid in results:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise", "rank 1 of 2 failed: ValueError: two lines of it"),
        ("die", "rank 1 of 2 failed: its process ended with exit code -9, as it does when memory runs out"),
    ],
)
def test_the_first_failure_ends_all(what: str, said: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        launch(2, work, what)
    assert str(caught.value) == said
    assert time.monotonic() - start < 300, "the rank that still slept was ended"


def report_and_sleep(rank: int, world: int, init_method: str, tick: Tick, path: str) -> None:
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


def test_no_rank_outlives_a_killed_parent(tmp_path: Any) -> None:
    path = tmp_path / "pid"
    script = (
        "from compact_logits.cli.launch import launch\nfrom tests.cli.test_launch import report_and_sleep\n"
        f"if __name__ == '__main__':\n    launch(1, report_and_sleep, {str(path)!r})\n"
    )
    (tmp_path / "script.py").write_text(script)
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "script.py")], env=environ)
    try:
        wait_until(lambda: path.exists() and path.read_text() != "")
    finally:
        parent.kill()
        parent.wait()
    pid = int(path.read_text())
    wait_until(lambda: not alive(pid))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but was not waited for by its new parent does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
