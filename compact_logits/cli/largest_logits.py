"""Measure the largest memory in which logits stand, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LargestLogits"]


class LargestLogits(TorchDispatchMode):
    """While active, remembers the largest new tensor whose last axis is `vocab_local` wide, and the largest memory that
    products of parts of the head's weight, whose last axis then is a part of the vocabulary, are written to.

    Views make nothing new, and a tensor counts by the bytes that it occupies; but the product of a part by all the
    memory that it stands in, since other parts stand beside it. The gradients, `(vocab_local, hidden)` and
    `(rows, hidden)`, have another last axis, provided that `hidden` differs from these numbers.
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
        self._weight = None if weight is None else weight.untyped_storage().data_ptr()
        self._hidden = 0 if weight is None else weight.shape[1]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            nbytes = min(tensor.numel() * tensor.element_size(), storage.nbytes())
            wide = tensor.dim() > 0 and tensor.shape[-1] == self._vocab_local and storage.data_ptr() not in known
            projected = self._weight in known and storage.data_ptr() != self._weight
            shape = tuple(tensor.shape)
            if projected and not wide and shape[-1:] != (self._hidden,) and tensor.numel():
                nbytes = storage.nbytes()
                shape = (*shape[:-1], nbytes // (tensor.element_size() * (tensor.numel() // shape[-1])))
                wide = True
            if wide and nbytes > self.nbytes:
                self.nbytes, self.shape = nbytes, shape
                self.dtype = str(tensor.dtype).removeprefix("torch.")
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
