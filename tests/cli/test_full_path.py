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


def test_slices_of_the_logits_are_known_by_the_weight_and_count_while_they_live() -> None:
    hidden, weight = torch.randn(6, 3), torch.randn(10, 3)

    def product(columns: slice) -> torch.Tensor:
        return torch.mm(hidden, weight[columns].t(), out=hidden.new_empty(6, weight[columns].shape[0]))

    with LargestLogits(10, weight) as largest:
        logits = product(slice(2, 7))
        logits @ weight[2:7], logits.t() @ hidden
    assert (largest.shape, largest.nbytes) == ((6, 5), 120)
    with LargestLogits(10, weight) as largest:
        kept = [product(slice(0, 4)), product(slice(4, 8))]
        product(slice(8, 10))
        del kept
        product(slice(0, 9))
    assert (largest.shape, largest.nbytes, largest.dtype) == ((6, 10), 240, "float32")
    with LargestLogits(10, weight) as largest:
        for _ in range(3):
            product(slice(0, 4))
    assert (largest.shape, largest.nbytes) == ((6, 4), 96)
    with LargestLogits(10, weight) as largest:
        product(slice(0, 3)) @ weight[:3]  # as wide as the hidden states
    assert (largest.shape, largest.nbytes) == ((6, 3), 72)
    with LargestLogits(10) as largest:
        product(slice(2, 7))
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
