"""`torch.compile` of a caller breaks its graph at each function and gives the same numbers; `fullgraph` is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

from compact_logits import linear_log_probs, linear_topk_kl, log_probs, topk_kl

HIDDEN, WEIGHT, IDS, TEACHER = (
    torch.randn(5, 4),
    torch.randn(11, 4),
    torch.arange(10).view(5, 2),
    torch.full((5, 2), -1.5),
)

CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear_log_probs": lambda h, w: linear_log_probs(h, w, IDS[:, 0], entropy="loss").entropy,
    "log_probs": lambda h, w: log_probs(h @ w.T, IDS[:, 0]).log_probs,
    "linear_topk_kl": lambda h, w: linear_topk_kl(h, w, TEACHER, IDS).loss,
    "topk_kl": lambda h, w: topk_kl(h @ w.T, TEACHER, IDS, tail=True).loss,
}

each_call = pytest.mark.parametrize("name", CALLS)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def step(name: str, hidden: Tensor, weight: Tensor) -> Tensor:
    return (CALLS[name](hidden * 2, weight) * 3).sum()


@each_call
def test_a_compiled_caller_gives_the_same_numbers_and_gradients(name: str) -> None:
    found = []
    for function in (step, torch.compile(step, backend="aot_eager")):
        leaves = [each.clone().requires_grad_() for each in (HIDDEN, WEIGHT)]
        loss = function(name, *leaves)
        loss.backward()
        found.append([loss.detach(), *[each.grad for each in leaves]])
    assert sum(counters["graph_break"].values()) >= 1
    for compiled, eager in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)


@each_call
def test_a_whole_graph_is_refused_by_torchs_own_error(name: str) -> None:
    with pytest.raises(Unsupported, match="torch.compiler.disable"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(name, HIDDEN, WEIGHT)
