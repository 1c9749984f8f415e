"""Count collectives through the dispatcher, where all of them pass, under whatever name a library holds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["count_collectives"]

# The dispatcher's names of the operators behind the functions of torch.distributed.
_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "recv_": "recv",
}


@contextmanager
def count_collectives() -> Iterator[Counter[str]]:
    """Count this thread's calls by their name in torch.distributed, forward and backward, also of point to point.

    Object collectives count as the tensor collectives they consist of, functional ones as `functional.<name>`.
    """
    counts: Counter[str] = Counter()
    with _Counting(counts):
        yield counts


class _Counting(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, name = str(func).partition(".")
        name = name.partition(".")[0]
        if namespace == "c10d":
            self._counts[_NAMES.get(name, name)] += 1
        elif namespace in ("_c10d_functional", "_c10d_functional_autograd") and name != "wait_tensor":
            self._counts[f"functional.{name}"] += 1
        return func(*args, **(kwargs or {}))
