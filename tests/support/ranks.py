"""Run a function on several gloo ranks, each a process of its own, so that nothing a rank does can hang the suite.

The function takes `(rank, world, *args)`, stands at the top level of a module, and finds the default process group
ready, its torch on one thread and its seed at 0. Arguments and results travel by pickle, tensors by value. The
processes are forked from a server that has torch imported already: ready in a fraction of a second instead of two.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.rank_worker import STACKS_SIGNAL, serve

__all__ = ["RankError", "RankPool", "Ranks", "run_ranks"]

# How long the other ranks get to answer once one has failed: they often wait for it in a collective.
_GRACE_SECONDS = 3.0

# Each gloo group has a thread that wakes a hundred times a second: functions that leave theirs behind, as Megatron
# does with dozens at a time, would in the end leave the machine no time for anything else.
_MOST_GROUPS = 16

_processes = get_context("forkserver")
# By name only where the server can import it, which is not so on every Python: torch alone is what takes long.
_processes.set_forkserver_preload(["torch.distributed", "tests.support.rank_worker"])


class RankError(AssertionError):
    """A rank raised, died or did not answer in time. The text holds its traceback, and says how the others stood."""


class Ranks:
    """`world` living processes in one gloo group. The first failure ends them all."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.groups = 1  # most process groups that any of the ranks was in after a call
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        # Hosted here, at a port the system picks: no second process can take it in between.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._members = []
        for rank in range(world):
            ours, theirs = _processes.Pipe()
            args = (theirs, rank, world, self._store.port, str(self._stacks(rank)))
            member = _processes.Process(target=serve, args=args, daemon=True, name=f"rank {rank} of {world}")
            member.start()
            theirs.close()
            self._pipes.append(ours)
            self._members.append(member)

    @property
    def alive(self) -> bool:
        return bool(self._members) and all(member.is_alive() for member in self._members)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Return what `fn(rank, world, *args)` returned on each rank.

        Raises `RankError` for the rank that failed first, or for those that did not answer within `timeout` seconds.
        """
        call = pickle.dumps((dict(os.environ), pickle.dumps((fn, args))))
        answers: dict[int, Any] = {}
        failures: list[str] = []
        end = time.monotonic() + timeout
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(call)
            except OSError:
                failures.append(f"rank {rank} of {self.world} was gone before the call")
        waiting = dict(zip(self._pipes, range(self.world), strict=True))
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                ok, answer = self._receive(pipe, rank)
                if ok:
                    answers[rank] = answer
                else:
                    failures.append(answer)
                    end = min(end, time.monotonic() + _GRACE_SECONDS)
        if failures or waiting:
            failures += [self._overdue(rank, timeout) for rank in waiting.values()]
            self.close()
            raise RankError("\n".join(failures))
        return [answers[rank] for rank in range(self.world)]

    def close(self) -> None:
        """End the processes, at once and for good."""
        for member in self._members:
            member.kill()
        for member, pipe in zip(self._members, self._pipes, strict=True):
            member.join()
            pipe.close()
        self._members, self._pipes = [], []
        self._folder.cleanup()

    def _receive(self, pipe: Connection, rank: int) -> tuple[bool, Any]:
        try:
            ok, answer, groups = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            self._members[rank].join(_GRACE_SECONDS)
            return False, f"rank {rank} of {self.world} died with exit code {self._members[rank].exitcode}"
        self.groups = max(self.groups, groups)
        value = pickle.loads(answer)
        return ok, value if ok else f"rank {rank} of {self.world} raised:\n{value}"

    def _overdue(self, rank: int, timeout: float) -> str:
        """Name a rank that did not answer, and the Python line on which it stands."""
        pid = self._members[rank].pid
        assert pid is not None
        if self._members[rank].is_alive():
            os.kill(pid, STACKS_SIGNAL)
            time.sleep(0.1)
        stack = self._stacks(rank).read_text() if self._stacks(rank).exists() else "(not started yet)"
        return f"rank {rank} of {self.world} had not answered (limit {timeout:g} s), it stood in:\n{stack}"

    def _stacks(self, rank: int) -> Path:
        return Path(self._folder.name) / f"{rank}.txt"


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run `fn(rank, world, *args)` on `world` fresh processes and return the results in order of rank.

    For functions that change the process: parallel state, patches, environment. Raises as `Ranks.run`.
    """
    with closing(Ranks(world)) as ranks:
        return ranks.run(fn, *args, timeout=timeout)


class RankPool:
    """Keeps one set of ranks for every world size asked for, and replaces one that failed or gathered many groups."""

    def __init__(self) -> None:
        self._sets: dict[int, Ranks] = {}

    def run(self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """As `run_ranks`, on processes that earlier calls have used: `fn` must leave them as it found them."""
        ranks = self._sets.get(world)
        if ranks is None or not ranks.alive:
            if ranks is not None:
                ranks.close()
            ranks = self._sets[world] = Ranks(world)
        results = ranks.run(fn, *args, timeout=timeout)
        if ranks.groups > _MOST_GROUPS:
            ranks.close()
        return results

    def close(self) -> None:
        for ranks in self._sets.values():
            ranks.close()
        self._sets = {}
