"""What a call would do on a GPU, counted on fake CUDA tensors: launches, bytes, and where the host waits.

Needs a CUDA build of torch, and no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["DeviceWork", "HostWait", "Launch", "backward", "fake_cuda"]

# They look at shapes or allocate.
_NO_LAUNCH = {
    "alias",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "is_same_size",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "record_stream",
    "set_",
}

# Their result, or its shape, depends on values, which the host reads.
_WAITS = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}

# They touch only what their index names, of one of their arguments; and they overwrite, without reading it, another.
_INDEXED = {"gather": 0, "index": 0, "index_select": 0, "index_copy_": 0, "index_fill_": 0, "index_put_": 0}
_INDEXED |= {"scatter_": 0, "scatter_add_": 0, "write_at_": 0, "index_add_": 0}
_OVERWRITTEN = {"copy_", "fill_", "zero_"}
_LIKE = {"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}


class HostWait(AssertionError):
    """The host waits for the device there."""


@dataclass(frozen=True)
class Launch:
    stage: str
    name: str
    bytes: int

    @property
    def is_product(self) -> bool:
        return self.name.startswith("aten::") and self.name.endswith(("mm", "mm_"))


class DeviceWork(TorchDispatchMode):
    """Records every launch. Raises `HostWait` where the host would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = "forward"
        self.launches: list[Launch] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        short = name.partition("::")[2]
        _raise_wait(short, args, kwargs)
        result = func(*args, **kwargs)
        if (
            not name.startswith("prim::")
            and short not in _NO_LAUNCH
            and not func.is_view
            and any(map(_on_gpu, tree_leaves((args, kwargs, result))))
        ):
            self.launches.append(Launch(self.stage, name, _traffic(func, short, args, kwargs, result)))
        return result

    def others(self, stage: str) -> list[Launch]:
        """All launches of the stage but the matrix products."""
        return [each for each in self.launches if each.stage == stage and not each.is_product]

    def bytes(self, stage: str) -> int:
        return sum(each.bytes for each in self.others(stage))


@contextmanager
def fake_cuda() -> Iterator[DeviceWork]:
    """Tensors made inside have no memory, and may be on "cuda"."""
    with FakeTensorMode(), DeviceWork() as work:
        yield work


def backward(
    outputs: Sequence[Tensor],
    grads: Callable[[Tensor], Tensor] = torch.ones_like,
) -> tuple[Tensor | None, ...]:
    """The product's own node behind the outputs, run here: autograd's threads need a real device."""
    node = _node(outputs[0].grad_fn)
    given = [None] * len(node._input_metadata) if hasattr(node, "_input_metadata") else None
    assert given is not None
    for output in outputs:
        if output.grad_fn is not None and _node(output.grad_fn) is node:
            given[output.output_nr] = grads(output)
    return node._forward_cls.backward(node, *given)


def _node(grad_fn: Any) -> Any:
    todo = [grad_fn]
    while todo:
        node = todo.pop()
        if hasattr(node, "_forward_cls"):
            return node
        todo += [] if node is None else [each for each, _ in node.next_functions]
    raise AssertionError("no autograd function of the product's is behind the output")


def _raise_wait(short: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    on_gpu = [each for each in tensors if _on_gpu(each)]
    if on_gpu and short in _WAITS:
        raise HostWait(short)
    if (
        on_gpu
        and short in ("index", "index_put_")
        and any(each is not None and each.dtype == torch.bool for each in args[1])
    ):
        raise HostWait("an index of bools, whose number the host must know")
    if short == "_to_copy":
        source, target = tensors[0].device, kwargs.get("device") or tensors[0].device
        non_blocking = kwargs.get("non_blocking")
    elif short == "copy_":
        source, target = args[1].device, args[0].device
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
    else:
        return
    kinds = source.type, torch.device(target).type
    if kinds == ("cuda", "cpu") or (kinds == ("cpu", "cuda") and not non_blocking):
        raise HostWait(f"a copy from {kinds[0]} to {kinds[1]}")


def _traffic(func: Any, short: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    named = {argument.name: argument for argument in func._schema.arguments}
    given = dict(zip(named, args, strict=False)) | kwargs
    read, written = 0, 0
    for place, (name, value) in enumerate(given.items()):
        tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
        size = sum(map(_bytes, tensors))
        alias = named[name].alias_info
        if short in _INDEXED and place == _INDEXED[short]:
            continue
        if alias is not None and alias.is_write:
            written += size
            read += 0 if short in _OVERWRITTEN or name == "out" else size
        elif short not in _LIKE:
            read += size
    fresh = [each for each in tree_leaves(result) if isinstance(each, Tensor)] if not written else []
    if short in _INDEXED:  # as much is touched as is given, or comes out
        touched = (
            fresh if not short.endswith("_") else [each for each in tree_leaves(args[1:]) if isinstance(each, Tensor)]
        )
        return read + sum(map(_bytes, touched)) * (1 if short.endswith("_") else 2)
    return read + written + sum(map(_bytes, fresh))


def _on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _bytes(tensor: Tensor) -> int:
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1  # an expanded axis is read once
    return elements * tensor.element_size()
