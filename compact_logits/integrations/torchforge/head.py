"""Enter a head through its module, so that what FSDP2 and tensor parallelism hooked onto it takes place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import parametrize

from compact_logits.errors import InputError

__all__ = ["refuse_sharded_by_fsdp", "through_head"]

T = TypeVar("T")

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


def through_head(
    head: nn.Module,
    hidden: Tensor,  # (batch, positions, hidden)
    score: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, T]],
) -> tuple[Tensor, T]:  # what score returned, the first as the hooks passed it on
    """Call `head(hidden)` with `score(hidden, weight, bias)` in the place of its `forward`.

    The hooks see an ordinary call: before it FSDP2 gathers the weight and tensor parallelism lays out `hidden`, after
    it FSDP2 prepares for backward. Raises `InputError`, before anything is called, for a head that computes more
    than a linear layer, and after it where a hook has changed the result.
    """
    _check_plain(head)
    made: list[tuple[Tensor, T]] = []
    meshes: list[DeviceMesh] = []

    def forward(entered: Tensor) -> Tensor:
        weight, bias = head.weight, head.bias
        assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
        made.append(score(entered, weight, bias))
        if not isinstance(weight, DTensor):
            return made[0][0]
        if weight.device_mesh.ndim > 1:
            raise InputError(f"inside its module the head's weight lies on {weight.device_mesh}; needed one mesh axis")
        meshes.append(weight.device_mesh)
        # The hooks of a tensor-parallel layer take a DTensor that is sharded on its last dimension. Each rank has the
        # whole result: side by side they are one.
        last = made[0][0].dim() - 1
        return DTensor.from_local(made[0][0], weight.device_mesh, [Shard(last)], run_check=False)

    with _forward_of(head, forward):
        out = head(hidden)
    result, found = made[0]
    return _own_part(out, result, *meshes), found


def refuse_sharded_by_fsdp(weight: Tensor) -> None:
    """Raise `InputError` for a parameter that FSDP2 shards: outside its module it is a slice of what it should be, and
    its rows are spread over ranks whose hidden states differ."""
    if not isinstance(weight, DTensor):
        return
    for state in list(_composable_state._module_state_mapping.values()):
        group = getattr(state(), "_fsdp_param_group", None)
        if group is not None and any(each.sharded_param is weight for each in group.fsdp_params):
            raise InputError(
                "lm_head_weight is sharded by FSDP2 and whole inside its module only; pass the module instead of its "
                "weight, so that its hooks gather it"
            )


def _check_plain(head: nn.Module) -> None:
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        raise InputError(
            f"the head is a {type(head).__name__} with a forward of its own, needed a plain nn.Linear; where it adds "
            f"to the product (an adapter, a soft-cap, a scale), use compute_logprobs on its logits"
        )
    if parametrize.is_parametrized(head):
        raise InputError("the head's weight is parametrized; use compute_logprobs on its logits")
    if head._compiled_call_impl is not None:
        raise InputError("the head is compiled by itself, and its call may not come by here; use compute_logprobs")
    for kind in _HOOKS:
        for hook in getattr(head, kind).values():
            module = str(getattr(inspect.unwrap(hook), "__module__", ""))
            if not module.startswith("torch.distributed."):
                name = getattr(hook, "__qualname__", type(hook).__name__)
                raise InputError(
                    f"the head has a hook, {name} of {module}, that may read or change its logits; remove it, or use "
                    f"compute_logprobs on the logits"
                )


@contextmanager
def _forward_of(head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def _own_part(out: Any, result: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """This rank's result out of what the hooks made of it: passed on, or gathered from all ranks side by side."""
    if isinstance(out, DTensor):
        out = out.to_local()
    width = result.shape[-1]
    if mesh is not None and isinstance(out, Tensor) and out.shape == (*result.shape[:-1], mesh.size() * width):
        out = out.narrow(-1, mesh.get_local_rank() * width, width)
    if not isinstance(out, Tensor) or out.shape != result.shape or out.dtype != result.dtype:
        found = f"{tuple(out.shape)} of {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        raise InputError(
            f"a hook of the head made {found} of its result, {tuple(result.shape)} of {result.dtype}; leave its "
            f"output sharded on the last dimension, and FSDP2's output_dtype unset"
        )
    return out
