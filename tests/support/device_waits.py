"""Find where code would wait for a device, on a machine that has none: some tensors are taken for a device's."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["find_waits"]

# Operators whose result the host must have: a number, or a shape that depends on values.
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal"}
_COPIES = {"cpu", "numpy", "tolist"}


@contextmanager
def find_waits(*on_device: Tensor) -> Iterator[list[str]]:
    """Within the context, list each wait for a tensor that is computed from those `on_device`, with the line of ours
    that makes it."""
    found: list[str] = []
    devices = _Devices(on_device)
    with _Operators(devices, found), _Methods(devices, found):
        yield found


class _Devices:
    """The tensors that would be on the device. By identity: a view of one is a result of an operator too."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._ids: set[int] = set()
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        self._ids.add(id(tensor))
        weakref.finalize(tensor, self._ids.discard, id(tensor))

    def any(self, values: Any) -> bool:
        return any(isinstance(each, Tensor) and id(each) in self._ids for each in tree_leaves(values))


class _Operators(TorchDispatchMode):
    def __init__(self, devices: _Devices, found: list[str]) -> None:
        super().__init__()
        self._devices, self._found = devices, found

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        on_device = self._devices.any(given)
        name = str(func).split(".")[1]
        masks = name in ("index", "index_put", "index_put_") and any(
            isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in tree_leaves(args[1])
        )
        if on_device and (name in _WAITS or masks):
            self._found.append(f"{name} at {_place()}")
        result = func(*args, **(kwargs or {}))
        if on_device:
            for each in tree_leaves(result):
                if isinstance(each, Tensor):
                    self._devices.add(each)
        return result


class _Methods(TorchFunctionMode):
    """Copies to the host, which on a CPU are no operator."""

    def __init__(self, devices: _Devices, found: list[str]) -> None:
        super().__init__()
        self._devices, self._found = devices, found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        copies = name in _COPIES or (name == "to" and "cpu" in map(str, (*args[1:], *(kwargs or {}).values())))
        if copies and self._devices.any(args[:1]):
            self._found.append(f"{name} at {_place()}")
        return func(*args, **(kwargs or {}))


def _place() -> str:
    ours = [frame for frame in traceback.extract_stack() if "/compact_logits/" in frame.filename]
    return f"{ours[-1].filename.rsplit('/compact_logits/')[-1]}:{ours[-1].lineno}" if ours else "no line of ours"
