"""Exponentials that wait for backward in place of the logits: the same gradients, and only where those are enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from compact_logits import chunks, linear_log_probs
from compact_logits.engine.slices import Block, plan_chunks
from compact_logits.engine.linear import blocks_of
from compact_logits.scorers.compiled import CompiledLogProbScorer
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.scorers.top_p import TopPMask, TopPScorer
from compact_logits.engine.vocab_shard import VocabShard
from tests.support.linear_head import Head, assert_as_good_as_plain
from tests.support.parity import assert_gradient_close_to_truth

ROWS, HIDDEN, VOCAB, WIDTH = 60, 7, 300, 64
BUDGET = 2**15
DTYPES = [torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_entropy = pytest.mark.parametrize("entropy", ["none", "metric"])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", {"cpu": 1})
    monkeypatch.setattr(chunks, "_GOOD_WIDTH", WIDTH)


def scorer_of(entropy: str = "none", **options: Any) -> LogProbScorer:
    targets = torch.randint(VOCAB, (ROWS,), generator=torch.Generator().manual_seed(1))
    return LogProbScorer(targets, VocabShard(0, VOCAB), options.pop("temperature", 1.0), entropy, **options)


def turned(scorer: LogProbScorer, logits: torch.Tensor, d_log_probs: torch.Tensor, *, shares: bool) -> torch.Tensor:
    """The gradient of the logits in one block, by way of what forward left or from the logits themselves."""
    z, rows = logits.clone(), slice(0, ROWS)
    stats = scorer.local_stats(Block(z, z, torch.empty_like(z) if scorer.needs_spare else None, rows))
    saved = scorer.merge(stats)[1]
    grads = (d_log_probs, None)[: len(scorer.differentiable)]
    if shares:
        assert scorer.turn_shares_ is not None
        scorer.turn_shares_(z, stats[:, 0], rows, saved, grads)
        return z
    again = logits.clone()
    scorer.d_logits_(Block(again, again, torch.empty_like(z) if scorer.needs_spare else None, rows), saved, grads)
    return again


@each_dtype
@each_entropy
@pytest.mark.parametrize("vocab_size", [None, 290])
@pytest.mark.parametrize("temperature", [1.0, 0.3, "rows"])
def test_the_gradient_is_that_of_the_logits(
    temperature: float | str, vocab_size: int | None, entropy: str, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(2)
    logits, d_log_probs = (torch.randn(*size, generator=random, dtype=dtype) for size in ((ROWS, VOCAB), (ROWS,)))
    of_rows = 0.5 + torch.rand(ROWS, generator=random, dtype=dtype) if temperature == "rows" else temperature
    scorer = scorer_of(entropy, vocab_size=vocab_size, temperature=of_rows)
    scorer.targets.clamp_(max=280)
    ours = turned(scorer, logits * 5, d_log_probs, shares=True)

    def dense(dtype: torch.dtype) -> torch.Tensor:
        leaf = (logits * 5).to(dtype).requires_grad_()
        wide = of_rows.to(dtype)[:, None] if isinstance(of_rows, torch.Tensor) else of_rows
        log_probs = (leaf[:, :vocab_size] / wide).log_softmax(dim=1).gather(1, scorer.targets[:, None])[:, 0]
        return torch.autograd.grad(log_probs, leaf, d_log_probs.to(dtype))[0]

    if dtype == torch.float32:
        assert_gradient_close_to_truth(ours, dense(dtype), dense(torch.float64), floor=1e-7)
    else:
        torch.testing.assert_close(ours, dense(dtype), rtol=0, atol=1e-14)
    torch.testing.assert_close(ours, turned(scorer, logits * 5, d_log_probs, shares=False), rtol=1e-5, atol=1e-7)


@each_dtype
@each_entropy
@pytest.mark.usefixtures("small_chunks")
def test_slices_far_below_the_largest_logit_and_without_any(entropy: str, dtype: torch.dtype) -> None:
    head = Head.random(ROWS, HIDDEN, VOCAB, dtype, bias=True, temperature="rows")
    bias = head.bias.clone()
    bias[:WIDTH] -= 30  # a slice whose shares are small
    bias[WIDTH : 2 * WIDTH] -= 300  # one whose shares are 0 in fp32, and were not before they were put together
    head = replace(head, bias=bias, targets=head.targets.clamp(min=2 * WIDTH))
    ours = head.compact(entropy, chunk_bytes=BUDGET * dtype.itemsize // 4)
    floor = 1e-12 if dtype == torch.float64 else 1e-6
    assert_as_good_as_plain(ours, head.plain(entropy), head.truth(entropy), floor=floor)
    bias[WIDTH : 2 * WIDTH] = -torch.inf  # one that is masked altogether
    masked = replace(head, bias=bias).compact(entropy, chunk_bytes=BUDGET * dtype.itemsize // 4)
    for name in ("log_probs", "d_hidden", "d_weight", "d_bias"):
        torch.testing.assert_close(masked[name], ours[name], rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
    assert not masked["d_bias"][WIDTH : 2 * WIDTH].any()


@pytest.mark.usefixtures("small_chunks")
def test_the_check_above_finds_shares_that_are_shifted_by_something_else() -> None:
    head = Head.random(ROWS, HIDDEN, VOCAB, bias=True)
    turn = LogProbScorer._turn_shares_

    def unshifted(self: LogProbScorer, shares: Any, largest: Any, rows: Any, saved: Any, grads: Any) -> None:
        turn(self, shares, saved[0], rows, saved, grads)

    with mock.patch.object(LogProbScorer, "_turn_shares_", unshifted):
        ours = head.compact("none", chunk_bytes=BUDGET)
    with pytest.raises(AssertionError, match="d_hidden"):
        assert_as_good_as_plain(ours, head.plain("none"), head.truth("none"))


@each_dtype
@pytest.mark.parametrize("part", [0.4, 3.0])
@pytest.mark.usefixtures("small_chunks")
def test_a_second_backward_has_the_bits_of_the_first(part: float, dtype: torch.dtype) -> None:
    head = Head.random(ROWS, HIDDEN, VOCAB, dtype, bias=True)
    budget = int(part * ROWS * VOCAB * dtype.itemsize)
    leaves = [t.clone().requires_grad_() for t in (head.hidden, head.weight, head.bias)]
    result = linear_log_probs(leaves[0], leaves[1], head.targets, bias=leaves[2], chunk_bytes=budget)
    with mock.patch.object(LogProbScorer, "_turn_shares_", autospec=True, side_effect=LogProbScorer._turn_shares_) as t:
        first, second = (
            torch.autograd.grad(result.log_probs, leaves, head.d_log_probs, retain_graph=True) for _ in range(2)
        )
    assert t.call_count and t.call_count % 2 == 0
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_only_where_the_shares_are_enough() -> None:
    of = {entropy: scorer_of(entropy).turn_shares_ is not None for entropy in ("none", "metric", "loss")}
    assert of == {"none": True, "metric": True, "loss": False}
    assert scorer_of(sum_p2=True).turn_shares_ is None, "the squares are formed where the shares were"
    base = scorer_of()
    assert CompiledLogProbScorer(base.targets, base.shard, 1.0, "none").turn_shares_ is None
    sets = TopPMask(ids=torch.zeros(ROWS, dtype=torch.int64), row_of=torch.arange(ROWS), recorded=torch.ones(ROWS) > 0)
    assert TopPScorer(base, sets).turn_shares_ is None


def test_no_block_is_planned_where_none_is_used() -> None:
    wide, narrow = torch.float32, torch.bfloat16
    for entropy, of_wide, of_narrow in (("none", 0, 1), ("metric", 1, 2), ("loss", 2, 2)):
        scorer = scorer_of(entropy)
        assert [blocks_of(scorer, dtype, dtype, keeps=True) for dtype in (wide, narrow)] == [of_wide, of_narrow]
    # bf16 rows whose logits are not rounded: their gradient is, and so they stay as they are.
    assert [blocks_of(scorer_of(), narrow, wide, keeps=keeps) for keeps in (True, False)] == [1, 0]
    cpu = torch.device("cpu")
    least, most = (plan_chunks(1000, 50_000, wide, cpu, 2**26, blocks=n) for n in (2, 0))
    assert most.held > least.held
    assert replace(most, held=least.held) == least, "other chunks would have other bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("chunk_bytes", [1, 2**14, 2**16, 2**18, None])
def test_log_probs_have_the_same_bits_whatever_else_is_asked(chunk_bytes: int | None, dtype: torch.dtype) -> None:
    """Or the ratio of a policy to itself would not be 1 where the pass before training asked for no entropy."""
    head = Head.random(100, 32, 1003, dtype)
    given: Any = (head.hidden, head.weight, head.targets)
    with torch.no_grad():
        before = linear_log_probs(*given, chunk_bytes=chunk_bytes).log_probs
    head.hidden.requires_grad_()
    for asked in ({"entropy": "none"}, {"entropy": "metric"}, {"entropy": "loss"}, {"sum_p2": True}):
        assert torch.equal(linear_log_probs(*given, chunk_bytes=chunk_bytes, **asked).log_probs, before), asked
