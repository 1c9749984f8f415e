"""The chunk plan: every logit once, and never more bytes than the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compact_logits import chunks
from compact_logits.engine.slices import Scratch, plan_blocks, plan_chunks, work_dtype
from compact_logits.config import DEFAULT_CHUNK_BYTES
from compact_logits.held_logits import HeldLogits

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def covered(parts: list[slice]) -> list[int]:
    return [place for part in parts for place in range(part.start, part.stop)]


@given(
    rows=st.integers(0, 400),
    vocab=st.integers(0, 3000),
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from([CPU, CUDA]),
    budget=st.integers(1, 3_000_000),
    row_sum=st.sampled_from([0, 4, 3000]),
)
def test_rows_and_columns_are_covered_once_within_the_budget(
    rows: int, vocab: int, dtype: torch.dtype, device: torch.device, budget: int, row_sum: int
) -> None:
    plan = plan_chunks(rows, vocab, dtype, device, budget, row_sum=row_sum)
    groups, slices = plan.groups(), plan.slices()
    assert covered(groups) == list(range(rows)) and covered(slices) == list(range(vocab))
    assert slices, "one slice also where there are no columns"
    for group in groups:
        assert covered(list(plan.blocks(group.stop - group.start))) == list(range(group.stop - group.start))
    heights, widths = ([part.stop - part.start for part in parts] for parts in (groups, slices))
    assert max(heights, default=1) <= plan.height and plan.height - min(heights, default=plan.height) < max(
        len(groups), 1
    )
    assert max(widths) <= plan.width and plan.held >= 1
    blocks = 2 * plan.block * plan.width * work_dtype(dtype).itemsize
    most = min(plan.held, len(slices)) * plan.height * plan.width * dtype.itemsize + blocks
    if plan.width < vocab and row_sum:
        most += plan.height * row_sum
    least_row = max(vocab, 1) * (dtype.itemsize + 2 * work_dtype(dtype).itemsize) + row_sum
    assert most <= max(budget, least_row)


def test_rows_are_cut_only_where_slices_would_be_narrow() -> None:
    for rows in (1, 100, 10_000, 50_000):
        plan = plan_chunks(rows, 151_936, torch.bfloat16, CUDA, None)
        assert len(plan.groups()) == 1 and plan.width >= 2048 and plan.width % 64 == 0
    plan = plan_chunks(500_000, 151_936, torch.bfloat16, CUDA, None)
    assert len(plan.groups()) > 1 and plan.width == 2048


def test_slices_of_very_many_rows_are_no_narrower_than_is_fair() -> None:
    """Else each of them adds to so many rows that a row costs half as much again as one of a few thousand."""
    for rows in (4096, 16_384, 65_536, 1_000_000):
        plan = plan_chunks(rows, 8192, torch.float32, CPU, 2**24)
        assert plan.width >= 256 and plan.height >= 4096, plan
    assert plan_chunks(65_536, 8192, torch.float32, CPU, 2**20).height == 4096  # but no fewer rows for it
    # In 16 bits a sum of the weight's gradient in fp32 would cost more than that.
    assert plan_chunks(65_536, 248_320, torch.bfloat16, CPU, 2**24).width < 256


def test_what_fits_is_held_altogether() -> None:
    plan = plan_chunks(1000, 50_000, torch.bfloat16, CUDA, None)
    assert (plan.height, plan.width, plan.held) == (1000, 50_000, 1)
    plan = plan_chunks(1000, 50_000, torch.float32, CPU, None)  # in chunks that stay in the cache
    assert plan.height == 1000 and 1 < len(plan.slices()) <= plan.held and plan.height * plan.width * 4 <= 2**22
    plan = plan_chunks(4000, 50_000, torch.bfloat16, CUDA, None)
    assert 1 < plan.held < len(plan.slices())


def test_a_larger_budget_takes_larger_chunks() -> None:
    plans = [plan_chunks(10_000, 1000, torch.bfloat16, CPU, 10**n) for n in range(4, 9)]
    sizes = [plan.held * plan.height * plan.width for plan in plans]
    assert sizes == sorted(sizes) and sizes[0] <= 5000 and sizes[-1] >= 10_000 * 1000


def test_the_default_budget() -> None:
    by_default = plan_chunks(10_000, 248_320, torch.bfloat16, CPU, None)
    assert by_default == plan_chunks(10_000, 248_320, torch.bfloat16, CPU, DEFAULT_CHUNK_BYTES)
    held = by_default.held * by_default.height * by_default.width * 2
    assert DEFAULT_CHUNK_BYTES / 2 < held < DEFAULT_CHUNK_BYTES


def test_given_logits_are_one_chunk_with_small_blocks() -> None:
    plan = plan_blocks(300, 5000, torch.bfloat16, CPU, 2**20)
    assert (plan.height, plan.width, plan.held, plan.block) == (300, 5000, 1, 2**16 // (5000 * 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_12_4_one_buffer_of_each_kind_for_all_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", {"cpu": 2000})
    plan = plan_chunks(50, 64, dtype, CPU, 12_000)
    held = HeldLogits.make(plan, torch.empty(50, 3, dtype=dtype), torch.empty(64, 3), dtype, keep=True, lends=False)
    scratch = Scratch(plan, torch.empty(0, dtype=dtype))
    staying = [index for index in range(len(plan.slices())) if held.stays(index)]
    assert staying
    of_chunk: list[Any] = [lambda *size, index=index: held.chunk(index, *size) for index in staying]
    kinds = [(kind, plan.height, dtype) for kind in of_chunk]
    kinds += [(kind, plan.block, work_dtype(dtype)) for kind in (scratch.block, scratch.spare)]
    first = []
    for kind, most, of in kinds:
        large, small = kind(most, plan.width), kind(1, 3)
        assert large.shape == (most, plan.width) and small.shape == (1, 3) and large.dtype == small.dtype == of
        assert large.is_contiguous() and large.data_ptr() == small.data_ptr()
        first.append((large.data_ptr(), large.data_ptr() + large.nbytes))
    assert all(stop <= start for (_, stop), (start, _) in zip(sorted(first), sorted(first)[1:], strict=False))
    assert {held.chunk(index, 1, 1).data_ptr() for index in range(len(plan.slices()))} <= {start for start, _ in first}
