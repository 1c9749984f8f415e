"""Measure the most memory that logits take at one time, forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LargestLogits"]


class LargestLogits(TorchDispatchMode):
    """While active, remembers the largest new tensor whose last axis is `vocab_local` wide, and the most memory of
    slices of logits: all products with parts of the head's transposed weight that are alive at one time.

    Views make nothing new, and a tensor counts by the bytes that it occupies. The gradients, `(vocab_local, hidden)`
    and `(rows, hidden)`, have another last axis, provided that `hidden` is not `vocab_local`.
    """

    def __init__(
        self,
        vocab_local: int,
        weight: Tensor | None = None,  # (vocab_local, hidden)
    ) -> None:
        super().__init__()
        self.nbytes = 0
        self.shape: tuple[int, ...] = ()
        self.dtype = ""
        self._vocab_local = vocab_local
        self._weight = None if weight is None else _storage(weight)
        self._slices: dict[int, int] = {}  # bytes of the living ones, by storage

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        known = {_storage(tensor) for tensor in given}
        projects = any(_storage(each) == self._weight and each.dim() == 2 and each.stride(1) > 1 for each in given)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if not tensor.numel() or not tensor.dim():
                continue
            if tensor.shape[-1] == self._vocab_local and _storage(tensor) not in known:
                nbytes = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
                self._remember(tensor, nbytes, tensor.shape[-1])
            elif projects and _storage(tensor) != self._weight:
                self._add_slice(tensor)
                nbytes = sum(self._slices.values())
                self._remember(tensor, nbytes, nbytes * tensor.shape[-1] // (tensor.numel() * tensor.element_size()))
        return result

    def _add_slice(self, tensor: Tensor) -> None:
        key, storage = _storage(tensor), tensor.untyped_storage()
        if key not in self._slices:
            self._slices[key] = storage.nbytes()
            weakref.finalize(storage, self._slices.pop, key, 0)

    def _remember(self, tensor: Tensor, nbytes: int, columns: int) -> None:
        if nbytes > self.nbytes:
            self.nbytes, self.shape = nbytes, (*tensor.shape[:-1], columns)
            self.dtype = str(tensor.dtype).removeprefix("torch.")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
