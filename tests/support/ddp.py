"""Megatron's DistributedDataParallel and its distributed optimizer over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["head_bucket", "late_gathers", "optimizer_of", "wrapped"]


class _Pending:
    """Gathers that have begun: none has arrived before it is waited for."""

    def __init__(self) -> None:
        self.gathers: list[Callable[[], Any]] = []

    def wait(self) -> None:
        while self.gathers:
            self.gathers.pop(0)()


@contextmanager
def late_gathers() -> Iterator[None]:
    """Where DDP overlaps all-gathers of weights, let them arrive as late as they may: in `wait`.

    A GPU may be that late at any time, gloo never. Reductions of gradients take what the buffer holds at the call.
    """
    from megatron.core.distributed import param_and_grad_buffer as buffers

    open_groups: list[_Pending] = []

    @contextmanager
    def together(group: Any, *_: Any, async_ops: bool = False, **__: Any) -> Iterator[_Pending]:
        pending = _Pending()
        open_groups.append(pending)
        try:
            with patch.object(dist, "all_reduce", reduce_now):
                yield pending
        finally:
            open_groups.pop()
        if not async_ops:
            pending.wait()

    def gather(received: Tensor, sent: Tensor, group: Any, async_op: bool = False) -> None:
        # `sent` is a slice of `received`.
        open_groups[-1].gathers.append(lambda: dist.all_gather_into_tensor(received, sent.clone(), group=group))

    def scatter_now(received: Tensor, sent: Tensor, op: Any, group: Any, async_op: bool = False) -> None:
        dist.reduce_scatter_tensor(received, sent.clone(), op=op, group=group)

    all_reduce = dist.all_reduce

    def reduce_now(tensor: Tensor, op: Any, group: Any, async_op: bool = False) -> None:
        all_reduce(tensor, op=op, group=group)

    with ExitStack() as stack:
        doubles = {
            "_coalescing_manager": together,
            "dist_all_gather_func": gather,
            "dist_reduce_scatter_func": scatter_now,
        }
        for name, double in doubles.items():
            stack.enter_context(patch.object(buffers, name, double))
        yield


def wrapped(model: Any, **ddp: Any) -> Any:
    """`model` in Megatron's DDP, each parameter in a bucket of its own, so that nobody else waits for the head's."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(**{"bucket_size": 1, **ddp})
    return DistributedDataParallel(model.config, config, model)


def optimizer_of(ddp: Any) -> Any:
    """Megatron's optimizer, sharded over data parallelism where DDP is.

    The sharded one takes Adam alone. An epsilon of one makes that descend along the gradient, more or less: with a
    small one, a rounding of a gradient near zero would decide the direction of a whole step.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=0.1,
        weight_decay=0.0,
        adam_eps=1.0,
        clip_grad=0.0,
        use_distributed_optimizer=ddp.ddp_config.use_distributed_optimizer,
        overlap_param_gather=ddp.ddp_config.overlap_param_gather,
    )
    with patch.object(torch.Tensor, "type", _type_on_a_gpu):
        return get_megatron_optimizer(config, [ddp])


def _type_on_a_gpu(tensor: Tensor, *asked: Any, **more: Any) -> Any:
    """The sharded optimizer knows parameters by the name of their type, and takes those of a GPU alone."""
    given = torch._C.TensorBase.type(tensor, *asked, **more)
    return f"torch.cuda.{given.rpartition('.')[2]}" if isinstance(given, str) else given


def head_bucket(ddp: Any, weight: torch.nn.Parameter) -> Any:
    """The group of buckets that a weight is in."""
    return ddp.param_to_bucket_group[weight]
