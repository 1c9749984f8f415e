"""The autograd node of both entries: what it keeps alive, what it lets change, and what it hands to its consumers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from compact_logits import TokenStats, linear_log_probs, log_probs
from tests.support.linear_head import Head, assert_as_good_as_plain

Score = Callable[..., TokenStats]


def through_head(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> TokenStats:
    return linear_log_probs(hidden, weight, targets, chunk_bytes=2_000, **options)


def through_logits(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> TokenStats:
    return log_probs(hidden @ weight.T, targets, chunk_bytes=2_000, **options)


each_entry = pytest.mark.parametrize("score", [through_head, through_logits])


def head_and_leaves(dtype: torch.dtype = torch.float32) -> tuple[Head, Tensor, Tensor]:
    head = Head.random(13, 6, 29, dtype)
    return head, head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()


@each_entry
def test_nothing_is_saved_without_a_gradient_to_form(score: Score) -> None:
    head = Head.random(13, 6, 29)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        frozen = score(head.hidden, head.weight, head.targets, entropy="loss")
        with torch.no_grad():
            scored = score(head.hidden.clone().requires_grad_(), head.weight, head.targets, entropy="loss")
    assert saved == []
    assert not any(output.requires_grad for output in (*frozen, *scored))


@each_entry
def test_backward_frees_what_forward_saved(score: Score) -> None:
    head, hidden, weight = head_and_leaves()
    refs = []

    def pack(tensor: Tensor) -> Tensor:
        packed = tensor.detach()
        refs.append(weakref.ref(packed))
        return packed

    trunk = hidden * 2
    refs.append(weakref.ref(trunk))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        result = score(trunk, weight, head.targets, entropy="loss")
    del trunk
    gc.collect()
    assert len(refs) > 5 and all(ref() is not None for ref in refs[1:])
    (result.log_probs.sum() + result.entropy.sum()).backward()
    gc.collect()
    assert [ref for ref in refs if ref() is not None] == []
    assert result.log_probs.grad_fn is not None


@each_entry
def test_a_graph_that_is_dropped_frees_what_forward_saved(score: Score) -> None:
    head, hidden, weight = head_and_leaves()
    trunk = hidden * 2
    kept = weakref.ref(trunk)
    result = score(trunk, weight, head.targets)
    del trunk
    assert kept() is not None
    del result
    gc.collect()
    assert kept() is None


@each_entry
@pytest.mark.parametrize("changed", ["targets", "temperature", "weight", "trunk"])
def test_an_input_that_changed_before_backward_is_an_error(score: Score, changed: str) -> None:
    head, hidden, weight = head_and_leaves()
    tensors = {
        "trunk": hidden * 2,
        "weight": weight * 1,
        "targets": head.targets.clone(),
        "temperature": torch.full((13,), 0.9),
    }
    result = score(
        tensors["trunk"], tensors["weight"], tensors["targets"], temperature=tensors["temperature"], entropy="loss"
    )
    with torch.no_grad():
        tensors[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (result.log_probs.sum() + result.entropy.sum()).backward()


@each_entry
def test_a_consumer_may_write_into_the_outputs(score: Score) -> None:
    head, hidden, weight = head_and_leaves()
    mask = (torch.arange(13) % 3 > 0).float()
    result = score(hidden, weight, head.targets, entropy="loss")
    result.log_probs.mul_(mask)
    result.entropy.mul_(-0.5)
    (result.log_probs.sum() + result.entropy.sum()).backward()
    other_hidden, other_weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    other = score(other_hidden, other_weight, head.targets, entropy="loss")
    ((other.log_probs * mask).sum() - 0.5 * other.entropy.sum()).backward()
    torch.testing.assert_close(hidden.grad, other_hidden.grad, rtol=0, atol=0)
    torch.testing.assert_close(weight.grad, other_weight.grad, rtol=0, atol=0)


@each_entry
def test_case_12_1_backward_works_once_the_outputs_memory_is_gone(score: Score) -> None:
    head, hidden, weight = head_and_leaves()
    result = score(hidden, weight, head.targets, entropy="loss")
    roots = [output * 1 for output in result]
    for output in result:
        output.data = torch.empty(1)
    torch.autograd.backward(roots, [head.d_log_probs, head.d_entropy])
    ours = {"d_hidden": hidden.grad, "d_weight": weight.grad}
    plain, truth = ({name: of[name] for name in ours} for of in (head.plain(), head.truth()))
    assert_as_good_as_plain(ours, plain, truth)


@each_entry
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_runs_the_same_twice(score: Score, reentrant: bool) -> None:
    head, hidden, weight = head_and_leaves()
    calls = []

    def run(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        calls.append(1)
        return tuple(score(hidden, weight, head.targets, entropy="loss"))

    outputs = checkpoint(run, hidden, weight, use_reentrant=reentrant)
    torch.autograd.backward(outputs, [head.d_log_probs, head.d_entropy])
    assert len(calls) == 2
    ours = {"d_hidden": hidden.grad, "d_weight": weight.grad}
    plain, truth = ({name: of[name] for name in ours} for of in (head.plain(), head.truth()))
    assert_as_good_as_plain(ours, plain, truth)


@each_entry
def test_case_1_5_a_metric_entropy_has_no_graph_and_keeps_no_row_of_logits(score: Score) -> None:
    head, hidden, weight = head_and_leaves()
    sizes = {}
    for entropy in ("none", "metric"):
        numbers: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, n=numbers: n.append(t.nbytes) or t, lambda t: t):
            result = score(hidden, weight, head.targets, entropy=entropy)
        sizes[entropy] = sum(numbers)
    assert result.entropy is not None and not result.entropy.requires_grad
    assert 0 <= sizes["metric"] - sizes["none"] <= 13 * 8
    expected = score(hidden, weight, head.targets, entropy="loss")
    assert torch.equal(result.entropy, expected.entropy) and torch.equal(result.log_probs, expected.log_probs)


@each_entry
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_case_2_2_entropy_is_the_same_before_and_after_log_prob(score: Score, dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 1, 2, 3]], dtype=dtype).requires_grad_()
    head = torch.eye(4, dtype=dtype)
    target = torch.tensor([3])
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            before = score(logits, head, target, entropy="loss").entropy
            alone = score(logits, head, target).log_probs
            after = score(logits, head, target, entropy="loss").entropy
        assert alone.item() == pytest.approx(-0.4401897, abs=1e-6)
        assert before.item() == after.item() == pytest.approx(0.9475370, abs=1e-6)


def test_case_3_4_no_entropy_work_where_only_the_log_prob_is_in_the_loss() -> None:
    head, hidden, weight = head_and_leaves()
    counts = {}
    for entropy in ("none", "loss"):
        result = through_head(hidden, weight, head.targets, entropy=entropy)
        with torch.profiler.profile() as profile:
            result.log_probs.sum().backward()
        counts[entropy] = sum(e.count for e in profile.key_averages() if e.key in ("aten::exp", "aten::exp2_"))
        assert not any(e.key == "aten::clamp_" for e in profile.key_averages())
    assert counts["none"] == counts["loss"] > 0
