"""What `linear_log_probs` is given and what comes back may have any form: strided, frozen, expanded, missing, twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compact_logits import linear_log_probs, reference
from tests.support.linear_head import Head, assert_as_good_as_plain
from tests.support.parity import assert_gradient_close_to_truth

SMALL = 2_000  # bytes: several chunks of the heads below


def leaves(head: Head) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in (head.hidden, head.weight, head.bias)]


@pytest.mark.parametrize("chunk_bytes", [1, SMALL, None])
def test_strided_hidden_weight_and_bias(chunk_bytes: int | None) -> None:
    head = Head.random(13, 6, 29, bias=True)
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


@pytest.mark.parametrize("chunk_bytes", [SMALL, None])
def test_expanded_and_strided_incoming_gradients(chunk_bytes: int | None) -> None:
    head = Head.random(13, 6, 29, bias=True)
    expanded = torch.tensor(0.75).expand(13)
    strided = head.d_entropy.repeat_interleave(2)[::2]
    head = replace(head, d_log_probs=expanded, d_entropy=strided)
    assert_as_good_as_plain(head.compact(chunk_bytes=chunk_bytes), head.plain(), head.truth())


@pytest.mark.parametrize("used", ["log_probs", "entropy"])
@pytest.mark.parametrize("chunk_bytes", [SMALL, None])
def test_case_3_4_one_output_alone_in_the_loss(chunk_bytes: int | None, used: str) -> None:
    head = Head.random(13, 6, 29, bias=True)
    hidden, weight, bias = leaves(head)
    result = linear_log_probs(hidden, weight, head.targets, bias=bias, entropy="loss", chunk_bytes=chunk_bytes)
    getattr(result, used).backward(getattr(head, f"d_{used}"))
    ours = {"d_hidden": hidden.grad, "d_weight": weight.grad, "d_bias": bias.grad}
    silent = torch.zeros(13)
    alone = replace(head, **{"d_log_probs": silent, "d_entropy": silent, f"d_{used}": getattr(head, f"d_{used}")})
    plain, truth = ({n: r[n] for n in ours} for r in (alone.plain(), alone.truth()))
    assert_as_good_as_plain(ours, plain, truth)


@pytest.mark.parametrize("chunk_bytes", [SMALL, None])
@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias", "hidden weight", "hidden bias", "weight bias"])
def test_case_3_8_frozen_inputs_get_no_gradient(frozen: str, chunk_bytes: int | None) -> None:
    head = Head.random(13, 6, 29, bias=True)
    names = ("hidden", "weight", "bias")
    tensors = {name: getattr(head, name).clone().requires_grad_(name not in frozen) for name in names}
    result = linear_log_probs(**tensors, targets=head.targets, entropy="loss", chunk_bytes=chunk_bytes)
    torch.autograd.backward(list(result), [head.d_log_probs, head.d_entropy])
    assert all(tensors[name].grad is None for name in frozen.split())
    trained = [name for name in names if name not in frozen]
    ours = {f"d_{name}": tensors[name].grad for name in trained}
    plain, truth = ({n: r[n] for n in ours} for r in (head.plain(), head.truth()))
    assert_as_good_as_plain(ours, plain, truth)


@pytest.mark.parametrize("chunk_bytes", [SMALL, None])
def test_a_second_backward_adds_the_same_again(chunk_bytes: int | None) -> None:
    head = Head.random(13, 6, 29, bias=True)
    inputs = leaves(head)
    result = linear_log_probs(
        inputs[0], inputs[1], head.targets, bias=inputs[2], entropy="loss", chunk_bytes=chunk_bytes
    )
    loss = result.log_probs @ head.d_log_probs + result.entropy @ head.d_entropy
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_case_11_5_autocast_computes_the_product_in_its_dtype(dtype: torch.dtype) -> None:
    head = Head.random(31, 16, 40, bias=True)
    with torch.autocast("cpu", dtype=dtype):
        ours, plain = head.compact(chunk_bytes=SMALL), head.plain()
    assert ours["log_probs"].dtype == ours["entropy"].dtype == ours["d_weight"].dtype == torch.float32
    assert_as_good_as_plain(ours, plain, head.truth())
    narrow = replace(head, hidden=head.hidden.to(dtype), weight=head.weight.to(dtype), bias=head.bias.to(dtype))
    assert torch.equal(ours["log_probs"], narrow.compact(chunk_bytes=SMALL)["log_probs"])


def test_autocast_leaves_fp64_alone_as_it_does_in_a_linear_layer() -> None:
    head = Head.random(5, 4, 7, torch.float64, bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, plain = head.compact(), head.plain()
    assert plain["log_probs"].dtype == torch.float64
    assert_as_good_as_plain(ours, plain, head.truth(), floor=1e-12)


@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_backward_under_autocast_keeps_the_dtype_of_forward(chunk_bytes: int | None) -> None:
    head = Head.random(31, 16, 40)
    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    loss = linear_log_probs(hidden, weight, head.targets, chunk_bytes=chunk_bytes).log_probs @ head.d_log_probs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    plain, truth = head.plain("none"), head.truth("none")
    names = ("d_hidden", "d_weight")
    ours = {"d_hidden": hidden.grad, "d_weight": weight.grad}
    assert_as_good_as_plain(ours, {n: plain[n] for n in names}, {n: truth[n] for n in names})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_case_11_4_deterministic_algorithms_give_the_same_bits(dtype: torch.dtype) -> None:
    head = Head.random(40, 16, 100, dtype, bias=True, temperature="rows")
    torch.use_deterministic_algorithms(True)
    try:
        first, second = head.compact(chunk_bytes=SMALL), head.compact(chunk_bytes=SMALL)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_case_9_4_bias() -> None:
    # The identity as the head: its logits are the hidden states.
    hidden = torch.tensor([[0.0, 1, 2, 3]])
    bias = torch.tensor([0.0, 0, 0, 1], requires_grad=True)
    result = linear_log_probs(hidden, torch.eye(4), torch.tensor([3]), bias=bias)
    result.log_probs.sum().backward()
    assert result.log_probs.item() == pytest.approx(-0.1851825, abs=1e-6)
    p = torch.tensor([0.0, 1, 2, 4]).double().softmax(0)
    expected = torch.tensor([0.0, 0, 0, 1]).double() - p
    torch.testing.assert_close(bias.grad.double(), expected, rtol=0, atol=1e-6)


def test_a_bias_is_rounded_with_the_product_as_in_a_linear_layer() -> None:
    head = Head.random(64, 64, 512, torch.bfloat16, bias=True)
    truth = head.truth()["log_probs"]
    for chunk_bytes in (64 * 512, None):
        assert_gradient_close_to_truth(
            head.compact(chunk_bytes=chunk_bytes)["log_probs"], head.plain()["log_probs"], truth
        )
    rounded_twice, _ = reference.log_probs(head.hidden @ head.weight.T + head.bias, head.targets)
    with pytest.raises(AssertionError, match="relative error"):
        assert_gradient_close_to_truth(rounded_twice, head.plain()["log_probs"], truth)


def test_case_9_5_the_weight_is_read_at_each_call() -> None:
    head = Head.random(5, 4, 7)
    weight = head.weight.clone()
    before = linear_log_probs(head.hidden, weight, head.targets).log_probs
    weight[0] += 1
    after = linear_log_probs(head.hidden, weight, head.targets).log_probs
    fresh = linear_log_probs(head.hidden, weight.clone(), head.targets).log_probs
    assert torch.equal(after, fresh) and not torch.equal(after, before)
