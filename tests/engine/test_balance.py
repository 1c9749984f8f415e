"""Kept rows spread evenly over context-parallel ranks: same numbers and gradients, fewer rows on the busiest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compact_logits import VocabShard
from compact_logits.engine.balance import Balanced, Transfers, pays, return_rows
from compact_logits.engine.row_gather import Local, Replicated, RowGather, SequenceSharded
from compact_logits.errors import InputError
from tests.support.collectives import count_collectives
from tests.support.linear_head import Head, assert_as_good_as_plain
from tests.support.ranks import RankPool
from tests.support.sharded_head import of_rank

CUTS = {1: [0, 137], 2: [0, 69, 137]}
# Kept rows, [context-parallel rank][sequence-parallel shard].
COUNTS = [
    ((9,), (0,)),
    ((0,), (1,)),
    ((0,), (0,)),
    ((8,), (1,), (2,)),
    ((5, 4), (0, 1)),
    ((0, 0), (7, 0)),
    ((0, 0), (0, 0)),
    ((3, 3), (3, 3)),
]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_even_counts_without_needless_moves(counts: list[int]) -> None:
    transfers = Transfers.even(counts)
    assert [sum(transfers.sent(rank)) for rank in range(len(counts))] == counts
    even = [sum(transfers.received(rank)) for rank in range(len(counts))]
    assert max(even) - min(even) <= 1 and sum(even) == sum(counts)
    moved = sum(size for i, row in enumerate(transfers.rows) for j, size in enumerate(row) if i != j)
    assert moved == sum(max(count - share, 0) for count, share in zip(counts, even, strict=True))


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((0, 0), False),
        ((1, 1), False),
        ((10, 8), True),
        ((20, 17), False),
        ((1, 0), False),
        ((2, 0), True),
        ((9,), False),
    ],
)
def test_it_pays_from_a_tenth_of_the_busiest_rank(counts: tuple[int, ...], expected: bool) -> None:
    assert pays(counts) is expected


def groups_of(rank: int, tp: int, cp: int) -> tuple[Any, Any]:
    """This rank's tensor-parallel and its context-parallel group; ranks count tensor-parallel first."""
    of_tp = [dist.new_group(range(each * tp, each * tp + tp)) for each in range(cp)]
    of_cp = [dist.new_group(range(each, tp * cp, tp)) for each in range(tp)]
    return of_tp[rank // tp], of_cp[rank % tp]


def score(
    rank: int, world: int, head: Head, counts: tuple[tuple[int, ...], ...], sharded: bool, balanced: bool
) -> dict[str, Any]:
    cp = len(counts)
    tp, place = world // cp, rank // (world // cp)
    of_tp, of_cp = groups_of(rank, tp, cp)
    mine = of_rank(head, rank % tp, CUTS[tp])
    shard = VocabShard(*CUTS[tp][rank % tp :][:2], of_tp)
    totals = [sum(each) for each in counts]
    by_rank = [
        part.split(list(each)) for part, each in zip(torch.arange(sum(totals)).split(totals), counts, strict=True)
    ]
    shards = [Transfers.even(column) for column in zip(*counts, strict=True)]
    rows = by_rank[place][rank % tp] if sharded else torch.cat(by_rank[place])
    even, projected = counts[place], torch.cat(by_rank[place])
    if balanced:
        even = tuple(sum(each.received(place)) for each in shards)
        parts = [each.parts(place, [by_rank[c][s] for c in range(cp)]) for s, each in enumerate(shards)]
        projected = torch.cat([each for of_shard in parts for each in of_shard])
    gather: RowGather = Replicated(of_tp) if tp > 1 else Local()
    if sharded:
        gather = SequenceSharded(of_tp, even)
    if balanced:
        gather = Balanced(gather, of_cp, shards[rank % tp if sharded else 0])
    hidden, weight = (each.clone().requires_grad_() for each in (mine.hidden[rows], mine.weight))
    with count_collectives() as counts_of:
        scored = mine.of_rows(projected).scored("loss", hidden, weight, None, shard=shard, gather=gather, chunk_bytes=1)
        values = torch.stack([scored["log_probs"], scored["entropy"]], dim=1)
        if balanced:
            values = return_rows(values, of_cp, shards)
        forward = dict(counts_of)
        upstream = torch.stack([head.d_log_probs, head.d_entropy], dim=1)
        values.backward(upstream.split(totals)[place])
        every = dict(counts_of)
    dist.all_reduce(weight.grad, group=of_cp)
    return {
        "values": values.detach(),
        "d_hidden": hidden.grad,
        "d_weight": weight.grad,
        "projected": len(projected),
        "forward": forward,
        "all": every,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("counts", "sharded"),
    [(counts, False) for counts in COUNTS] + [(counts, True) for counts in COUNTS if len(counts[0]) > 1],
    ids=lambda value: (
        {False: "replicated", True: "sequence parallel"}[value] if isinstance(value, bool) else str(value)
    ),
)
def test_the_same_numbers_and_gradients(
    rank_pool: RankPool, counts: tuple[tuple[int, ...], ...], dtype: torch.dtype, sharded: bool
) -> None:
    cp, tp = len(counts), len(counts[0])
    if not sharded:
        counts = tuple((sum(each),) for each in counts)
    total = sum(map(sum, counts))
    head = Head.random(total, 24, 137, dtype)
    results = rank_pool.run(tp * cp, score, head, counts, sharded, True)
    of_first_tp = results[::tp]
    values = torch.cat([result["values"] for result in of_first_tp])
    d_hidden = torch.cat([result["d_hidden"] for result in (results if sharded else of_first_tp)])
    ours: dict[str, Tensor | None] = {
        "log_probs": values[:, 0],
        "entropy": values[:, 1],
        "d_hidden": d_hidden,
        "d_weight": torch.cat([result["d_weight"] for result in results[:tp]]),
    }
    plain = head.plain("loss", CUTS[tp][1:-1])
    # Each rank rounds its part of the weight's gradient, which the plain path of one rank rounds once.
    assert_as_good_as_plain(ours, plain, head.truth(), factor=1.1 if dtype == torch.float32 else 1.5)
    even = [result["projected"] for result in of_first_tp]
    assert max(even) - min(even) <= tp and sum(even) == total
    for result in results:
        assert result["forward"].get("all_to_all_single") == 2 and result["all"].get("all_to_all_single") == 4


def test_the_busiest_rank_projects_fewer_rows(rank_pool: RankPool) -> None:
    counts = ((30,), (2,))
    head = Head.random(32, 24, 137)
    before, after = (rank_pool.run(2, score, head, counts, False, balanced) for balanced in (False, True))
    assert [result["projected"] for result in before] == [30, 2]
    assert [result["projected"] for result in after] == [16, 16]
    assert all("all_to_all_single" not in result["all"] for result in before)


def test_a_row_count_that_is_not_the_transfers(rank_pool: RankPool) -> None:
    rank_pool.run(2, wrong_count)


def wrong_count(rank: int, world: int) -> None:
    gather = Balanced(Local(), dist.group.WORLD, Transfers.even((4, 0)))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"this rank's row count is [40], but it has 7 rows"):
        gather.gather(torch.zeros(7, 3))
