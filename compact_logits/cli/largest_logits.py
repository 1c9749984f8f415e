"""Measure the largest tensor with a vocabulary axis that comes into being, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LargestLogits"]


class LargestLogits(TorchDispatchMode):
    """While active, remembers the largest new tensor whose last axis is `vocab_local` wide.

    Views make nothing new, and a tensor counts by the bytes that it occupies. The weight's gradient
    `(vocab_local, hidden)` has another last axis, provided that the two numbers differ.
    """

    def __init__(self, vocab_local: int) -> None:
        super().__init__()
        self.nbytes = 0
        self.shape: tuple[int, ...] = ()
        self.dtype = ""
        self._vocab_local = vocab_local

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            nbytes = min(tensor.numel() * tensor.element_size(), storage.nbytes())
            wide = tensor.dim() > 0 and tensor.shape[-1] == self._vocab_local
            if wide and nbytes > self.nbytes and storage.data_ptr() not in known:
                self.nbytes, self.shape = nbytes, tuple(tensor.shape)
                self.dtype = str(tensor.dtype).removeprefix("torch.")
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
