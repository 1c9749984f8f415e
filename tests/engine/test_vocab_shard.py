"""A shard's ids, and how the statistics of shards come together."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compact_logits import VocabShard
from compact_logits.engine.kernels import combine_stats, new_stats
from compact_logits.engine.vocab_shard import gather_stats
from tests.support.ranks import RankPool
from tests.support.sharded_head import shard_of


def ids_of_shards(rank: int, world: int) -> list[tuple[list[int], list[bool], bool]]:
    found = []
    for cuts in ([0, 3, 8], [0, 8, 8]):
        local, owned = shard_of(rank, cuts).local_ids(torch.tensor([0, 2, 3, 7, 8, -100, 2**40]))
        found.append((local.tolist(), owned.tolist(), local.dtype == torch.int64))
    return found


def test_local_ids_are_legal_and_owned_once(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, ids_of_shards)
    yes, no = True, False
    assert first[0] == ([0, 2, 2, 2, 2, 0, 2], [yes, yes, no, no, no, no, no], yes)
    assert second[0] == ([0, 0, 0, 4, 4, 0, 4], [no, no, yes, yes, no, no, no], yes)
    # The empty shard owns nothing; its ids stay at 0.
    assert first[1][1] == [yes, yes, yes, yes, no, no, no]
    assert second[1] == ([0] * 7, [no] * 7, yes)


def test_case_5_10_ids_past_two_to_the_31_keep_their_value() -> None:
    ids = torch.tensor([0, 2**31 - 1, 2**31, 2**31 + 7, 2**33 - 1])
    local, owned = VocabShard(0, 2**33).local_ids(ids)
    assert local.dtype == torch.int64 and torch.equal(local, ids) and bool(owned.all())


@pytest.mark.parametrize("vocab_size", [None, 0, 3, 5, 9, 10])
def test_the_part_below_a_vocabulary_size(vocab_size: int | None) -> None:
    part = VocabShard(0, 9).below(vocab_size)
    assert (part.start, part.stop) == (0, 9 if vocab_size is None else min(vocab_size, 9))


def stats_of(row: torch.Tensor) -> torch.Tensor:  # (4,)
    top = row.max() if row.numel() else torch.tensor(-math.inf).double()
    z = (row - (top if top > -math.inf else 0.0)).clamp(min=-1e3)
    exp = (row - top).exp() if top > -math.inf else torch.zeros_like(row)
    return torch.stack([top, exp.sum(), (exp * z).sum(), exp.square().sum()])


@given(
    logits=st.lists(
        st.one_of(st.floats(-80, 80, width=32), st.just(-math.inf), st.floats(1e4, 1e5, width=32)),
        min_size=1,
        max_size=12,
    ),
    data=st.data(),
)
def test_the_statistics_of_parts_are_those_of_the_whole(logits: list[float], data: st.DataObject) -> None:
    row = torch.tensor(logits, dtype=torch.float64)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(logits)), max_size=3)))
    parts = [stats_of(row[start:stop]) for start, stop in zip([0, *cuts], [*cuts, len(logits)], strict=True)]
    none = new_stats(row[:1], moment=True, squares=True)
    found = combine_stats(torch.stack([none, *[each[None] for each in parts]]), moment=True, squares=True)[0]
    torch.testing.assert_close(found, stats_of(row), rtol=1e-9, atol=1e-12)
    assert torch.equal(combine_stats(torch.stack([each[None, :2] for each in parts]))[0], found[:2])


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
