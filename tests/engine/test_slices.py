"""How the vocabulary is cut: every column once, never more bytes than the budget or one least slice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compact_logits.engine.slices import default_budget, vocab_slices

BF16, FP32 = torch.bfloat16, torch.float32
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MIB = 2**20


@given(
    rows=st.integers(0, 400),
    columns=st.integers(0, 3000),
    hidden=st.integers(1, 2000),
    dtype=st.sampled_from([BF16, torch.float16, FP32, torch.float64]),
    device=st.sampled_from([CPU, CUDA]),
    budget=st.integers(1, 3_000_000),
)
def test_every_column_once_within_the_budget(
    rows: int, columns: int, hidden: int, dtype: torch.dtype, device: torch.device, budget: int
) -> None:
    slices = vocab_slices(rows, columns, hidden, dtype, device, budget)
    covered = [place for each in slices for place in range(each.start, each.stop)]
    assert covered == list(range(columns if rows else 0)), "without rows there is nothing to project"
    least = -(-max(hidden // 4, 1) // 64) * 64
    assert len(list(slices)) == len(slices) <= -(-columns // least)
    widths = [each.stop - each.start for each in slices]
    assert len(set(widths[:-1])) <= 1 and max(widths, default=0) == min(slices.width, slices.columns)
    for keep in (False, True):
        formed = [sum(widths[: min(index, slices.saved)]) * keep + width for index, width in enumerate(widths)]
        assert rows * max(formed, default=0) == slices.peak_logits(keep=keep)
        assert slices.peak_logits(keep=keep) * dtype.itemsize <= max(budget, rows * least * dtype.itemsize)


@pytest.mark.parametrize(
    ("rows", "dtype", "device", "budget", "count", "saved"),
    [
        (1000, BF16, CUDA, None, 1, 1),  # 96 MiB fit into 1 GiB
        (1000, BF16, CPU, None, 1, 1),
        (1000, FP32, CPU, None, 49, 49),  # of 4 MiB, which stay in cache; all are saved
        (20_000, BF16, CUDA, None, 4, 1),  # 1.9 GiB: one of half the budget is saved beside the one being formed
        (20_000, BF16, CPU, None, 49, 5),  # least slices of 1,024 columns
        (65_536, BF16, CUDA, 16 * MIB, 49, 0),
        (0, FP32, CPU, 1, 0, 0),
    ],
)
def test_a_head_of_50000_columns_and_4096_hidden(
    rows: int, dtype: torch.dtype, device: torch.device, budget: int | None, count: int, saved: int
) -> None:
    slices = vocab_slices(rows, 50_000, 4096, dtype, device, budget)
    assert (len(slices), slices.saved) == (count, saved)


def test_the_default_budget_follows_the_device() -> None:
    assert (default_budget(CPU), default_budget(CUDA)) == (256 * MIB, 1024 * MIB)
    for device in (CPU, CUDA):
        by_default = vocab_slices(30_000, 50_000, 4096, BF16, device)
        assert by_default == vocab_slices(30_000, 50_000, 4096, BF16, device, default_budget(device))


def test_a_larger_budget_holds_more() -> None:
    most = [vocab_slices(9000, 5000, 64, BF16, CUDA, 2**power).peak_logits(keep=True) for power in range(12, 28)]
    assert most == sorted(most) and most[-1] == 9000 * 5000
