"""Both entries to the log-prob as a node of a graph: what it is given, what it lets change, what it hands on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from compact_logits import TokenStats, linear_log_probs, log_probs, topk_kl
from compact_logits.engine import scorer
from tests.support.linear_head import Head, assert_as_good_as_plain
from tests.support.topk_case import topk_case

Score = Callable[..., TokenStats]
VOCAB = 133


def through_head(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> TokenStats:
    return linear_log_probs(hidden, weight, targets, **{"chunk_bytes": 1, **options})


def through_logits(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> TokenStats:
    return log_probs(hidden @ weight.T, targets, **options)


each_entry = pytest.mark.parametrize("score", [through_head, through_logits])


def head_and_leaves() -> tuple[Head, Tensor, Tensor]:
    head = Head.random(13, 6, VOCAB)
    return head, head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()


def assert_gradients(head: Head, hidden: Tensor, weight: Tensor) -> None:
    ours = {"d_hidden": hidden.grad, "d_weight": weight.grad}
    plain, truth = ({name: of[name] for name in ours} for of in (head.plain(), head.truth()))
    assert_as_good_as_plain(ours, plain, truth)


@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_strided_hidden_weight_and_bias(chunk_bytes: int | None) -> None:
    head = Head.random(13, 6, VOCAB, bias=True)
    hidden = head.hidden.repeat_interleave(2, dim=0).t().contiguous().t()[::2].requires_grad_()
    weight = head.weight.t().contiguous().t().requires_grad_()
    bias = head.bias.repeat_interleave(3)[::3].requires_grad_()
    targets = head.targets.repeat_interleave(2)[::2]
    assert not any(tensor.is_contiguous() for tensor in (hidden, weight, bias, targets))
    result = linear_log_probs(hidden, weight, targets, bias=bias, entropy="loss", chunk_bytes=chunk_bytes)
    torch.autograd.backward(list(result), [head.d_log_probs, head.d_entropy])
    ours = {"log_probs": result.log_probs.detach(), "entropy": result.entropy.detach()}
    ours |= {"d_hidden": hidden.grad, "d_weight": weight.grad, "d_bias": bias.grad}
    assert_as_good_as_plain(ours, head.plain(), head.truth())


@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_expanded_and_strided_incoming_gradients(chunk_bytes: int | None) -> None:
    head = Head.random(13, 6, VOCAB, bias=True)
    expanded, strided = torch.tensor(0.75).expand(13), head.d_entropy.repeat_interleave(2)[::2]
    head = replace(head, d_log_probs=expanded, d_entropy=strided)
    assert_as_good_as_plain(head.compact(chunk_bytes=chunk_bytes), head.plain(), head.truth())


@each_entry
@pytest.mark.parametrize("used", ["log_probs", "entropy"])
def test_case_3_4_one_output_alone_in_the_loss(score: Score, used: str) -> None:
    head, hidden, weight = head_and_leaves()
    with mock.patch.object(scorer, "softmax_grad_", wraps=scorer.softmax_grad_) as passes:
        getattr(score(hidden, weight, head.targets, entropy="loss"), used).backward(getattr(head, f"d_{used}"))
    # The entropy's part of the gradient costs nothing where no gradient comes back for it.
    assert all((call.args[4] is None) == (used == "log_probs") for call in passes.call_args_list) and passes.called
    none = torch.zeros(13)
    alone = replace(head, **{"d_log_probs": none, "d_entropy": none, f"d_{used}": getattr(head, f"d_{used}")})
    assert_gradients(alone, hidden, weight)


class Unread(torch.autograd.Function):
    """Gives no gradient back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_outputs_that_nobody_reads_have_gradients_of_zero() -> None:
    head, hidden, weight = head_and_leaves()
    case = topk_case(3, vocab=20, k=4)
    for tail in (False, True):
        Unread.apply(topk_kl(*case, tail=tail).loss).sum().backward()
        assert case.logits.grad is None or not case.logits.grad.any()
    Unread.apply(through_head(hidden, weight, head.targets).log_probs).sum().backward()
    assert all(each.grad is None or not each.grad.any() for each in (hidden, weight))


@each_entry
def test_a_graph_that_is_dropped_frees_its_input(score: Score) -> None:
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
@pytest.mark.parametrize("changed", ["targets", "weight", "trunk"])
def test_an_input_that_changed_before_backward_is_an_error(score: Score, changed: str) -> None:
    head, hidden, weight = head_and_leaves()
    tensors = {"trunk": hidden * 2, "weight": weight * 1, "targets": head.targets.clone()}
    result = score(*(tensors[name] for name in ("trunk", "weight", "targets")), entropy="loss")
    with torch.no_grad():
        tensors[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (result.log_probs.sum() + result.entropy.sum()).backward()


@each_entry
def test_a_temperature_that_changed_before_backward_is_the_one_of_forward(score: Score) -> None:
    head, hidden, weight = head_and_leaves()
    temperature = torch.full((13,), 0.9)
    result = score(hidden, weight, head.targets, temperature=temperature, entropy="loss")
    temperature.zero_()
    torch.autograd.backward(list(result), [head.d_log_probs, head.d_entropy])
    assert_gradients(replace(head, temperature=0.9), hidden, weight)


@each_entry
def test_case_12_1_a_consumer_may_write_into_the_outputs_and_free_their_memory(score: Score) -> None:
    head, hidden, weight = head_and_leaves()
    mask = (torch.arange(13) % 3 > 0).float()
    result = score(hidden, weight, head.targets, entropy="loss")
    roots = [result.log_probs.mul_(mask) * 1, result.entropy.mul_(-0.5) * 1]
    for output in result:
        output.data = torch.empty(1)
    torch.autograd.backward(roots, [head.d_log_probs, head.d_entropy])
    assert_gradients(
        replace(head, d_log_probs=head.d_log_probs * mask, d_entropy=-0.5 * head.d_entropy), hidden, weight
    )


@each_entry
def test_case_1_5_a_metric_entropy_has_no_graph_and_saves_one_number_a_row(score: Score) -> None:
    head, hidden, weight = head_and_leaves()
    sizes = {}
    for entropy in ("none", "metric"):
        numbers: list[int] = []
        with saved_tensors_hooks(lambda t, n=numbers: n.append(t.nbytes) or t, lambda t: t):
            result = score(hidden, weight, head.targets, entropy=entropy)
        sizes[entropy] = sum(numbers)
    assert result.entropy is not None and not result.entropy.requires_grad
    assert sizes["metric"] - sizes["none"] <= 13 * 8


@each_entry
def test_case_9_5_the_weight_is_read_at_each_call(score: Score) -> None:
    head = Head.random(5, 4, 7)
    weight = head.weight.clone()
    before = score(head.hidden, weight, head.targets).log_probs
    weight[0] += 1
    after = score(head.hidden, weight, head.targets).log_probs
    assert torch.equal(after, score(head.hidden, weight.clone(), head.targets).log_probs)
    assert not torch.equal(after, before)
