"""Gradients offer no second derivatives: torch's own `once_differentiable` says so, in every backward."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compact_logits import linear_log_probs, linear_topk_kl, log_probs, topk_kl
from tests.support.source_tree import modules

IDS, TEACHER = torch.arange(10).view(5, 2), torch.full((5, 2), -1.5)


def given(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


CALLS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "log_probs": (lambda z: log_probs(z, IDS[:, 0]).log_probs, [given(5, 11)]),
    "topk_kl": (lambda z: topk_kl(z, TEACHER, IDS).loss, [given(5, 11)]),
    "linear_log_probs": (lambda h, w: linear_log_probs(h, w, IDS[:, 0]).log_probs, [given(5, 4), given(11, 4)]),
    "linear_topk_kl": (lambda h, w: linear_topk_kl(h, w, TEACHER, IDS).loss, [given(5, 4), given(11, 4)]),
}


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_is_a_number_and_differentiating_it_again_an_error(name: str) -> None:
    call, leaves = CALLS[name]
    plain = torch.autograd.grad(call(*leaves).exp().sum(), leaves)
    again = torch.autograd.grad(call(*leaves).exp().sum(), leaves, create_graph=True)
    assert all(torch.equal(one, other.detach()) for one, other in zip(plain, again, strict=True))
    for gradient in again:
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(gradient.sum(), leaves, retain_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with @once_diff"):
            gradient.sum().backward()
    # Where the incoming gradient is a constant, so is ours, as of every function that torch marks so.
    assert not any(each.requires_grad for each in torch.autograd.grad(call(*leaves).sum(), leaves, create_graph=True))


def undecorated(tree: ast.AST) -> list[str]:
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("autograd.Function" in ast.unparse(base) for base in node.bases)
    ]
    backwards = [(node, each) for node in functions for each in node.body if getattr(each, "name", "") == "backward"]
    wanted = ["staticmethod", "once_differentiable"]
    return [node.name for node, each in backwards if [ast.unparse(one) for one in each.decorator_list] != wanted]


def test_every_backward_of_the_package_says_so() -> None:
    assert sum("autograd.Function" in ast.unparse(module.tree) for module in modules()) >= 3
    assert [name for module in modules() for name in undecorated(module.tree)] == []
