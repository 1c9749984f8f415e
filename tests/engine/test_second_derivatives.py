"""Who differentiates a gradient of ours again is told that there is no such thing; the first derivative is as ever."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from compact_logits import first_order, linear_log_probs, linear_topk_kl, log_probs, topk_kl
from compact_logits.integrations.torchforge import compute_logprobs, compute_logprobs_from_hidden
from tests.support.differentiated_again import COLUMNS, HIDDEN, IDS, ROWS, given, refused
from tests.support.source_tree import modules

Call = Callable[..., Tensor]


def pieces() -> tuple[Tensor, Tensor, Tensor]:
    return given(ROWS, HIDDEN), given(COLUMNS, HIDDEN), given(COLUMNS)


TEACHER = torch.full((ROWS, 2), -1.5)
MASK = torch.arange(ROWS) % 2 == 0

# Of logits, and of hidden states, weight and bias.
FROM_LOGITS: dict[str, Call] = {
    "log_probs": lambda z: log_probs(z, IDS[:, 0], temperature=torch.full((ROWS,), 0.7)).log_probs,
    "entropy": lambda z: log_probs(z, IDS[:, 0], entropy="loss", chunk_bytes=1).entropy,
    "topk_kl": lambda z: topk_kl(z, TEACHER, IDS).loss,
    "topk_kl tail": lambda z: topk_kl(z, TEACHER, IDS, tail=True).loss,
    "topk_kl mask": lambda z: topk_kl(z, TEACHER, IDS, loss_mask=MASK).loss,
    "topk_kl in place": lambda z: topk_kl(z * 1, TEACHER, IDS, inplace_backward=True).loss,
    "compute_logprobs": lambda z: compute_logprobs(z[None], IDS[None, : ROWS - 1, 0], 0.7),
}
FROM_HIDDEN: dict[str, Call] = {
    "linear_log_probs": lambda h, w, b: linear_log_probs(h, w, IDS[:, 0], bias=b).log_probs,
    "linear_log_probs in chunks": lambda h, w, b: linear_log_probs(h, w, IDS[:, 0], bias=b, chunk_bytes=1).log_probs,
    "linear entropy": lambda h, w, b: linear_log_probs(h, w, IDS[:, 0], bias=b, entropy="loss").entropy,
    "linear_topk_kl": lambda h, w, b: linear_topk_kl(h, w, TEACHER, IDS, bias=b).loss,
    "compute_logprobs_from_hidden": lambda h, w, b: compute_logprobs_from_hidden(
        h[None], w, IDS[None, : ROWS - 1, 0], bias=b
    ),
}
EVERY = [(call, 1) for call in FROM_LOGITS.values()] + [(call, 3) for call in FROM_HIDDEN.values()]
NAMES = [*FROM_LOGITS, *FROM_HIDDEN]

each_call = pytest.mark.parametrize(("call", "count"), EVERY, ids=NAMES)
# The second gives back an incoming gradient that itself needs one.
each_loss = pytest.mark.parametrize("loss", [Tensor.sum, lambda values: values.exp().sum()], ids=["linear", "bent"])


def inputs_of(count: int) -> list[Tensor]:
    return [given(ROWS, COLUMNS)] if count == 1 else list(pieces())


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@each_loss
@each_call
def test_the_first_derivative_is_the_same_with_a_graph(call: Call, count: int, loss: Call) -> None:
    inputs = inputs_of(count)
    plain = torch.autograd.grad(loss(call(*inputs)), inputs)
    with_graph = torch.autograd.grad(loss(call(*inputs)), inputs, create_graph=True)
    assert all(torch.equal(one, other.detach()) for one, other in zip(plain, with_graph, strict=True))
    loss(call(*inputs)).backward(create_graph=True)
    for tensor, expected in zip(inputs, plain, strict=True):
        assert torch.equal(tensor.grad.detach(), expected)
        tensor.grad.mul_(0.5)
        assert torch.equal(tensor.grad.detach(), expected * 0.5)
        tensor.grad = None  # ends the circle of which autograd warns
    with_graph[0].mul_(2.0)


@each_loss
@each_call
def test_a_second_derivative_is_an_error_however_it_is_asked_for(call: Call, count: int, loss: Call) -> None:
    inputs = inputs_of(count)

    def gradients() -> Sequence[Tensor]:
        return torch.autograd.grad(loss(call(*inputs)), inputs, create_graph=True)

    refused(lambda: sum(each.square().sum() for each in gradients()).backward())
    for wanted in inputs:
        for at in range(count):
            # Of each gradient by each input alone: by `grad` the engine walks no other way than to that input.
            refused(lambda at=at, wanted=wanted: torch.autograd.grad(gradients()[at].sum(), wanted, allow_unused=True))


@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_under_activation_checkpointing_and_after_another_backward_it_is_the_same(chunk_bytes: int | None) -> None:
    def score(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        through_logits = log_probs(hidden @ weight.T, IDS[:, 0]).log_probs
        return (
            through_logits + linear_log_probs(hidden, weight, IDS[:, 0], bias=bias, chunk_bytes=chunk_bytes).log_probs
        )

    inputs = pieces()
    plain = torch.autograd.grad(score(*inputs).sum(), inputs)
    values = checkpoint(score, *inputs, use_reentrant=False)
    first = torch.autograd.grad(values.sum(), inputs, create_graph=True)
    kept = score(*inputs).sum()
    again = [torch.autograd.grad(kept, inputs, create_graph=True) for _ in range(3)]
    for found in (first, *again):
        assert all(torch.equal(one.detach(), other) for one, other in zip(found, plain, strict=True))
        for gradient in found:
            refused(lambda gradient=gradient: torch.autograd.grad(gradient.sum(), inputs, allow_unused=True))


def test_torchs_own_hessian_is_an_error_and_not_zero() -> None:
    refused(lambda: torch.autograd.functional.hessian(lambda z: FROM_LOGITS["log_probs"](z).sum(), given(ROWS, 11)))
    weights = torch.ones(ROWS, COLUMNS)
    refused(lambda: torch.autograd.functional.hvp(lambda z: FROM_LOGITS["topk_kl"](z).sum(), given(ROWS, 11), weights))


def test_a_gradient_penalty_is_an_error_where_it_would_be_wrong_in_part() -> None:
    """The trunk's part of the penalty has second derivatives; the head's would be missing without a word."""
    x, trunk = given(ROWS, HIDDEN), given(HIDDEN, COLUMNS)
    values = log_probs((x @ trunk).tanh(), IDS[:, 0]).log_probs
    (d_x,) = torch.autograd.grad(values.sum(), x, create_graph=True)
    refused(lambda: (values.sum() + d_x.square().sum()).backward())
    detached = d_x.detach()
    (values.sum() + detached.square().sum()).backward()
    assert trunk.grad is not None


def test_what_needs_no_gradient_stays_a_number() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @first_order.first_order
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
            return (grad * 2,)

    x = given(3)
    (constant,) = torch.autograd.grad(Doubled.apply(x).sum(), x, create_graph=True)
    assert not constant.requires_grad and torch.equal(constant, torch.full((3,), 2.0))
    (bent,) = torch.autograd.grad(Doubled.apply(x).square().sum(), x, create_graph=True)
    refused(lambda: torch.autograd.grad(bent.sum(), x))
    assert Doubled.apply(given(0)).sum().backward() is None


def test_there_is_no_node_where_nobody_asked_for_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: Any) -> None:
        raise AssertionError("a node was made")

    monkeypatch.setattr(first_order._RefuseAgain, "apply", made)
    for call, count in EVERY:
        inputs = inputs_of(count)
        call(*inputs).sum().backward(retain_graph=True)
        assert all(each.grad is not None and each.grad.grad_fn is None for each in inputs)
    with pytest.raises(AssertionError, match="a node was made"):
        inputs = inputs_of(1)
        torch.autograd.grad(EVERY[0][0](*inputs).sum(), inputs, create_graph=True)


def nodes() -> int:
    return [type(each).__name__ for each in gc.get_objects()].count("_ScoreHiddenBackward")


def test_a_graph_that_is_dropped_is_gone_at_once_without_a_collection() -> None:
    hidden, weight, bias = pieces()
    gc.collect()
    gc.disable()
    try:
        for hooks in (nullcontext(), torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)):
            with hooks:
                values = linear_log_probs(hidden, weight, IDS[:, 0], bias=bias).log_probs
            assert nodes() == 1
            del values
            assert nodes() == 0
    finally:
        gc.enable()


def undecorated(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any("Function" in ast.unparse(base) for base in node.bases):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "backward":
                    decorators = [ast.unparse(each) for each in member.decorator_list]
                    found += [node.name] if decorators != ["staticmethod", "first_order"] else []
    return found


def test_every_backward_of_the_package_says_so() -> None:
    assert sum("autograd.Function" in ast.unparse(module.tree) for module in modules()) >= 7
    found = {module.name: undecorated(module.tree) for module in modules()}
    assert {name: names for name, names in found.items() if names} == {"compact_logits.first_order": ["_RefuseAgain"]}
