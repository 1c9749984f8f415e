"""The sum of squared probabilities, beside log-prob and entropy: of the whole vocabulary, and without a graph."""

from __future__ import annotations

import pickle

import pytest
import torch

from compact_logits import TokenStats, linear_log_probs, log_probs, reference
from tests.support.linear_head import Head


def test_case_1_2_of_a_known_row_and_one_of_nothing() -> None:
    row, target, nothing = torch.tensor([[0.0, 1, 2, 3]]), torch.tensor([3]), float("-inf")
    assert reference.sum_p2(row.double()).item() == pytest.approx(0.4793610, abs=1e-7)
    masked = torch.tensor([[0.0, 1, 2, 3, nothing], [nothing] * 5])
    for entropy in ("none", "metric", "loss"):
        given = log_probs(row, target, entropy=entropy, sum_p2=True)
        projected = linear_log_probs(row, torch.eye(4), target, entropy=entropy, sum_p2=True)
        for found in (given, projected):
            assert found.sum_p2 is not None and found.sum_p2.item() == pytest.approx(0.4793610, abs=1e-7)
            assert found.log_probs.item() == pytest.approx(-0.4401897, abs=1e-6)
            assert (found.entropy is None) == (entropy == "none")
        with_mask = log_probs(masked, torch.tensor([3, 0]), sum_p2=True, entropy=entropy).sum_p2
        assert with_mask is not None and with_mask[0].item() == pytest.approx(0.4793610, abs=1e-6)
        assert with_mask[1].isnan()
    plain = log_probs(row, target)
    assert plain.sum_p2 is None and len(plain) == 2


@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
def test_it_has_no_graph_and_changes_nothing_else(entropy: str) -> None:
    head = Head.random(9, 7, 33, bias=True)
    plain, both = head.compact(entropy), head.compact(entropy, sum_p2=True)
    del both["sum_p2"]
    assert plain.keys() == both.keys() and all(torch.equal(plain[name], both[name]) for name in plain)
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
