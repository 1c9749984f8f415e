"""Start the ranks of a run as processes of this machine, hear of their progress, and never leave one behind."""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from multiprocessing import connection, get_context, parent_process
from typing import Any

__all__ = ["RankFailed", "launch"]


class RankFailed(RuntimeError):
    """A rank raised or died. The text is one line."""


def launch(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    on_progress: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Run `function(rank, world, init_method, tick, *args)` in `world` processes; return the results in order of rank.

    `init_method` is for `torch.distributed`, over a file of this run only; `tick()` on rank 0 calls `on_progress` here.
    Function, arguments and results travel by pickle. Raises `RankFailed` for the first rank that fails, and ends the
    others, which then wait for it in vain.
    """
    processes = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="compact-logits-") as folder:
        events = processes.Queue()
        init_method = f"file://{folder}/rendezvous"
        members = [
            processes.Process(target=_serve, args=(function, rank, world, init_method, events, args), daemon=True)
            for rank in range(world)
        ]
        results: dict[int, Any] = {}
        try:
            for member in members:
                member.start()
            while len(results) < world:
                rank, kind, value = _next_event(events, members, results)
                if kind == "tick":
                    on_progress()
                elif kind == "result":
                    results[rank] = value
                else:
                    raise RankFailed(f"rank {rank} of {world} failed: {value}")
        finally:
            for member in members:
                member.kill()
            for member in members:
                member.join()
    return [results[rank] for rank in range(world)]


def _next_event(events: Any, members: list[Any], results: dict[int, Any]) -> tuple[int, str, Any]:
    while True:
        # Looked at before the queue: what a rank had to say is in there once it has ended.
        gone = [rank for rank, member in enumerate(members) if not member.is_alive() and rank not in results]
        try:
            event: tuple[int, str, Any] = events.get(timeout=0.5)
            return event
        except queue.Empty:
            if gone:
                code = members[gone[0]].exitcode
                hint = ", as it does when memory runs out" if code == -signal.SIGKILL else ""
                return gone[0], "error", f"its process ended with exit code {code}{hint}"


def _serve(
    function: Callable[..., Any], rank: int, world: int, init_method: str, events: Any, args: tuple[Any, ...]
) -> None:
    # Ctrl-C reaches the whole terminal; the parent alone answers it, and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Megatron and torch warn of optional packages that they miss and of plans for the future. None of it matters here.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    # The ranks talk over the loopback device: a machine's own name need not resolve.
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def tick() -> None:
        if rank == 0:
            events.put((rank, "tick", None))

    try:
        events.put((rank, "result", function(rank, world, init_method, tick, *args)))
    except BaseException as error:
        text = " ".join(str(error).split())
        events.put((rank, "error", f"{type(error).__name__}: {text}" if text else type(error).__name__))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
