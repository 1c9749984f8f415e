"""The child's side of `ranks`: join the group, then answer one call after another until the pipe closes."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

__all__ = ["STACKS_SIGNAL", "serve"]

STACKS_SIGNAL = signal.SIGUSR1

# Longer than any call may take: the parent's clock ends a call that hangs, and knows where each rank stands.
_GROUP_TIMEOUT = timedelta(hours=1)


def serve(pipe: Connection, rank: int, world: int, port: int, stacks_path: str) -> None:
    """Run `(fn, args, environ)` calls from `pipe` as `fn(rank, world, *args)`, answered by `(ok, pickled, groups)`.

    `groups` is how many process groups the rank is in, once the call is over.
    """
    # The ranks talk over the loopback device: a machine's own name need not resolve.
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # Kept open for the life of the process: the signal handler writes to it.
    stacks = open(stacks_path, "w")  # noqa: SIM115
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=False)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_GROUP_TIMEOUT)
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        ok, answer = _answer(call, rank, world)
        _save_coverage()
        pipe.send_bytes(pickle.dumps((ok, answer, len(dist.distributed_c10d._world.pg_map))))


def _save_coverage() -> None:
    """Where lines are counted: ranks are ended by force, and would take the counts along."""
    coverage = sys.modules.get("coverage")
    measured = None if coverage is None else coverage.Coverage.current()
    if measured is not None:
        measured.save()


def _answer(call: bytes, rank: int, world: int) -> tuple[bool, bytes]:
    try:
        environ, function = pickle.loads(call)
        os.environ.clear()
        os.environ.update(environ)
        fn, args = pickle.loads(function)
        torch.manual_seed(0)
        return True, pickle.dumps(fn(rank, world, *args))
    except BaseException:
        return False, pickle.dumps(traceback.format_exc())
