"""Collectives of tensors without memory, in versions of torch that know none: 2.6, for one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.futures import Future
from torch.library import Library

__all__ = ["meta_collectives"]

# Each gives back its first argument, which there is nothing to write into.
_NAMES = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")


@contextmanager
def meta_collectives() -> Iterator[None]:
    """Within the context, all-gather, reduce-scatter and all-reduce of meta tensors are there, by torch or by us."""
    library = Library("c10d", "IMPL")
    for name in _NAMES:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
            library.impl(name, _done_at_once, "Meta")
    try:
        yield
    finally:
        library._destroy()


def _done_at_once(first: Any, *_: Any) -> tuple[Any, Any]:
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    future: Future[None] = Future()
    future.set_result(None)
    return first, _create_work_from_future(future).boxed()
