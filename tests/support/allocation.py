"""See every tensor that torch makes on this thread, forward and backward, through the dispatcher.

Nothing is replaced, so a name bound before (`from torch import empty`) escapes as little as a library call does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Allocation", "AllocationTracker"]


@dataclass(frozen=True)
class Allocation:
    """One tensor as an operator returned it. Views of one storage share its number."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    storage: int


class AllocationTracker(TorchDispatchMode):
    """While active, records each tensor whose storage came into being under it, and the bytes of those storages.

    A view of, or an in-place write to, a tensor from outside makes nothing. Only the CPU backward runs on the calling
    thread by nature; torch carries an active mode along to the threads of other devices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Allocation] = []
        self.live_bytes = 0
        self.peak_bytes = 0
        self._numbers: dict[int, int] = {}  # id of a living storage that was made here -> its number
        self._sizes: dict[int, int] = {}  # number of a living storage -> its bytes
        self._count = 0

    def largest_rows(self, last_dim: int) -> int:
        """Most rows that a recorded tensor with that last dimension has; 0 if there is none.

        Take sizes in which the dimension sought is unlike all others: autograd may form the weight's gradient
        transposed, (hidden, vocab).
        """
        wide = (a for a in self.records if a.shape and a.shape[-1] == last_dim)
        return max((a.nbytes // (a.dtype.itemsize * last_dim) for a in wide), default=0)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        from_outside = {
            id(tensor.untyped_storage()): tensor
            for tensor in _tensors((args, kwargs))
            if id(tensor.untyped_storage()) not in self._numbers
        }
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            if id(tensor.untyped_storage()) not in from_outside:
                self._record(str(func), tensor)
        return out

    def _record(self, op: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        number = self._numbers.get(id(storage))
        if number is None:
            number = self._count
            self._count += 1
            self._numbers[id(storage)] = number
            weakref.finalize(storage, self._forget, id(storage)).atexit = False
        self.live_bytes += storage.nbytes() - self._sizes.get(number, 0)
        self._sizes[number] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        nbytes = tensor.numel() * tensor.element_size()
        self.records.append(Allocation(op, tuple(tensor.shape), tensor.dtype, nbytes, number))

    def _forget(self, storage_id: int) -> None:
        self.live_bytes -= self._sizes.pop(self._numbers.pop(storage_id))


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
