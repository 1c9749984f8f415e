"""Backward passes that give first derivatives only, and say so to whoever differentiates their results again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compact_logits.errors import InputError

__all__ = ["edge_of", "first_order"]

_Backward = Callable[..., tuple[Tensor | None, ...]]


def first_order(backward: _Backward) -> _Backward:
    """Decorate the `backward` of an autograd Function whose computation leaves no graph behind.

    It runs without gradients, as under `once_differentiable`. Where autograd asked for a graph (`create_graph=True`),
    its results hang on a node that raises `InputError`, which is reached from all that needs a gradient among the
    incoming gradients and what forward saved: the inputs, or for one that forward does not keep its `edge_of`.
    Otherwise there is no such node, and nothing is held.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        once_read = _ReadOnce(ctx)
        causes = [each for each in (*once_read.saved_tensors, *grads) if each is not None and each.requires_grad]
        with torch.no_grad():
            results = backward(once_read, *grads)
        tensors = [each for each in results if each is not None]
        if not causes or not tensors:
            return results
        refusing = iter(_RefuseAgain.apply(len(tensors), *tensors, *causes))
        return tuple(None if each is None else next(refusing) for each in results)

    return once


def edge_of(
    tensor: Tensor,  # (rows, ...)
) -> Tensor:  # (0, ...), own storage
    """Nothing, that needs a gradient where `tensor` does and leads to it: to be saved in the place of `tensor`."""
    return tensor.index_select(0, torch.empty(0, dtype=torch.int64, device=tensor.device))


class _ReadOnce:
    """A node's context whose saved tensors are asked for a single time: activation checkpointing allows no second one,
    and backward may write over them."""

    def __init__(self, ctx: Any) -> None:
        vars(self).update(_ctx=ctx, saved_tensors=ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_ctx"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_ctx"], name, value)


class _RefuseAgain(torch.autograd.Function):
    """The first `count` tensors, in the same memory; the others are what they depend on."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for each in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        shapes = " and of ".join(str(tuple(each.shape)) for each in grads if each is not None)
        raise InputError(
            f"a gradient of {shapes}, which compact_logits has computed under create_graph=True, was differentiated "
            f"again, and it offers no second derivatives; use the gradient's detach() where it is a mere number, or "
            f"compute these rows in plain torch, as compact_logits.reference does"
        )
