"""A vocabulary cut over ranks gives what one rank gives: any cut, every scorer, each output and each gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits import VocabShard, log_probs
from compact_logits.errors import DisagreementError
from compact_logits.scorers.top_p import TopPMask
from tests.support.linear_head import SCORERS, Head, Results, assert_as_good_as_plain
from tests.support.ranks import RankPool
from tests.support.sharded_head import of_rank, shard_of, whole

VOCAB = 301
# Even as can be, one id alone, empty shards at either end and between.
CUTS = [
    [0, 151, VOCAB],
    [0, 1, VOCAB],
    [0, VOCAB, VOCAB],
    [0, 0, VOCAB],
    [0, 80, 160, 240, VOCAB],
    [0, 5, 5, 300, VOCAB],
    [0, 0, 0, 0, VOCAB],
]
GIVEN_LOGITS = [each for each in SCORERS if each != "top_p"]

each_cut = pytest.mark.parametrize("cuts", CUTS, ids=str)
Case = tuple[str, dict[str, Any]]  # scorer, options


def compact(rank: int, world: int, head: Head, cuts: list[int], cases: Sequence[Case]) -> list[Results]:
    mine, shard = of_rank(head, rank, cuts), shard_of(rank, cuts)
    return [mine.compact(what, shard=shard, check_ranks=False, **options) for what, options in cases]


def assert_same(
    pool: RankPool, head: Head, cuts: list[int], options: Sequence[dict[str, Any]], scorers: Sequence[str] = SCORERS
) -> None:
    cases = [(what, each) for what in scorers for each in options]
    results = pool.run(len(cuts) - 1, compact, head, cuts, cases)
    for (what, given), of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        real = given.get("vocab_size")
        ours, truth = whole(list(of_ranks)), head.truth(what, vocab_size=real)
        floor = 1e-12 if head.hidden.dtype == torch.float64 else 1e-6
        plain = head.plain(what, cuts[1:-1], vocab_size=real)
        assert_as_good_as_plain(ours, plain, truth, floor=floor, where=f"{what} {given} ")
        padding = [ours[name][real or VOCAB :] for name in ("d_weight", "d_bias")]
        assert not any(each.any() for each in padding), "exactly zero"


@each_cut
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_case_3_7_every_scorer(rank_pool: RankPool, cuts: list[int], dtype: torch.dtype) -> None:
    head = Head.random(64, 48, VOCAB, dtype, bias=True, temperature="rows")
    assert_same(rank_pool, head, cuts, [{"chunk_bytes": 1}, {}])


def test_a_gradient_that_is_summed_once_a_rank_would_be_seen(rank_pool: RankPool) -> None:
    head, cuts = Head.random(14, 9, VOCAB, bias=True), CUTS[0]
    ours = whole([each[0] for each in rank_pool.run(2, compact, head, cuts, [("loss", {})])])
    with pytest.raises(AssertionError, match="d_hidden: relative error"):
        assert_as_good_as_plain(ours | {"d_hidden": ours["d_hidden"] * 2}, head.plain(), head.truth())


@each_cut
@pytest.mark.parametrize("rows", [0, 1])
def test_no_row_and_one_row(rank_pool: RankPool, cuts: list[int], rows: int) -> None:
    assert_same(rank_pool, Head.random(rows, 9, VOCAB, bias=True), cuts, [{"chunk_bytes": 1}, {}])


def at_borders(head: Head, cuts: list[int]) -> Head:
    """Targets, sets and teachers at the first and the last id of shards and of the slices in them."""
    borders = {each for cut in cuts for each in (cut - 1, cut)}
    borders |= {cut + 64 * count + each for cut in cuts for count in range(1, 5) for each in (-1, 0)}
    ids = torch.tensor(sorted(each for each in borders if 0 <= each < VOCAB))
    rows, k = len(ids), 5
    every = (torch.arange(rows)[:, None] + torch.arange(k)) % rows
    every[::3, k - 1] = every[::3, 0]  # listed twice
    head = head.of_rows(torch.arange(rows) % len(head.targets))
    starts = torch.arange(rows) * k
    mask = TopPMask.build(ids[every].flatten(), starts, starts + k, torch.ones(rows) > 0)
    return replace(head, targets=ids, teacher_ids=ids[every], mask=mask)


@each_cut
def test_ids_at_the_borders_of_shards_and_slices(rank_pool: RankPool, cuts: list[int]) -> None:
    assert_same(rank_pool, at_borders(Head.random(14, 9, VOCAB, bias=True), cuts), cuts, [{"chunk_bytes": 1}])


# The border to the padding lies inside a shard or slice, on a cut, and before whole shards.
@pytest.mark.parametrize("real", [300, 240, 200, 192, 90])
@pytest.mark.parametrize("cuts", [[0, VOCAB], [0, 151, VOCAB], [0, 240, VOCAB], [0, 80, 240, 300, VOCAB]], ids=str)
@pytest.mark.parametrize("padding", [3.0, math.nan, math.inf])
def test_case_6_2_ids_that_are_padding(rank_pool: RankPool, cuts: list[int], real: int, padding: float) -> None:
    """As if their rows of the weight were not there, whatever stands in them."""
    head = Head.random(14, 9, VOCAB, bias=True, temperature="rows")
    head.targets.remainder_(real)[0] = real - 1
    for tensor in (head.weight, head.bias):
        assert tensor is not None
        tensor[real:] = padding
    options = [{"chunk_bytes": 1, "vocab_size": real}, {"vocab_size": real}]
    assert_same(rank_pool, head, cuts, options, ("none", "metric", "loss", "sum_p2", "top_p"))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_case_6_1_a_vocabulary_that_no_size_divides(rank_pool: RankPool, world: int) -> None:
    real, padded = 50257, 50260
    head = Head.random(6, 4, padded, bias=True)
    assert head.bias is not None
    head.targets.remainder_(real)[0] = real - 1
    cuts = [padded // world * rank for rank in range(world + 1)]
    masked = torch.where(torch.arange(padded) < real, head.bias, -math.inf)
    for each, given in ((head, {"vocab_size": real}), (replace(head, bias=masked), {})):
        ours = whole([one[0] for one in rank_pool.run(world, compact, each, cuts, [("loss", given)])])
        assert not ours["d_weight"][real:].any() and not ours["d_bias"][real:].any()
        assert_as_good_as_plain(ours, head.plain(vocab_size=real), head.truth(vocab_size=real))


def of_logits(rank: int, world: int, head: Head, cuts: list[int]) -> list[Results]:
    mine, shard = of_rank(head, rank, cuts), shard_of(rank, cuts)
    return [mine.with_logits(what, shard=shard, check_ranks=False) for what in GIVEN_LOGITS]


@each_cut
def test_sharded_logits(rank_pool: RankPool, cuts: list[int]) -> None:
    """Their gradient is the shard of the gradient: it makes that of the rank's rows of a weight."""
    head = Head.random(14, 9, VOCAB, bias=True, temperature="rows")
    found = rank_pool.run(len(cuts) - 1, of_logits, head, cuts)
    for place, what in enumerate(GIVEN_LOGITS):
        results = [{n: v for n, v in answer[place].items() if n != "d_hidden"} for answer in found]
        plain, truth = head.plain(what), head.truth(what)
        for of in (plain, truth):
            del of["d_hidden"]
        assert_as_good_as_plain(whole(results), plain, truth, where=f"{what} ")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("cuts", CUTS[:2] + CUTS[4:6], ids=str)
def test_one_ranks_bad_logit_spoils_its_row_everywhere(rank_pool: RankPool, cuts: list[int], bad: float) -> None:
    head = Head.random(3, 9, VOCAB, bias=True)
    assert head.bias is not None
    head.bias[VOCAB - 1] = bad
    for results in rank_pool.run(
        len(cuts) - 1, compact, head, cuts, [(what, {}) for what in SCORERS if what != "top_p"]
    ):
        for found in results:
            assert found["d_hidden"].isnan().all() and next(iter(found.values())).isnan().all()
            assert "entropy" not in found or found["entropy"].isnan().all()


def unknown_id(rank: int, world: int, cuts: list[int], id: int, upstream: float) -> list[tuple[Tensor, Results]]:
    """Of three rows, the second one's target, and one id of its teacher, is in no shard."""
    head = of_rank(Head.random(3, 5, 12, k=3), rank, cuts)
    assert head.teacher_ids is not None
    head.targets[1] = head.teacher_ids[1, 2] = id
    mask = TopPMask(torch.arange(3), torch.arange(3), torch.ones(3) > 0)
    head = replace(head, mask=mask, d_log_probs=torch.tensor([1.0, upstream, 1.0]), d_entropy=torch.zeros(3))
    found = [head.compact(what, shard=shard_of(rank, cuts), check_ranks=False) for what in SCORERS]
    return [(next(iter(each.values())), each) for each in found]


@pytest.mark.parametrize("id", [12, 2**31 + 5, 2**62])
@pytest.mark.parametrize("upstream", [1.0, 0.0])
def test_an_id_that_no_rank_has_is_nan_in_its_row(rank_pool: RankPool, id: int, upstream: float) -> None:
    """Where ranks are not compared. A gradient that nobody reads is zero, as for every row that does not count."""
    nan = bool(upstream)
    for rank, answer in enumerate(rank_pool.run(2, unknown_id, [0, 7, 12], id, upstream)):
        for what, (first, found) in zip(SCORERS, answer, strict=True):
            assert first.isnan().tolist() == [False, True, False], what
            assert found["d_hidden"].isnan().any(dim=1).tolist() == [False, nan, False], what
            assert bool(found["d_hidden"][1].any()) == nan, what
            of_ids = found["d_weight"].isnan().all(dim=1)
            # Top-p writes the ids of the set alone, which here are the first rank's.
            assert of_ids.any() == (nan and not (what == "top_p" and rank)) and (what == "top_p" or of_ids.all() == nan)
            assert "entropy" not in found or bool(torch.isfinite(found["entropy"]).all())


def a_teacher_not_a_number(rank: int, world: int, what: str) -> Results:
    head = of_rank(Head.random(3, 5, 12, k=3), rank, [0, 7, 12])
    assert head.teacher_log_probs is not None and head.teacher_ids is not None
    head.teacher_ids[0, 1], head.teacher_log_probs[0, 1] = 11, math.nan  # an id of the second rank's
    return head.compact(what, shard=shard_of(rank, [0, 7, 12]))


@pytest.mark.parametrize("what", ["topk", "topk clamped", "tail"])
def test_a_teacher_that_is_not_a_number_gives_none_on_any_rank(rank_pool: RankPool, what: str) -> None:
    for found in rank_pool.run(2, a_teacher_not_a_number, what):
        rows = [found["loss"].isnan().tolist(), found["d_hidden"].isnan().any(dim=1).tolist()]
        assert rows == [[True, False, False]] * 2


def gathered_twice(rank: int, world: int) -> Tensor:
    """Logits gathered already, passed as this rank's shard."""
    given = torch.zeros(2, 6), torch.tensor([0, 5])
    with pytest.raises(DisagreementError, match=r"got \[0, 6\), \[0, 6\) of ranks 0 to 1, and two ranks hold the ids"):
        log_probs(*given, shard=shard_of(0, [0, 6]), check_ranks=True)
    return log_probs(*given, shard=shard_of(0, [0, 6]), check_ranks=False).log_probs


def test_case_6_6_the_whole_vocabulary_on_each_rank_is_not_scored_as_shards(rank_pool: RankPool) -> None:
    for log_prob in rank_pool.run(2, gathered_twice):
        assert bool(log_prob.isnan().all())


def frozen_on_one_rank(rank: int, world: int, head: Head, cuts: list[int], what: str) -> Results:
    mine = of_rank(head, rank, cuts)
    hidden = mine.hidden.clone().requires_grad_()
    weight, bias = (each.clone().requires_grad_(rank == 0) for each in (mine.weight, mine.bias))
    outputs = mine.scored(what, hidden, weight, bias, shard=shard_of(rank, cuts), chunk_bytes=1)
    roots = [(each, head.d_entropy if n == "entropy" else head.d_log_probs) for n, each in outputs.items()]
    torch.autograd.backward(*zip(*[pair for pair in roots if pair[0].requires_grad], strict=True))
    return {"d_hidden": hidden.grad, "d_weight": weight.grad, "d_bias": bias.grad}


@pytest.mark.parametrize("what", SCORERS)
def test_case_3_8_a_head_frozen_on_one_rank_only_hangs_nothing(rank_pool: RankPool, what: str) -> None:
    head, cuts = Head.random(14, 9, VOCAB, bias=True), [0, 19, VOCAB]
    trained, frozen = rank_pool.run(2, frozen_on_one_rank, head, cuts, what, timeout=60)
    assert frozen["d_weight"] is None and frozen["d_bias"] is None
    assert torch.equal(trained["d_hidden"], frozen["d_hidden"])
    plain, truth = (
        {"d_hidden": of["d_hidden"], "d_weight": of["d_weight"][:19], "d_bias": of["d_bias"][:19]}
        for of in (head.plain(what), head.truth(what))
    )
    assert_as_good_as_plain(trained, plain, truth)


def in_a_group_of_two(rank: int, world: int, heads: list[Head], cuts: list[int], steps: int) -> list[Results]:
    """Ranks 0 and 2 share one head, 1 and 3 the other, and each pair has its own rows at each step."""
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    slot = group.rank()
    results = []
    for step in range(steps):
        head = of_rank(heads[(rank % 2 + step) % len(heads)], slot, cuts)
        results.append(head.compact(shard=VocabShard(cuts[slot], cuts[slot + 1], group), chunk_bytes=20_000))
    dist.destroy_process_group(group)
    return results


def test_case_4_2_groups_with_64_320_and_no_rows_do_not_wait_for_each_other(rank_pool: RankPool) -> None:
    heads, cuts, steps = [Head.random(rows, 9, VOCAB, bias=True, seed=rows) for rows in (64, 320, 0)], [0, 19, VOCAB], 3
    results = rank_pool.run(4, in_a_group_of_two, heads, cuts, steps)
    for first in (0, 1):
        for step in range(steps):
            head = heads[(first + step) % len(heads)]
            ours = whole([results[first][step], results[first + 2][step]])
            assert_as_good_as_plain(ours, head.plain(), head.truth())
