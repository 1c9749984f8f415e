"""Equal shares of the kept rows over context-parallel ranks: same numbers and gradients, fewer rows on the busiest."""

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
from compact_logits.errors import InputError
from compact_logits.engine.row_gather import Local, Replicated, RowExchange, SequenceSharded
from compact_logits.engine.linear import score_hidden
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from tests.support.collectives import count_collectives
from tests.support.linear_head import Head, assert_as_good_as_plain
from tests.support.ranks import RankPool
from tests.support.sharded_head import of_rank, with_partial_sums

CUTS = {1: [0, 37], 2: [0, 19, 37]}
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
def test_even_shares_without_needless_moves(counts: list[int]) -> None:
    transfers = Transfers.even(counts)
    assert [sum(transfers.sent(rank)) for rank in range(len(counts))] == counts
    shares = [sum(transfers.received(rank)) for rank in range(len(counts))]
    assert max(shares) - min(shares) <= 1 and sum(shares) == sum(counts)
    moved = sum(size for i, row in enumerate(transfers.rows) for j, size in enumerate(row) if i != j)
    assert moved == sum(max(count - share, 0) for count, share in zip(counts, shares, strict=True))


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
    tp = world // cp
    of_tp, of_cp = groups_of(rank, tp, cp)
    mine = of_rank(head, rank % tp, CUTS[tp])
    start, stop = CUTS[tp][rank % tp :][:2]
    shard = VocabShard(start, stop, of_tp)
    by_rank = [
        part.split(list(each)) for part, each in zip(head.targets.split([sum(c) for c in counts]), counts, strict=True)
    ]
    rows_of_rank = mine.hidden.split([sum(each) for each in counts])[rank // tp]
    shards = [Transfers.even(column) for column in zip(*counts, strict=True)]
    if sharded:
        hidden = rows_of_rank.split(list(counts[rank // tp]))[rank % tp]
    else:
        hidden = rows_of_rank
    hidden = hidden.clone().requires_grad_()
    weight = mine.weight.clone().requires_grad_()
    exchange: RowExchange
    if balanced:
        shares = tuple(sum(each.received(rank // tp)) for each in shards)
        targets = torch.cat(
            [
                part
                for s, each in enumerate(shards)
                for part in each.parts(rank // tp, [by_rank[c][s] for c in range(cp)])
            ]
        )
    else:
        shares, targets = counts[rank // tp], torch.cat(by_rank[rank // tp])
    if sharded:
        exchange = SequenceSharded(of_tp, shares)
    else:
        exchange = Replicated(of_tp) if tp > 1 else Local()
    if balanced:
        exchange = Balanced(exchange, of_cp, shards[rank % tp if sharded else 0])
    with count_collectives() as counts_of:
        outputs = score_hidden(
            hidden, weight, None, LogProbScorer(targets, shard, 1.0, "loss"), exchange=exchange, chunk_bytes=2000
        )
        values = torch.stack(outputs, dim=1)
        if balanced:
            values = return_rows(values, of_cp, shards)
        forward = dict(counts_of)
        upstream = torch.stack([head.d_log_probs, head.d_entropy], dim=1)
        values.backward(upstream.split([sum(each) for each in counts])[rank // tp])
        every = dict(counts_of)
    dist.all_reduce(weight.grad, group=of_cp)
    return {
        "values": values.detach(),
        "d_hidden": hidden.grad,
        "d_weight": weight.grad,
        "projected": targets.shape[0],
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
    head = Head.random(total, 24, 37, dtype)
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
    plain = with_partial_sums(head, CUTS[tp], "loss") if tp > 1 else head.plain("loss")
    # Each rank rounds its part of the weight's gradient, which the plain path of one rank rounds once.
    assert_as_good_as_plain(ours, plain, head.truth(), factor=1.1 if dtype == torch.float32 else 1.5)
    shares = [result["projected"] for result in of_first_tp]
    assert max(shares) - min(shares) <= tp and sum(shares) == total
    for result in results:
        assert result["forward"].get("all_to_all_single") == 2 and result["all"].get("all_to_all_single") == 4


def test_the_busiest_rank_projects_its_share_alone(rank_pool: RankPool) -> None:
    counts = ((30,), (2,))
    head = Head.random(32, 24, 37)
    before, after = (rank_pool.run(2, score, head, counts, False, balanced) for balanced in (False, True))
    assert [result["projected"] for result in before] == [30, 2]
    assert [result["projected"] for result in after] == [16, 16]
    assert all("all_to_all_single" not in result["all"] for result in before)


def test_a_row_count_that_is_not_the_transfers(rank_pool: RankPool) -> None:
    rank_pool.run(2, wrong_count)


def wrong_count(rank: int, world: int) -> None:
    exchange = Balanced(Local(), dist.group.WORLD, Transfers.even((4, 0)))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"this rank's row count is [40], but it has 7 rows"):
        exchange.gather(torch.zeros(7, 3))
