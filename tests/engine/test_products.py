"""The products of a step: none is formed twice where the budget holds the logits, none for what is frozen."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from compact_logits import linear_log_probs
from tests.support.allocation import AllocationTracker
from tests.support.linear_head import Head

ROWS, HIDDEN, VOCAB = 20, 24, 321
BUDGET = 2**20

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def leaves(dtype: torch.dtype, frozen: str = "") -> tuple[Head, Tensor, Tensor]:
    head = Head.random(ROWS, HIDDEN, VOCAB, dtype)
    return head, head.hidden.requires_grad_(frozen != "hidden"), head.weight.requires_grad_(frozen != "weight")


@each_dtype
@pytest.mark.parametrize(
    ("frozen", "budget", "products"),
    [("", BUDGET, 3), ("weight", BUDGET, 2), ("hidden", BUDGET, 2), ("weight", 1, 6 * 3), ("hidden", 1, 6 * 3)],
)
def test_products_of_a_step(dtype: torch.dtype, frozen: str, budget: int, products: int) -> None:
    head, hidden, weight = leaves(dtype, frozen)
    with AllocationTracker() as tracker:
        linear_log_probs(hidden, weight, head.targets, chunk_bytes=budget).log_probs.sum().backward()
    found = [each.op for each in tracker.records if each.op.startswith(("aten.mm", "aten.addmm"))]
    assert len(found) == products
    shapes = {each.shape for each in tracker.records}
    assert ((VOCAB, HIDDEN) in shapes) is (frozen != "weight")
    assert ((ROWS, HIDDEN) in shapes) is (frozen != "hidden")


@each_dtype
@pytest.mark.parametrize("budget", [BUDGET, 1])
def test_a_backward_that_fails_leaves_nothing_and_the_next_is_right(dtype: torch.dtype, budget: int) -> None:
    head, hidden, weight = leaves(dtype)

    def loss() -> Tensor:
        return linear_log_probs(hidden, weight, head.targets, chunk_bytes=budget).log_probs.sum()

    expected = torch.autograd.grad(loss(), [hidden, weight])
    right = torch.mm

    def fails(left: Tensor, *given: Any, **options: Any) -> Tensor:
        if left.shape[0] != ROWS:  # the weight's gradient, when logits are overwritten already
            raise ArithmeticError
        return right(left, *given, **options)

    with AllocationTracker() as tracker:
        again = loss()
        before = tracker.live_bytes
        with mock.patch.object(torch, "mm", fails), pytest.raises(ArithmeticError):
            again.backward()
        gc.collect()
        assert tracker.live_bytes <= before
        found = torch.autograd.grad(again, [hidden, weight])
    assert all(map(torch.equal, found, expected))
