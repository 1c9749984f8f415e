"""A slice's ids, and the algebra that joins the sums of slices."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compact_logits import VocabShard
from compact_logits.engine.vocab_shard import gather_stats, merge_softmax
from tests.support.ranks import RankPool
from tests.support.sharded_head import shard_of


def test_local_ids() -> None:
    shard = VocabShard(0, 5)
    assert shard.size == 5 and not shard.sharded
    local, owned = shard.local_ids(torch.tensor([[0, 4], [5, -1]]))
    assert local.tolist() == [[0, 4], [4, 0]] and owned.tolist() == [[True, True], [False, False]]


def ids_of_slices(rank: int, world: int) -> list[tuple[list[int], list[bool], bool]]:
    found = []
    for cuts in ([0, 3, 8], [0, 8, 8]):
        local, owned = shard_of(rank, cuts).local_ids(torch.tensor([0, 2, 3, 7, 8, -100, 2**40]))
        found.append((local.tolist(), owned.tolist(), local.dtype == torch.int64))
    return found


def test_local_ids_of_slices_are_legal_and_owned_once(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, ids_of_slices)
    yes, no = True, False
    assert first[0] == ([0, 2, 2, 2, 2, 0, 2], [yes, yes, no, no, no, no, no], yes)
    assert second[0] == ([0, 0, 0, 4, 4, 0, 4], [no, no, yes, yes, no, no, no], yes)
    # The empty slice owns nothing; its ids stay at 0.
    assert first[1][1] == [yes, yes, yes, yes, no, no, no]
    assert second[1] == ([0] * 7, [no] * 7, yes)


def test_case_5_10_ids_past_two_to_the_31_keep_their_value() -> None:
    ids = torch.tensor([0, 2**31 - 1, 2**31, 2**31 + 7, 2**33 - 1])
    local, owned = VocabShard(0, 2**33).local_ids(ids)
    assert local.dtype == torch.int64 and torch.equal(local, ids) and bool(owned.all())


@given(
    logits=st.lists(
        st.one_of(st.floats(-80, 80, width=32), st.just(-math.inf), st.floats(1e4, 1e5, width=32)),
        min_size=1,
        max_size=12,
    ),
    data=st.data(),
)
def test_merged_slices_are_the_whole(logits: list[float], data: st.DataObject) -> None:
    row = torch.tensor(logits, dtype=torch.float64)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(logits)), max_size=3)))
    stats = []
    for start, stop in zip([0, *cuts], [*cuts, len(logits)], strict=True):
        part = row[start:stop]
        top = part.max() if part.numel() else torch.tensor(-math.inf).double()
        shifted = (part - (top if top > -math.inf else 0.0)).clamp(min=-1e3)
        stats.append((top, shifted.exp().sum(), (shifted.exp() * shifted).sum()))
    columns = [torch.stack(column)[:, None] for column in zip(*stats, strict=True)]
    maximum, total, moment = merge_softmax(*columns)
    assert maximum.item() == row.max().item()
    if maximum.item() == -math.inf:
        assert total.item() == 0.0
        return
    shifted = (row - row.max()).clamp(min=-1e3)
    assert total.item() == pytest.approx(shifted.exp().sum().item(), rel=1e-12)
    assert moment.item() == pytest.approx((shifted.exp() * shifted).sum().item(), rel=1e-9, abs=1e-12)
    two = merge_softmax(*columns[:2])
    assert torch.equal(two[0], maximum) and torch.equal(two[1], total) and two[2] is None


def gathered(rank: int, world: int, rows: int) -> torch.Tensor:
    stats = torch.arange(rows * 3.0).view(rows, 3) + 100 * rank
    return gather_stats(stats.t().contiguous().t(), shard_of(rank, [0, 1, 2, 3, 4][: world + 1]))


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("world", [2, 4])
def test_statistics_are_gathered_in_rank_order(rank_pool: RankPool, world: int, rows: int) -> None:
    expected = torch.stack([torch.arange(rows * 3.0).view(rows, 3) + 100 * rank for rank in range(world)])
    for ranks in rank_pool.run(world, gathered, rows):
        assert torch.equal(ranks, expected)


def test_statistics_of_one_rank_are_passed_on() -> None:
    stats = torch.randn(4, 3)
    assert torch.equal(gather_stats(stats, VocabShard(0, 9)), stats[None])
