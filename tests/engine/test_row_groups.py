"""16-bit rows in groups, where an fp32 sum of the gradient of all of them would be more than the weight's takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits import linear_log_probs, projection
from compact_logits.engine.slices import ChunkPlan, plan_chunks
from compact_logits.megatron.main_grad import MainGrad
from compact_logits.engine.linear import plan_for, score_hidden
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.engine.weight_grad import ReturnedWeightGrad, WeightGrad
from tests.support.allocation import AllocationTracker
from tests.support.linear_head import Head, assert_as_good_as_plain

CUDA = torch.device("cuda")
SCALARS = 176  # bytes a row costs besides its hidden state
# Which gradient of the weight there is, and how many columns for some 4,500 rows.
KINDS = {"main_grad": 600, "frozen": 600, "returned": 150}

each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def weight_of(head: Head, kind: str) -> tuple[Tensor, WeightGrad]:
    weight = head.weight.clone().requires_grad_(kind != "frozen")
    if kind != "main_grad":
        return weight, ReturnedWeightGrad(frozen=kind == "frozen")
    weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    return weight, MainGrad(weight)


def scorer_of(head: Head, entropy: Any = "loss") -> LogProbScorer:
    return LogProbScorer(head.targets, VocabShard(0, len(head.weight)), 1.0, entropy)


def groups_and_slices(head: Head, kind: str, chunk_bytes: int) -> tuple[int, int]:
    weight, grad = weight_of(head, kind)
    sums = grad.sums_in_place
    plan = plan_for(scorer_of(head), len(head.hidden), weight, weight.dtype, chunk_bytes, sums_in_place=sums)
    return len(plan.groups()), len(plan.slices())


def scored(head: Head, kind: str, chunk_bytes: int) -> dict[str, Tensor | None]:
    hidden = head.hidden.clone().requires_grad_()
    weight, grad = weight_of(head, kind)
    outputs = score_hidden(hidden, weight, None, scorer_of(head), weight_grad=grad, chunk_bytes=chunk_bytes)
    torch.autograd.backward(list(outputs), [head.d_log_probs, head.d_entropy])
    d_weight = weight.main_grad if kind == "main_grad" else weight.grad  # type: ignore[attr-defined]
    log_prob, entropy = (output.detach() for output in outputs)
    return {"log_probs": log_prob, "entropy": entropy, "d_hidden": hidden.grad, "d_weight": d_weight}


@each_dtype
@each_kind
@pytest.mark.parametrize("sliced", [False, True], ids=["groups of all columns", "groups and slices"])
def test_the_same_numbers(dtype: torch.dtype, kind: str, sliced: bool) -> None:
    rows, vocab = 4501, 2000 if sliced else KINDS[kind]
    head = Head.random(rows, 40, vocab, dtype)
    budget = int((0.03 if sliced else 0.75) * rows * vocab * dtype.itemsize)
    groups, slices = groups_and_slices(head, kind, budget)
    assert groups > 1 and (slices > 1) == sliced
    truth, plain, ours = head.truth(), head.plain(), scored(head, kind, budget)
    for results in (truth, plain, ours):
        results.pop("d_bias", None)
    if kind == "frozen":
        assert ours["d_weight"] is None
        for results in (truth, plain, ours):
            results.pop("d_weight")
    if kind == "main_grad":
        plain["d_weight"] = plain["d_weight"].float()  # type: ignore[union-attr]
    assert_as_good_as_plain(ours, plain, truth)


@each_kind
@pytest.mark.parametrize("share", [0.75, 0.07])
def test_a_pass_without_gradients_has_the_same_bits(kind: str, share: float) -> None:
    rows, vocab = 4501, KINDS[kind]
    head = Head.random(rows, 40, vocab, torch.bfloat16)
    budget = int(share * rows * vocab * 2)
    weight, grad = weight_of(head, kind)
    with torch.no_grad():
        alone = score_hidden(head.hidden, weight, None, scorer_of(head), weight_grad=grad, chunk_bytes=budget)
    trained = scored(head, kind, budget)
    assert torch.equal(alone[0], trained["log_probs"]) and torch.equal(alone[1], trained["entropy"])


def peak_beyond_the_gradients(kind: str, rows: int, vocab: int, chunk_bytes: int) -> int:
    """Less the gradients that are given to autograd, an fp32 sum of the weight's where that is returned, and the rows'
    scalars."""
    hidden_size = 512
    head = Head.random(rows, hidden_size, vocab, torch.bfloat16)
    hidden = head.hidden.requires_grad_()
    weight, grad = weight_of(head, kind)
    with AllocationTracker() as tracker:
        outputs = score_hidden(hidden, weight, None, scorer_of(head), weight_grad=grad, chunk_bytes=chunk_bytes)
        torch.autograd.backward(list(outputs), [head.d_log_probs, head.d_entropy])
    of_weight = vocab * hidden_size * (2 + 4) if kind == "returned" else 0
    return tracker.peak_bytes - rows * (hidden_size * 2 + SCALARS) - of_weight


@pytest.mark.parametrize(
    ("kind", "vocab"), [("main_grad", 600), ("frozen", 600), ("returned", 600), ("main_grad", 6000), ("frozen", 6000)]
)
def test_transient_bytes_are_those_of_the_budget_whatever_the_rows(
    kind: str, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 3 * 2**20
    plan = plan_chunks(4000, vocab, torch.bfloat16, torch.device("cpu"), budget, row_sum=4 * 512)
    assert (plan.width < vocab) == (vocab == 6000) and plan.height < 3000
    for rows in (1500, 4000):
        assert peak_beyond_the_gradients(kind, rows, vocab, budget) <= 1.05 * budget
    # What it is there to catch: an fp32 sum of all rows' gradient.
    monkeypatch.setattr(projection, "plan_chunks", lambda *args, row_sum, **options: plan_chunks(*args, **options))
    assert peak_beyond_the_gradients(kind, 4000, vocab, budget) > 2 * budget


def test_no_sum_of_rows_stands_beside_a_main_grad() -> None:
    head = Head.random(5000, 64, 600, torch.bfloat16)
    with AllocationTracker() as tracker:
        scored(head, "main_grad", 4 * 2**20)
    wide = [each for each in tracker.records if each.dtype == torch.float32 and each.shape[1:] == (64,)]
    assert all(each.shape[0] <= 2500 or each.shape == (600, 64) for each in wide), wide


def passes(plan: ChunkPlan) -> int:
    """How many rows of fp32 gradients are added to: the weight's by every group, the rows' by every slice."""
    slices = len(plan.slices())
    return len(plan.groups()) * plan.columns + (slices * plan.rows if slices > 1 else 0)


def fewest_passes(rows: int, columns: int, row_sum: int, most: int) -> int:
    """Of all heights, with slices as wide as the memory then allows."""
    found = [-(-rows // max(most // (2 * columns), 1)) * columns]
    for height in {round(rows / count) for count in range(1, 200)}:
        width = min((most - height * row_sum) // (2 * height), columns)
        if width >= 1:
            found.append(-(-rows // height) * columns + -(-columns // width) * rows)
    return min(found)


@pytest.mark.parametrize("hidden", [2048, 5120])
@pytest.mark.parametrize("columns", [18_992, 62_080, 248_320])
@pytest.mark.parametrize("chunk_bytes", [2**24, 2**26, 2**28])
def test_gradients_are_gone_through_as_seldom_as_the_memory_allows(hidden: int, columns: int, chunk_bytes: int) -> None:
    for rows in (700, 2500, 8192, 40_000):
        plan = plan_chunks(rows, columns, torch.bfloat16, CUDA, chunk_bytes, row_sum=4 * hidden)
        if len(plan.groups()) == len(plan.slices()) == 1:
            continue
        most = chunk_bytes - 2 * min(2**25, chunk_bytes // 16)
        assert passes(plan) <= 1.25 * fewest_passes(rows, columns, 4 * hidden, most), (rows, plan)
        assert plan.width >= min(columns, 2048)


def test_what_fits_is_not_cut() -> None:
    for rows in (1, 1000, 1544):
        plan = plan_chunks(rows, 62_080, torch.bfloat16, CUDA, None, row_sum=4 * 4096)
        assert (plan.height, plan.width) == (rows, 62_080)


def test_functions_cut_rows_where_they_are_more_than_the_vocabulary() -> None:
    """There a sum of the weight's gradient is the smaller one; elsewhere that gradient is formed slice by slice."""
    budget = 2**20
    for rows, vocab, cut in ((3000, 1600, False), (4501, 900, True)):
        head = Head.random(rows, 32, vocab, torch.bfloat16)
        with AllocationTracker() as tracker:
            hidden, weight = head.hidden.requires_grad_(), head.weight.requires_grad_()
            linear_log_probs(hidden, weight, head.targets, chunk_bytes=budget).log_probs.sum().backward()
        sums = {each.shape for each in tracker.records if each.dtype == torch.float32 and each.shape[1:] == (32,)}
        assert ((rows, 32) in sums, (vocab, 32) in sums) == (not cut, cut)
