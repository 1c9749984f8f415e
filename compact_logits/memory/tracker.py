"""Bytes of the storages that come into being, and go again, while code runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["StorageBytes"]


class StorageBytes(TorchDispatchMode):
    """While active, counts the bytes of every storage that an operator makes, until nothing refers to it.

    `live` is what stands now, `peak` the most that has stood at once; `restart_peak` forgets the peak. What stood
    before is not counted. Works on real and on meta tensors alike; with a `device` named, on those of that device.
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self._device = device
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def restart_peak(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or self._device not in (None, leaf.device.type):
                continue
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key in self._known or key in given:
                continue
            nbytes = storage.nbytes()
            self._known.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, nbytes)
        return result

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes
