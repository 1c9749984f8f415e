"""Padded columns of the vocabulary: counted, unless `vocab_size` says where they begin; then as if not there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits import linear_log_probs, log_probs, reference
from compact_logits.engine import validation
from compact_logits.errors import InputError
from tests.support.linear_head import Head


def test_no_padding_changes_no_bit() -> None:
    head = Head.random(14, 9, 140, bias=True)
    plain, bounded = head.compact(), head.compact(vocab_size=140)
    assert all(torch.equal(plain[name], bounded[name]) for name in plain)


@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_case_6_2_counted_or_not(chunk_bytes: int | None) -> None:
    logits, target = torch.tensor([[1.0, 2, 3, 5]]), torch.tensor([2])
    for vocab_size, expected in ((3, (-0.4076060, 0.8323956)), (None, (-2.1851825, 0.5950867))):
        given: dict[str, Any] = {"entropy": "loss", "sum_p2": True, "vocab_size": vocab_size}
        weight = torch.eye(4, requires_grad=True)
        for found in (
            log_probs(logits, target, **given),
            linear_log_probs(logits, weight, target, chunk_bytes=chunk_bytes, **given),
        ):
            assert (found.log_probs.item(), found.entropy.item()) == pytest.approx(expected, abs=1e-6)
            of_real = reference.sum_p2(logits[:, :vocab_size].double()).item()
            assert found.sum_p2.item() == pytest.approx(of_real, abs=1e-6)
        (found.log_probs + found.entropy).sum().backward()
        assert bool((weight.grad[3] == 0).all()) == (vocab_size == 3)


@pytest.mark.parametrize("padding", [4.0, float("nan"), float("inf")])
@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_given_logits_as_if_the_padding_were_not_there(padding: float, chunk_bytes: int | None) -> None:
    logits, targets = torch.randn(6, 40), torch.arange(6)
    logits[:, 33:] = padding
    gradients = []
    for given, vocab_size in ((logits.requires_grad_(), 33), (logits.detach()[:, :33].clone().requires_grad_(), None)):
        found = log_probs(given, targets, entropy="loss", vocab_size=vocab_size, chunk_bytes=chunk_bytes)
        (found.log_probs * 2 + found.entropy).sum().backward()
        gradients.append((found.log_probs, found.entropy, given.grad[:, :33]))
    assert all(map(torch.equal, *gradients)) and not logits.grad[:, 33:].any()


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


def test_a_target_in_the_padding_that_no_host_sees_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose values are not read."""
    monkeypatch.setattr(validation, "check_vocab_size", lambda vocab_size, *_: vocab_size)
    logits: Tensor = torch.zeros(1, 5, requires_grad=True)
    log_prob = log_probs(logits, torch.tensor([4]), vocab_size=4).log_probs
    log_prob.sum().backward()
    assert bool(log_prob.isnan().all()) and bool(logits.grad[:, :4].isnan().all())
