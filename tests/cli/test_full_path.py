"""The full path that the demo compares with, held against the definition."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from compact_logits import reference
from compact_logits.cli.full_path import dense_log_probs
from compact_logits.cli.largest_logits import LargestLogits
from tests.support.ranks import RankPool


@pytest.mark.parametrize("world", [1, 2])
def test_equals_the_definition(rank_pool: RankPool, world: int) -> None:
    for values_error, gradient_error in rank_pool.run(world, errors_of_dense_log_probs):
        assert values_error < 1e-5
        assert gradient_error < 1e-5


def errors_of_dense_log_probs(rank: int, world: int) -> tuple[float, float]:
    whole = (torch.randn(9, 24, dtype=torch.float64) * 5).requires_grad_()
    targets, slope = torch.randint(24, (9,)), torch.randn(2, 9)
    expected = torch.stack(reference.log_probs(whole, targets, temperature=0.7))
    (expected * slope).sum().backward()
    mine = slice(rank * 24 // world, (rank + 1) * 24 // world)
    local = whole.detach()[:, mine].float().requires_grad_()
    found = torch.stack(dense_log_probs(local, targets, group=dist.group.WORLD, temperature=0.7))
    (found * slope).sum().backward()
    return (found - expected).abs().max().item(), (local.grad - whole.grad[:, mine]).abs().max().item()


def test_largest_logits_are_those_that_were_made() -> None:
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    with LargestLogits(10) as largest:
        made = hidden @ weight.t()
        made.sum().backward()
    assert (largest.shape, largest.nbytes, largest.dtype) == ((6, 10), 240, "float32")
    with LargestLogits(10) as largest:
        (hidden[:2] @ weight.t()).double()
    assert (largest.shape, largest.nbytes, largest.dtype) == ((2, 10), 160, "float64")


def test_a_slice_of_the_logits_is_known_by_the_weight() -> None:
    hidden, weight = torch.randn(6, 4), torch.randn(10, 4)
    with LargestLogits(10, weight) as largest:
        logits = torch.mm(hidden, weight[2:7].t(), out=torch.empty(6, 5))
        logits @ weight[2:7], logits.t() @ hidden
    assert (largest.shape, largest.nbytes) == ((6, 5), 120)
    with LargestLogits(10, weight) as largest:
        held = torch.empty(6 * 8)  # where another part of three columns waits
        torch.mm(hidden, weight[2:7].t(), out=held[:30].view(6, 5))
    assert (largest.shape, largest.nbytes) == ((6, 8), 192)
    with LargestLogits(10) as largest:
        torch.mm(hidden, weight[2:7].t(), out=torch.empty(6, 5))
    assert largest.nbytes == 0


def test_views_and_other_widths_are_no_logits() -> None:
    weight, row = torch.randn(10, 4), torch.randn(1, 10)
    with LargestLogits(10) as largest:
        weight.t(), torch.zeros(7, 9), row.expand(50, 10), row.mul_(2)
    assert largest.nbytes == 0
    with LargestLogits(10) as largest:
        torch.zeros(1, 10).expand(50, 10)
    assert largest.nbytes == 40


def test_backward_is_seen() -> None:
    z = torch.randn(3, 10, requires_grad=True)
    total = z.exp().sum()
    with LargestLogits(10) as largest:
        total.backward()
    assert largest.shape == (3, 10)
