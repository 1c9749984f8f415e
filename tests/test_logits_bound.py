"""No tensor of more than a chunk's rows has a vocabulary axis, whatever is kept; and the test sees it if one has."""

from __future__ import annotations

import pytest
import torch

from compact_logits import linear_log_probs
from compact_logits.chunks import plan_chunks
from tests.support.allocation import AllocationTracker

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_case_1_1_no_tensor_has_more_rows_than_a_chunk(dtype: torch.dtype) -> None:
    rows = 300
    chunk = plan_chunks(rows, VOCABULARY, dtype, torch.device("cpu"), BUDGET).chunk
    assert chunk < rows / 2
    seen = tracked(rows, dtype, BUDGET)
    assert 0 < seen.largest_rows(VOCABULARY) <= chunk
    wide = [each.dtype for each in seen.records if each.shape and each.shape[-1] == VOCABULARY]
    assert not {torch.int64, torch.bool} & set(wide)
    # With a budget for everything, as without chunks, the very same look finds them all.
    assert tracked(rows, dtype, 2**30).largest_rows(VOCABULARY) == rows


def test_case_1_6_transient_bytes_follow_the_budget_and_not_the_rows() -> None:
    def transient(rows: int) -> int:
        """The peak beyond what grows by nature: saved and returned rows, gradients, and a scalar or two a row."""
        seen = tracked(rows, torch.float32, BUDGET)
        return seen.peak_bytes - 2 * VOCABULARY * HIDDEN * 4 - 2 * rows * HIDDEN * 4

    few, many = transient(256), transient(2048)
    assert many - few <= 0.05 * BUDGET + 120 * (2048 - 256)
    assert few <= 1.05 * BUDGET
