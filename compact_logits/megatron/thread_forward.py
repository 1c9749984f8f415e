"""A module's forward, replaced for the calls of one thread, and put back without a trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["ThreadForwards", "forward_replaced"]

_lock = threading.Lock()


class ThreadForwards:
    """What stands as a module's `forward` while some thread has replaced it; every other thread gets the ordinary one.

    Two threads may each have their own at one time. A lock held for the time of a forward would instead make one
    thread wait for the other's collectives, and on another rank the other for the one's.
    """

    def __init__(self, ordinary: Callable[..., Any]) -> None:
        self.ordinary = ordinary
        self.of_thread: dict[int, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.of_thread.get(threading.get_ident(), self.ordinary)(*args, **kwargs)


@contextmanager
def forward_replaced(
    module: Any,  # a torch module
    replacement: Callable[..., Any],  # (ordinary, *args, **kwargs): called with the module's own forward first
) -> Iterator[None]:
    """Within the context, this thread's calls of `module` run `replacement`, after the module's pre-hooks as ever.

    Only the instance is touched. When the last thread has left, also by an exception, the module is as it was.
    """
    thread = threading.get_ident()
    with _lock:
        forwards = vars(module).get("forward")
        if not isinstance(forwards, ThreadForwards):
            forwards = ThreadForwards(module.forward)
            module.forward = forwards
        assert thread not in forwards.of_thread, "a forward is replaced once at a time in a thread"
        ordinary = forwards.ordinary
        forwards.of_thread[thread] = lambda *args, **kwargs: replacement(ordinary, *args, **kwargs)
    try:
        yield
    finally:
        with _lock:
            del forwards.of_thread[thread]
            if not forwards.of_thread:
                del module.forward
