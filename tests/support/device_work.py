"""What a call would do on a GPU, counted on fake CUDA tensors: launches, bytes, and where the host waits.

Needs a CUDA build of torch, and no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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

# They touch of their first argument only what an index names.
_INDEXED = {"gather", "index", "index_select", "index_copy_", "index_fill_", "index_put_", "scatter_", "scatter_add_"}
_INDEXED |= {"write_at_"}
_OVERWRITES = {"copy_", "fill_", "zero_"}
_FILLS = {"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}


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
        space, _, name = func._schema.name.partition("::")
        _raise_wait(name, args, kwargs)
        result = func(*args, **kwargs)
        launched = space != "prim" and name not in _NO_LAUNCH and not func.is_view
        if launched and any(map(_on_gpu, tree_leaves((args, kwargs, result)))):
            traffic = _traffic(func._schema, name, args, kwargs, result)
            self.launches.append(Launch(self.stage, f"{space}::{name}", traffic))
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
    *outputs: Tensor,
) -> tuple[Tensor | None, ...]:  # what the function's backward returned
    """Run the backward of the autograd function behind the outputs, here: autograd's own threads need a real device."""
    sources = [_source(output) for output in outputs]
    node = sources[0][0]
    assert all(each is node for each, _ in sources)
    grads: list[Tensor | None] = [None] * (1 + max(place for _, place in sources))
    for output, (_, place) in zip(outputs, sources, strict=True):
        grads[place] = torch.ones_like(output).flatten()
    returned: tuple[Tensor | None, ...] = node._forward_cls.backward(node, *grads)
    return returned


def _source(output: Tensor) -> tuple[Any, int]:
    """The autograd function that made the output, behind any views, and which of its outputs it is."""
    node, place = output.grad_fn, output.output_nr
    while not hasattr(node, "_forward_cls"):
        assert node is not None, "no autograd function of the product's is behind the output"
        node, place = node.next_functions[0]
    return node, place


def _raise_wait(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors = _tensors((args, kwargs))
    if name in _WAITS and any(map(_on_gpu, tensors)):
        raise HostWait(name)
    if name in ("index", "index_put_") and any(_on_gpu(each) and each.dtype == torch.bool for each in args[1]):
        raise HostWait("an index of bools, whose number the host must know")
    if name == "_to_copy":
        source, target, non_blocking = args[0].device, kwargs.get("device"), kwargs.get("non_blocking")
    elif name == "copy_":
        source, target, non_blocking = args[1].device, args[0].device, args[2:] == (True,)
    else:
        return
    kinds = source.type, source.type if target is None else torch.device(target).type
    if kinds == ("cuda", "cpu") or (kinds == ("cpu", "cuda") and not non_blocking):
        raise HostWait(f"a copy from {kinds[0]} to {kinds[1]}")


def _traffic(schema: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes read and written: of what is written in place both, unless it is overwritten."""
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    mutable = {argument.name for argument in schema.arguments if argument.alias_info is not None}
    read = {key: _bytes(value) for key, value in given.items()}
    written = {key: read[key] for key in mutable & set(given)}
    made = 0 if written else _bytes(result)
    if name in _INDEXED:
        del read[names[0]]
        written.clear()
        # As much is written there as the values take, which are read; or as much is read there as comes out.
        return 2 * sum(read.values()) if name.endswith("_") else sum(read.values()) + 2 * made
    if name in _OVERWRITES:
        del read[names[0]]
    if name in _FILLS or name == "empty":
        read.clear()
    for argument in schema.arguments:
        if argument.kwarg_only and argument.name in mutable:  # out
            read.pop(argument.name, None)
    return sum(read.values()) + sum(written.values()) + made


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _bytes(values: Any) -> int:
    total = 0
    for tensor in _tensors(values):
        axes = zip(tensor.shape, tensor.stride(), strict=True)
        total += math.prod(size for size, stride in axes if stride) * tensor.element_size()  # expanded: read once
    return total
