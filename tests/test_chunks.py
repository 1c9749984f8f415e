"""The chunk plan: every row once, in order, and never more bytes than the budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compact_logits.chunks import Scratch, plan_chunks, work_dtype
from compact_logits.config import DEFAULT_CHUNK_BYTES

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@given(
    rows=st.integers(0, 400),
    vocab=st.integers(0, 3000),
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from(["cpu", "cuda"]),
    budget=st.integers(1, 3_000_000),
)
def test_rows_are_covered_once_within_the_budget(
    rows: int, vocab: int, dtype: torch.dtype, device: str, budget: int
) -> None:
    plan = plan_chunks(rows, vocab, dtype, torch.device(device), budget)
    chunks = list(plan.chunks())
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(rows))
    for chunk in chunks:
        inside = list(plan.blocks(chunk))
        assert [row for _, block in inside for row in range(block.start, block.stop)] == list(
            range(chunk.start, chunk.stop)
        )
        for local, block in inside:
            assert local.start == block.start - chunk.start and local.stop == block.stop - chunk.start
            assert block.stop - block.start <= plan.block
    lengths = [chunk.stop - chunk.start for chunk in chunks]
    assert max(lengths, default=1) <= plan.chunk and plan.chunk - min(lengths, default=plan.chunk) < max(len(chunks), 1)
    width = max(vocab, 1)
    held = plan.chunk * width * dtype.itemsize + 2 * plan.block * width * work_dtype(dtype).itemsize
    least = width * (dtype.itemsize + 2 * work_dtype(dtype).itemsize)
    assert held <= max(budget, least)


def test_a_larger_budget_takes_larger_chunks() -> None:
    sizes = [plan_chunks(10_000, 1000, torch.bfloat16, torch.device("cpu"), 10**n).chunk for n in range(3, 9)]
    assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] == 10_000


def test_the_default_budget() -> None:
    by_default = plan_chunks(10_000, 248_320, torch.bfloat16, torch.device("cpu"), None)
    assert by_default == plan_chunks(10_000, 248_320, torch.bfloat16, torch.device("cpu"), DEFAULT_CHUNK_BYTES)
    assert 400 < by_default.chunk < DEFAULT_CHUNK_BYTES // (2 * 248_320)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_12_4_one_buffer_of_each_kind_for_all_chunks(dtype: torch.dtype) -> None:
    plan = plan_chunks(50, 64, dtype, torch.device("cpu"), 20_000)
    scratch = Scratch(plan, 64, torch.empty(0, dtype=dtype))
    for kind, most, of in (
        (scratch.chunk, plan.chunk, dtype),
        (scratch.block, plan.block, work_dtype(dtype)),
        (scratch.spare, plan.block, work_dtype(dtype)),
    ):
        first, last = kind(most), kind(1)
        assert first.shape == (most, 64) and last.shape == (1, 64) and first.dtype == last.dtype == of
        assert first.data_ptr() == last.data_ptr()
    assert scratch.block(1).data_ptr() != scratch.spare(1).data_ptr()
    given = torch.empty(plan.chunk, 64, dtype=dtype)
    assert Scratch(plan, 64, given, given).chunk(1).data_ptr() == given.data_ptr()
