"""The collective counter sees calls under any name, forward and backward, and none of the neighbours'."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import all_reduce as bound_before

from tests.support.collectives import count_collectives
from tests.support.ranks import RankPool


class ReducedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def every_collective(rank: int, world: int) -> dict[str, int]:
    x, parts = torch.ones(4), [torch.ones(4) for _ in range(world)]
    both = torch.ones(4 * world)
    dist.all_reduce(torch.ones(1))
    with count_collectives() as counts:
        dist.all_reduce(x)
        bound_before(x, op=dist.ReduceOp.MAX)
        dist.all_gather(parts, x)
        dist.all_gather_into_tensor(both, x)
        dist.reduce_scatter_tensor(x, both)
        dist.all_to_all_single(both, both.clone())
        dist.broadcast(x, src=0)
        dist.barrier()
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.group.WORLD.allreduce([x]).wait()
    dist.all_reduce(x)
    return dict(counts)


def backward_collectives(rank: int, world: int) -> tuple[Counter[str], Counter[str]]:
    x = torch.ones(4, requires_grad=True)
    with count_collectives() as forward:
        out = ReducedGradient.apply(x).sum()
    with count_collectives() as backward:
        out.backward()
    assert x.grad is not None and x.grad.tolist() == [float(world)] * 4
    return forward, backward


def point_to_point(rank: int, world: int) -> dict[str, int]:
    x = torch.ones(4)
    with count_collectives() as counts:
        if rank == 0:
            dist.send(x, dst=1)
        else:
            dist.recv(x, src=0)
    return dict(counts)


def test_each_call_counts_under_its_public_name(rank_pool: RankPool) -> None:
    expected = {
        "all_reduce": 4,
        "all_gather": 1,
        "all_gather_into_tensor": 1,
        "reduce_scatter_tensor": 1,
        "all_to_all_single": 1,
        "broadcast": 1,
        "barrier": 1,
    }
    assert rank_pool.run(2, every_collective) == [expected, expected]


def test_backward_counts_apart_from_forward(rank_pool: RankPool) -> None:
    for forward, backward in rank_pool.run(2, backward_collectives):
        assert forward == {}
        assert backward == {"all_reduce": 1}


def test_send_and_receive_count_on_their_own_rank(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, point_to_point) == [{"send": 1}, {"recv": 1}]


def test_nothing_counts_as_nothing() -> None:
    with count_collectives() as counts:
        torch.ones(3).sum()
    assert counts == {}
    assert counts.total() == 0
