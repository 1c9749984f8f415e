"""No tensor is larger than the budget lets a chunk be, whatever is kept; and the test sees it if one is."""

from __future__ import annotations

import pytest
import torch

from compact_logits import linear_log_probs
from tests.support.allocation import Allocation, AllocationTracker

VOCABULARY, HIDDEN = 4099, 40
BUDGET = 2**20


def tracked(rows: int, dtype: torch.dtype, chunk_bytes: int) -> AllocationTracker:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, HIDDEN, generator=random).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=random).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (rows,), generator=random)
    with AllocationTracker() as seen:
        stats = linear_log_probs(hidden, weight, targets, entropy="loss", chunk_bytes=chunk_bytes)
        assert stats.entropy is not None
        (stats.log_probs.sum() + stats.entropy.sum()).backward()
    return seen


def of_the_vocabulary(seen: AllocationTracker) -> list[Allocation]:
    """All but what has the shape of hidden states, of the weight, or of their gradients."""
    return [each for each in seen.records if HIDDEN not in each.shape]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_case_1_1_no_tensor_is_larger_than_a_chunk(dtype: torch.dtype) -> None:
    rows = 300
    whole = rows * VOCABULARY * dtype.itemsize
    assert whole > 2 * BUDGET
    seen = of_the_vocabulary(tracked(rows, dtype, BUDGET))
    assert BUDGET / 2 < max(each.nbytes for each in seen) <= BUDGET
    counts = [each.nbytes for each in seen if each.dtype in (torch.int64, torch.bool)]
    assert 0 < max(counts) <= 8 * rows
    # With a budget for everything, as without chunks, the very same look finds them all.
    assert max(each.nbytes for each in of_the_vocabulary(tracked(rows, dtype, 2**30))) >= whole


def test_case_1_6_transient_bytes_follow_the_budget_and_not_the_rows() -> None:
    def transient(rows: int) -> int:
        """The peak beyond what grows by nature: saved and returned rows, gradients, and a scalar or two a row."""
        seen = tracked(rows, torch.float32, BUDGET)
        return seen.peak_bytes - 2 * VOCABULARY * HIDDEN * 4 - 2 * rows * HIDDEN * 4

    few, many = transient(256), transient(2048)
    assert many - few <= 0.05 * BUDGET + 120 * (2048 - 256)
    assert few <= 1.05 * BUDGET
