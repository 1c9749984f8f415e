"""Padded columns of the vocabulary: counted, unless `vocab_size` says where they begin; then as if not there."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits import VocabShard, linear_log_probs, log_probs, reference
from compact_logits.errors import InputError
from compact_logits.engine.logits import score_logits
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.scorers.top_p import TopPMask, TopPScorer
from tests.support.linear_head import Head, assert_as_good_as_plain
from tests.support.parity import assert_close_to_truth
from tests.support.ranks import RankPool
from tests.support.sharded_head import of_rank, shard_of, whole


def real(head: Head, vocab: int) -> Head:
    return replace(head, weight=head.weight[:vocab], bias=None if head.bias is None else head.bias[:vocab])


def without_padding(results: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Gradients of the real ids, once those of the padding are known to be exactly zero."""
    for name in ("d_weight", "d_bias"):
        if results.get(name) is not None:
            assert bool((results[name][vocab:] == 0).all()), name
            results = results | {name: results[name][:vocab]}
    return results


@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
@pytest.mark.parametrize("chunk_bytes", [1, 3000, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_if_the_padding_were_not_there(entropy: str, chunk_bytes: int | None, dtype: torch.dtype) -> None:
    head = Head.random(14, 9, 40, dtype, bias=True, temperature="rows")
    head.targets.remainder_(33)
    head.bias[33:] += 4  # would take most of the mass
    expected, truth = real(head, 33).plain(entropy), real(head, 33).truth(entropy)
    for found in (
        head.compact(entropy, vocab_size=33, chunk_bytes=chunk_bytes),
        head.with_logits(entropy, vocab_size=33, chunk_bytes=chunk_bytes),
    ):
        assert_as_good_as_plain(without_padding(found, 33), expected, truth)
    with pytest.raises(AssertionError, match="log_probs: largest error"):
        assert_as_good_as_plain(without_padding(head.compact(entropy), 40), expected, truth)


def test_no_padding_changes_no_bit() -> None:
    head = Head.random(14, 9, 40, bias=True)
    plain, bounded = head.compact(), head.compact(vocab_size=40)
    assert all(torch.equal(plain[name], bounded[name]) for name in plain)


@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_case_6_2_counted_or_not(chunk_bytes: int | None) -> None:
    logits, target = torch.tensor([[1.0, 2, 3, 5]]), torch.tensor([2])
    for vocab_size, expected in ((3, (-0.4076060, 0.8323956)), (None, (-2.1851825, 0.5950867))):
        asked: dict[str, Any] = {"entropy": "loss", "sum_p2": True, "vocab_size": vocab_size}
        weight = torch.eye(4, requires_grad=True)
        for found in (
            log_probs(logits, target, **asked),
            linear_log_probs(logits, weight, target, chunk_bytes=chunk_bytes, **asked),
        ):
            assert (found.log_probs.item(), found.entropy.item()) == pytest.approx(expected, abs=1e-6)
            of_real = reference.sum_p2(logits[:, :vocab_size].double()).item()
            assert found.sum_p2.item() == pytest.approx(of_real, abs=1e-6)
        (found.log_probs + found.entropy).sum().backward()
        assert bool((weight.grad[3] == 0).all()) == (vocab_size == 3)


def compact(rank: int, world: int, head: Head, cuts: list[int], vocab: int | None) -> dict[str, Any]:
    mine = of_rank(head, rank, cuts)
    shard = shard_of(rank, cuts) if world > 1 else None
    found = mine.compact("loss", shard=shard, vocab_size=vocab, chunk_bytes=700)
    stats = linear_log_probs(
        mine.hidden, mine.weight, mine.targets, bias=mine.bias, shard=shard, sum_p2=True, vocab_size=vocab
    )
    assert stats.sum_p2 is not None
    logits = (mine.hidden @ mine.weight.T + mine.bias).requires_grad_()
    given = log_probs(logits, mine.targets, entropy="loss", shard=shard, vocab_size=vocab)
    (given.log_probs @ mine.d_log_probs + given.entropy @ mine.d_entropy).backward()
    first = cuts[rank]
    assert vocab is None or bool((logits.grad[:, max(vocab - first, 0) :] == 0).all())
    return found | {"sum_p2": stats.sum_p2, "given": given.log_probs.detach()}


# The border to the padding lies inside a slice, on a cut, and before whole slices.
@pytest.mark.parametrize("vocab", [21, 20, 11, 9])
@pytest.mark.parametrize("cuts", [[0, 24], [0, 10, 24], [0, 20, 24], [0, 10, 20, 22, 24]], ids=str)
def test_case_6_2_wherever_the_padding_begins(rank_pool: RankPool, cuts: list[int], vocab: int) -> None:
    head = Head.random(14, 9, 24, bias=True)
    head.targets.remainder_(vocab)
    head.bias[vocab:] += 5
    ours = whole(rank_pool.run(len(cuts) - 1, compact, head, cuts, vocab))
    truth, plain = real(head, vocab).truth(), real(head, vocab).plain()
    sum_p2, given = ours.pop("sum_p2"), ours.pop("given")
    assert_as_good_as_plain(without_padding(ours, vocab), plain, truth)
    assert_close_to_truth(given, plain["log_probs"], truth["log_probs"])
    logits = (head.hidden.double() @ head.weight.double().T + head.bias.double())[:, :vocab]
    assert_close_to_truth(sum_p2, reference.sum_p2(logits.float()), reference.sum_p2(logits))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_case_6_1_a_vocabulary_that_no_size_divides(rank_pool: RankPool, world: int) -> None:
    vocab, padded = 50257, 50260
    head = Head.random(24, 16, padded, bias=True)
    head.targets.remainder_(vocab)[0] = vocab - 1
    cuts = [padded // world * rank for rank in range(world + 1)]
    ours = whole(rank_pool.run(world, compact, head, cuts, vocab))
    del ours["sum_p2"], ours["given"]
    assert_as_good_as_plain(without_padding(ours, vocab), real(head, vocab).plain(), real(head, vocab).truth())


def test_beside_a_nucleus() -> None:
    """Recorded ids that are padding are not in the vocabulary, so not in the nucleus."""
    logits = torch.tensor([[2.0, 1, 0, -1, 9], [2.0, 1, 0, -1, 9]], requires_grad=True)
    base = LogProbScorer(torch.tensor([1, 1]), VocabShard(0, 5), 1.0, "loss", vocab_size=4)
    recorded = torch.tensor([True, False])
    nucleus = TopPMask.build(torch.tensor([0, 1, 4]), torch.tensor([0, 0]), torch.tensor([3, 0]), recorded)
    log_prob, entropy = score_logits(logits, TopPScorer(base, nucleus))
    assert log_prob.tolist() == pytest.approx([-1.3132617, -1.4401897], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.9475370] * 2, abs=1e-6)
    (log_prob + entropy).sum().backward()
    assert bool((logits.grad[:, 4] == 0).all()) and bool((logits.grad[:, :2] != 0).all())


@pytest.mark.parametrize(
    ("vocab_size", "targets", "text"),
    [
        (0, [0], "vocab_size must be a positive whole number of ids or None, got 0"),
        (True, [0], "vocab_size must be a positive whole number of ids or None, got True"),
        (3.0, [0], "vocab_size must be a positive whole number of ids or None, got 3.0"),
        (6, [0], "vocab_size is 6, but there are only 5 columns"),
        (3, [3], "targets must be below vocab_size, 3, got 3: that id is padding"),
    ],
)
def test_what_is_no_vocabulary_size(vocab_size: Any, targets: list[int], text: str) -> None:
    for call in (
        lambda ids: log_probs(torch.zeros(1, 5), ids, vocab_size=vocab_size),
        lambda ids: linear_log_probs(torch.zeros(1, 2), torch.zeros(5, 2), ids, vocab_size=vocab_size),
    ):
        with pytest.raises(InputError, match=re.escape(text)):
            call(torch.tensor(targets))


def test_a_target_in_the_padding_that_no_host_sees_is_nan() -> None:
    logits: Tensor = torch.zeros(1, 5, requires_grad=True)
    scorer = LogProbScorer(torch.tensor([4]), VocabShard(0, 5), 1.0, "none", vocab_size=4)
    (log_prob,) = score_logits(logits, scorer)
    log_prob.sum().backward()
    assert bool(log_prob.isnan().all()) and bool(logits.grad[:, :4].isnan().all())
