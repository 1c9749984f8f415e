"""The sum of squared probabilities, beside log-prob and entropy, over whole and sharded vocabularies."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from compact_logits import TokenStats, VocabShard, linear_log_probs, log_probs, reference
from compact_logits.engine.logits import score_logits
from compact_logits.engine.scorer import Scorer
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.scorers.top_p import TopPMask, TopPScorer
from tests.support.collectives import count_collectives
from tests.support.linear_head import Head
from tests.support.parity import assert_close_to_truth
from tests.support.ranks import RankPool
from tests.support.sharded_head import of_rank, shard_of

CUTS = [[0, 61], [0, 31, 61], [0, 3, 61], [0, 61, 61], [0, 20, 20, 47, 61]]


def test_case_1_2_of_a_known_row() -> None:
    logits, target = torch.tensor([[0.0, 1, 2, 3]]), torch.tensor([3])
    assert reference.sum_p2(logits.double()).item() == pytest.approx(0.4793610, abs=1e-7)
    for entropy in ("none", "metric", "loss"):
        held = log_probs(logits, target, entropy=entropy, sum_p2=True)
        projected = linear_log_probs(logits, torch.eye(4), target, entropy=entropy, sum_p2=True)
        for found in (held, projected):
            assert found.sum_p2 is not None and found.sum_p2.item() == pytest.approx(0.4793610, abs=1e-7)
            assert found.log_probs.item() == pytest.approx(-0.4401897, abs=1e-6)
            assert (found.entropy is None) == (entropy == "none")
    unasked = log_probs(logits, target)
    assert unasked.sum_p2 is None and len(unasked) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk_bytes", [1, 2000, None])
def test_against_the_definition(dtype: torch.dtype, chunk_bytes: int | None) -> None:
    head = Head.random(23, 19, 61, dtype, temperature="rows")
    logits = head.hidden @ head.weight.T
    truth = reference.sum_p2(logits.double(), temperature=head.temperature.double())
    plain = reference.sum_p2(logits, temperature=head.temperature)
    for entropy in ("none", "loss"):
        asked = {"temperature": head.temperature, "entropy": entropy, "sum_p2": True, "chunk_bytes": chunk_bytes}
        for found in (
            log_probs(logits, head.targets, **asked),
            linear_log_probs(head.hidden, head.weight, head.targets, **asked),
        ):
            assert_close_to_truth(found.sum_p2, plain, truth)


@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
def test_it_has_no_graph_and_changes_nothing_else(entropy: str) -> None:
    head = Head.random(9, 7, 33, bias=True)
    plain, asked = head.compact(entropy), head.compact(entropy, sum_p2=True)
    assert plain.keys() == asked.keys() and all(torch.equal(plain[name], asked[name]) for name in plain)
    hidden = head.hidden.clone().requires_grad_()
    stats = linear_log_probs(hidden, head.weight, head.targets, entropy=entropy, sum_p2=True)
    assert stats.sum_p2 is not None and not stats.sum_p2.requires_grad and stats.log_probs.requires_grad


def test_the_pair_stays_a_pair() -> None:
    stats = log_probs(torch.zeros(3, 2, 5), torch.zeros(3, 2, dtype=torch.int64), entropy="metric", sum_p2=True)
    log_prob, entropy = stats
    assert isinstance(stats, TokenStats) and stats.sum_p2 is not None
    assert log_prob.shape == entropy.shape == stats.sum_p2.shape == (3, 2)
    again = pickle.loads(pickle.dumps(stats))
    assert torch.equal(again.sum_p2, stats.sum_p2) and torch.equal(again.log_probs, log_prob)


def sharded(rank: int, world: int, head: Head, cuts: list[int], entropy: str) -> tuple[Tensor, dict[str, int]]:
    mine = of_rank(head, rank, cuts)
    shard = shard_of(rank, cuts) if world > 1 else None
    with count_collectives() as counts:
        stats = linear_log_probs(
            mine.hidden, mine.weight, mine.targets, bias=mine.bias, shard=shard, entropy=entropy, sum_p2=True
        )
    assert stats.sum_p2 is not None
    return stats.sum_p2, dict(counts)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("rows", [0, 17])
def test_over_ranks(rank_pool: RankPool, cuts: list[int], rows: int) -> None:
    head = Head.random(rows, 9, 61, bias=True)
    head.bias[:40] -= 30  # so that a slice's own maximum is far from the whole's
    logits = head.hidden @ head.weight.T + head.bias
    truth = reference.sum_p2(head.hidden.double() @ head.weight.double().T + head.bias.double())
    for entropy in ("none", "metric"):
        for found, counts in rank_pool.run(len(cuts) - 1, sharded, head, cuts, entropy):
            assert_close_to_truth(found, reference.sum_p2(logits), truth)
            assert sum(counts.values()) == 2 * (len(cuts) > 2), counts


def test_beside_a_nucleus_it_is_of_the_whole_vocabulary() -> None:
    logits = torch.tensor([[2.0, 1, 0, -1]])
    base = LogProbScorer(torch.tensor([1]), VocabShard(0, 4), 1.0, "metric", sum_p2=True)
    whole = torch.ones(1, dtype=torch.bool)
    nucleus = TopPMask.build(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([2]), whole)
    scorer: Scorer = TopPScorer(base, nucleus)
    log_prob, entropy, sum_p2 = score_logits(logits, scorer)
    assert log_prob.item() == pytest.approx(-1.3132617, abs=1e-6)
    assert entropy.item() == pytest.approx(0.9475370, abs=1e-6)
    assert sum_p2.item() == pytest.approx(0.4793610, abs=1e-6)


def test_masked_columns_have_no_share_and_a_row_of_nothing_is_nan() -> None:
    inf = float("inf")
    logits = torch.tensor([[0.0, 1, 2, 3, -inf], [-inf] * 5])
    found = log_probs(logits, torch.tensor([3, 0]), sum_p2=True, entropy="metric").sum_p2
    assert found is not None and found[0].item() == pytest.approx(0.4793610, abs=1e-6) and bool(found[1].isnan())
