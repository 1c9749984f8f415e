"""Log-probs over a recorded set of ids: its gradients, its padding, ids outside, and sets cut over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compact_logits import VocabShard
from compact_logits.engine.logits import score_logits
from compact_logits.errors import InputError
from compact_logits.scorers.top_p import TopPMask, TopPScorer
from tests.support.ranks import RankPool
from tests.support.scorers import log_prob_scorer
from tests.support.sharded_head import shard_of

ROW = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def replayed(
    logits: Tensor, target: int, kept: list[int] | None, shard: VocabShard | None = None
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of one row whose recorded set is `kept`; `None` for a row of which nothing is recorded."""
    shard = shard or VocabShard(0, logits.shape[1])
    base = log_prob_scorer(torch.tensor([target]), shard, 1.0, "loss")
    ids = torch.tensor(kept or [], dtype=torch.int64)
    mask = TopPMask.build(ids, torch.tensor([0]), torch.tensor([len(ids)]), torch.tensor([kept is not None]))
    log_prob, entropy = score_logits(logits, TopPScorer(base, mask))
    return log_prob, entropy


def test_case_10_6_normalised_over_the_recorded_support() -> None:
    logits = ROW.clone().requires_grad_()
    log_prob, entropy = replayed(logits, 1, [0, 1])
    assert log_prob.item() == pytest.approx(-1.3132617, abs=1e-6)
    assert entropy.item() == pytest.approx(0.9475370, abs=1e-6), "over the whole vocabulary"
    (of_log_prob,) = torch.autograd.grad(log_prob.sum(), logits)
    assert of_log_prob[0, 2:].tolist() == [0.0, 0.0]
    assert of_log_prob[0, :2].tolist() == pytest.approx([-0.7310586, 0.7310586], abs=1e-6)


def test_case_10_6_no_record_is_no_replay_and_an_empty_one_leaves_the_target() -> None:
    assert replayed(ROW, 1, None)[0].item() == pytest.approx(-1.4401897, abs=1e-6)
    assert replayed(ROW, 1, [])[0].item() == 0.0


def test_case_5_6_a_target_that_was_not_recorded_is_part_of_its_set() -> None:
    """Sampled is kept: the log-prob is finite, of the set with the target, and never 0.0 by mistake."""
    log_prob, _ = replayed(ROW, 3, [0, 1])
    expected = torch.log_softmax(ROW[0, [0, 1, 3]], dim=0)[2].item()
    assert log_prob.item() == pytest.approx(expected, abs=1e-6) and log_prob.item() < -3


@pytest.mark.parametrize("target", [4, 7])
def test_case_5_6_a_target_that_is_no_id_at_all_is_nan(target: int) -> None:
    assert bool(replayed(ROW, target, [0, 1])[0].isnan().all())


def cut(rank: int, world: int, kept: list[int], target: int) -> tuple[float, float, list[float]]:
    cuts = [0, 1, 4] if world == 2 else [0, 1, 1, 3, 4]
    logits = ROW[:, cuts[rank] : cuts[rank + 1]].clone().requires_grad_()
    log_prob, entropy = replayed(logits, target, kept, shard_of(rank, cuts))
    (gradient,) = torch.autograd.grad(log_prob.sum(), logits)
    return log_prob.item(), entropy.item(), gradient[0].tolist()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("kept", "target"), [([0, 1], 1), ([3, 0], 0), ([2], 0), ([1, 2, 3], 2)])
def test_case_10_6_sets_cut_over_ranks(rank_pool: RankPool, world: int, kept: list[int], target: int) -> None:
    found = rank_pool.run(world, cut, kept, target)
    logits = ROW.clone().requires_grad_()
    log_prob, entropy = replayed(logits, target, kept)
    (gradient,) = torch.autograd.grad(log_prob.sum(), logits)
    for ours, theirs, _ in found:
        assert (ours, theirs) == pytest.approx((log_prob.item(), entropy.item()), abs=1e-6)
    joined = [value for _, _, values in found for value in values]
    assert joined == pytest.approx(gradient[0].tolist(), abs=1e-6)
    outside = [column for column in range(4) if column not in {*kept, target}]
    assert all(joined[column] == 0.0 for column in outside)


@pytest.mark.parametrize("asked", ["both", "log-prob", "entropy"])
@pytest.mark.parametrize("chunk_bytes", [None, 200])
def test_case_10_6_a_temperature_per_row_and_either_gradient_alone(asked: str, chunk_bytes: int | None) -> None:
    """Against the definition in fp64, row by row: one recorded set of many ids, one of the target, one of nothing."""
    logits = (3 * torch.randn(4, 9)).requires_grad_()
    temperature, targets = torch.tensor([0.5, 2.0, 1.0, 0.7]), torch.tensor([3, 8, 0, 5])
    sets = [[1, 3, 4, 7], [8], None, [2, 6]]  # the last without its target, which is part of it
    ids = torch.tensor([each for one in sets for each in one or []])
    stops = torch.tensor([len(one or []) for one in sets]).cumsum(0)
    starts = torch.tensor([0, *stops[:-1].tolist()])
    mask = TopPMask.build(ids, starts, stops, torch.tensor([one is not None for one in sets]))
    scorer = TopPScorer(log_prob_scorer(targets, VocabShard(0, 9), temperature, "loss"), mask)
    ours = score_logits(logits, scorer, chunk_bytes=chunk_bytes)

    exact = logits.detach().double().requires_grad_()
    tempered = exact / temperature.double()[:, None]
    truth_of = []
    for row, (one, target) in enumerate(zip(sets, targets.tolist(), strict=True)):
        support = sorted({*(range(9) if one is None else one), target})
        truth_of.append(torch.log_softmax(tempered[row, support], dim=0)[support.index(target)])
    log_p = tempered.log_softmax(-1)
    truth = (torch.stack(truth_of), -(log_p.exp() * log_p).sum(-1))

    for found, expected in zip(ours, truth, strict=True):
        torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-5)
    slopes = torch.randn(2, 4)
    wanted = {"both": (0, 1), "log-prob": (0,), "entropy": (1,)}[asked]
    for outputs in (ours, truth):
        sum((outputs[each] * slopes[each]).sum() for each in wanted).backward()
    torch.testing.assert_close(logits.grad, exact.grad.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("target", [2**17 - 1, 0])
def test_case_10_7_no_padding_is_taken_for_an_id(target: int) -> None:
    """Rows of unlike lengths, in a vocabulary whose last id is what -1 would be in 17 bits."""
    vocab = 2**17
    logits = torch.zeros(2, vocab)
    logits[:, -1] = 20.0
    base = log_prob_scorer(torch.tensor([target, 5]), VocabShard(0, vocab), 1.0, "none")
    ids = torch.tensor([7, 9, 11, vocab - 1])
    recorded = torch.ones(2, dtype=torch.bool)
    mask = TopPMask.build(ids, torch.tensor([0, 3]), torch.tensor([3, 3]), recorded)
    (log_probs,) = score_logits(logits, TopPScorer(base, mask))
    own = torch.log_softmax(logits[0, [7, 9, 11, target]], dim=0)[3].item()
    assert log_probs.tolist() == pytest.approx([own, 0.0], abs=1e-6)
    with pytest.raises(InputError, match="a recorded top-p set holds the id -1; ids are vocabulary ids from 0 on"):
        TopPMask.build(torch.tensor([7, -1]), torch.tensor([0]), torch.tensor([2]), recorded[:1])
