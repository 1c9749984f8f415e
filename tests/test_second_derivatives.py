"""Who differentiates a gradient of ours again is told that there is no such thing; the first derivative is as ever."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from compact_logits import first_order, linear_log_probs, linear_topk_kl, log_probs, topk_kl
from compact_logits.balance import Transfers, return_rows
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.errors import InputError
from compact_logits.exchange import SequenceSharded
from compact_logits.integrations.torchforge import compute_logprobs, compute_logprobs_from_hidden
from compact_logits.megatron import Request
from compact_logits.megatron.output_layer import armed
from compact_logits.projection import score_hidden
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from tests.support.collectives import count_collectives
from tests.support.gpt_paths import VOCAB, Cut, micro_batch
from tests.support.meshes import cut, mesh_of
from tests.support.ranks import RankPool
from tests.support.sharded_head import shard_of
from tests.support.source_tree import modules

ROWS, HIDDEN, COLUMNS = 5, 4, 11
TOLD = r"a gradient of \(.*\), which compact_logits has computed under create_graph=True, was differentiated again"

Call = Callable[..., Tensor]


def given(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).requires_grad_()


def pieces() -> tuple[Tensor, Tensor, Tensor]:
    return given(ROWS, HIDDEN), given(COLUMNS, HIDDEN), given(COLUMNS)


IDS = torch.arange(ROWS * 2).view(ROWS, 2)
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


def refused(differentiate: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=TOLD) as caught:
        differentiate()
    assert str(caught.value).endswith(
        "and it offers no second derivatives; use the gradient's detach() where it is a mere number, or compute these "
        "rows in plain torch, as compact_logits.reference does"
    )


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


def over_ranks(rank: int, world: int) -> dict[str, Any]:
    """Collectives of a first derivative, without and with a graph, and what a second one says."""
    cuts = [0, 3, COLUMNS]
    shard = shard_of(rank, cuts)
    weight = given(COLUMNS, HIDDEN).detach()[cuts[rank] : cuts[rank + 1]]  # frozen: nothing but the rows leads on
    counts = (2, 3)
    rows = given(ROWS, HIDDEN).detach().split(counts)[rank].clone().requires_grad_()
    scorer = LogProbScorer(IDS[:, 0], shard, 1.0, "none")
    told: dict[str, Any] = {}

    def scored() -> Tensor:
        exchange = SequenceSharded(dist.group.WORLD, counts)
        return score_hidden(rows, weight, None, scorer, exchange=exchange, group=shard.group)[0].sum()

    for graph in (False, True):
        values = scored()
        with count_collectives() as counted:
            (d_rows,) = torch.autograd.grad(values, rows, create_graph=graph)
        told[f"calls {graph}"] = dict(counted)
        told[f"gradient {graph}"] = d_rows.detach()
    refused(lambda: torch.autograd.grad(d_rows.sum(), rows, allow_unused=True))
    transfers = [Transfers.even(counts)]
    held = sum(transfers[0].received(rank))
    mine = given(held).detach().requires_grad_()
    back = return_rows(mine, dist.group.WORLD, transfers)
    (d_mine,) = torch.autograd.grad(back.exp().sum(), mine, create_graph=True)
    torch.testing.assert_close(d_mine.detach(), mine.detach().exp())
    refused(lambda: torch.autograd.grad(d_mine.sum(), mine))
    return told


def test_ranks_make_the_same_calls_with_and_without_a_graph(rank_pool: RankPool) -> None:
    for told in rank_pool.run(2, over_ranks):
        assert told["calls False"] == told["calls True"] == {"reduce_scatter_tensor": 1}
        assert torch.equal(told["gradient False"], told["gradient True"])


def on_a_mesh(rank: int, world: int) -> bool:
    mesh = mesh_of(2)
    ids = IDS[None, : ROWS - 1, 0]
    logits = cut(given(1, ROWS, COLUMNS).detach(), mesh, [Shard(2)], grad=True)
    (torchs_own,) = torch.autograd.grad(logits.to_local().exp().sum(), logits, create_graph=True)
    if torchs_own.grad_fn is None:
        return False
    plain = torch.autograd.grad(compute_logprobs(logits, ids).sum(), logits)[0]
    (d_logits,) = torch.autograd.grad(compute_logprobs(logits, ids).sum(), logits, create_graph=True)
    assert torch.equal(d_logits.detach().full_tensor(), plain.full_tensor())
    refused(lambda: d_logits.to_local().sum().backward())
    hidden = cut(given(1, ROWS, HIDDEN).detach(), mesh, [Replicate()], grad=True)
    weight = cut(given(COLUMNS, HIDDEN).detach(), mesh, [Shard(0)], grad=True)
    gradients = torch.autograd.grad(
        compute_logprobs_from_hidden(hidden, weight, ids).sum(), (hidden, weight), create_graph=True
    )
    refused(lambda: gradients[0].to_local().sum().backward())
    refused(lambda: gradients[1].to_local().sum().backward())
    head = nn.Linear(HIDDEN, COLUMNS)
    local = given(1, ROWS, HIDDEN)
    (of_module,) = torch.autograd.grad(
        compute_logprobs_from_hidden(local, head, ids).sum(), head.weight, create_graph=True
    )
    refused(lambda: of_module.sum().backward())
    return True


def test_gradients_of_dtensors_are_refused_too(rank_pool: RankPool) -> None:
    if rank_pool.run(2, on_a_mesh) == [False, False]:
        pytest.skip("this torch cuts the graph of every DTensor's gradient at to_local")


def through_megatron(rank: int, world: int, sequence_parallel: bool) -> None:
    with cpu_megatron(rank, world, tp=2):
        model = build_gpt(tp=2, vocab=VOCAB, layers=1, sequence_parallel=sequence_parallel)
        micro = micro_batch(rank, Cut(2), "holes")
        shape = (micro.layout.num_rows // (2 if sequence_parallel else 1), 1, 32)
        for frozen in (True, False):
            model.output_layer.weight.requires_grad_(not frozen)
            hidden = given(*shape)
            gradients = []
            for graph in (False, True):
                with armed(model.output_layer, Request(micro.selection, entropy="loss", chunk_bytes=1)):
                    answer, _ = model.output_layer(hidden)
                gradients.append(torch.autograd.grad(answer.sum(), hidden, create_graph=graph)[0])
            assert torch.equal(gradients[0], gradients[1].detach())
            refused(lambda got=gradients[1], by=hidden: torch.autograd.grad(got.sum(), by, allow_unused=True))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatrons_head_refuses_it_too(rank_pool: RankPool, sequence_parallel: bool) -> None:
    rank_pool.run(2, through_megatron, sequence_parallel)


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
