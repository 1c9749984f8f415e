"""Let Megatron run where there is no GPU: as long as a context lasts, the CPU answers what it asks of CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["without_cuda"]

_CPU = torch.device("cpu")


@contextmanager
def without_cuda() -> Iterator[None]:
    """Give the CPU for the current CUDA device, and for every CUDA device that a torch function or `.cuda()` names.

    Holds on the calling thread and its backward passes. On leaving, the replaced names of `torch.cuda` are the
    objects that they were. Not for a process that also computes on a GPU.
    """
    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: _CPU,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: _IdleStream(),
    }
    before = {name: getattr(torch.cuda, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(torch.cuda, name, answer)
        with _OnCpu():
            yield
    finally:
        for name, original in before.items():
            setattr(torch.cuda, name, original)


class _OnCpu(TorchFunctionMode):
    """Puts on the CPU what a call names a CUDA device for. The functions themselves stay as they are."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(arg) else arg for arg in args)
        return func(*args, **kwargs)


class _IdleStream:
    """What a CPU has for a stream: everything put on it is done already."""

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"
