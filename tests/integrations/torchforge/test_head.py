"""The head entered through its module: what FSDP2 and tensor parallelism hooked onto it runs, or it is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import parametrize

from compact_logits.errors import InputError
from compact_logits.integrations.torchforge import compute_logprobs_from_hidden
from tests.support.meshes import mesh_of
from tests.support.ranks import RankPool
from tests.support.torchforge_plain import plain_logprobs

VOCAB, HIDDEN = 13, 6


class Model(nn.Module):
    """A body and a head, whose forward ends in log-probs: from logits, or without them."""

    def __init__(self, compact: bool) -> None:
        super().__init__()
        self.body = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCAB)
        self.compact = compact

    def forward(self, rows: Tensor, ids: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.body(rows)))
        if self.compact:
            return compute_logprobs_from_hidden(hidden, self.output, ids, 0.7)
        logits = self.output(hidden)
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return plain_logprobs(logits, ids, 0.7)


def models() -> tuple[Model, Model]:
    torch.manual_seed(0)
    full = Model(compact=False)
    compact = copy.deepcopy(full)
    compact.compact = True
    return full, compact


def batch(dp_rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dp_rank)
    ids = torch.randint(0, VOCAB, (2, 3), generator=generator)
    return torch.randn(2, 5, HIDDEN, generator=generator), ids, torch.randn(2, 3, generator=generator)


def parallelized(model: Model, tp: bool, fsdp: str, output: ColwiseParallel | None = None) -> Model:
    mesh = mesh_of(1, 2) if tp and not fsdp else mesh_of(2, 2) if tp else mesh_of(2, 1)
    if tp:
        colwise = output or ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model.output, mesh["tp"], colwise)
    if fsdp == "head":
        fully_shard(model.output, mesh=mesh["dp"])
    if fsdp == "norm and head":
        fully_shard([model.norm, model.output], mesh=mesh["dp"])
    if fsdp:
        fully_shard(model, mesh=mesh["dp"])
    return model


def step(model: Model, dp_rank: int) -> dict[str, Tensor]:
    rows, ids, upstream = batch(dp_rank)
    values = model(rows, ids)
    assert type(values) is Tensor and values.dtype == torch.float32
    values.backward(upstream)
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    return {"values": values.detach(), **whole}


def same_as_full(rank: int, world: int, tp: bool, fsdp: str) -> None:
    full, compact = (parallelized(model, tp, fsdp) for model in models())
    dp_rank = rank // 2 if tp and fsdp else 0 if tp else rank
    for _ in range(2):  # the second time FSDP2 gathers anew
        expected, ours = step(full, dp_rank), step(compact, dp_rank)
        assert expected.keys() == ours.keys()
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=1e-5, msg=name)
    with torch.no_grad():
        rows, ids, _ = batch(dp_rank)
        torch.testing.assert_close(compact(rows, ids), full(rows, ids), atol=1e-5, rtol=0)
    assert "forward" not in vars(compact.output)


@pytest.mark.parametrize(
    ("world", "tp", "fsdp"),
    [
        (2, False, "head"),
        (2, False, "norm and head"),
        (2, True, ""),
        (4, True, "head"),
        (4, True, "norm and head"),
    ],
)
def test_a_wrapped_head_gives_the_full_path(rank_pool: RankPool, world: int, tp: bool, fsdp: str) -> None:
    rank_pool.run(world, same_as_full, tp, fsdp)


def same_with_layout(rank: int, world: int, replicated: bool, local: bool) -> None:
    def output() -> ColwiseParallel:
        return ColwiseParallel(output_layouts=Replicate() if replicated else Shard(-1), use_local_output=local)

    full = parallelized(models()[0], True, "")
    compact = parallelized(models()[1], True, "", output())
    expected, ours = step(full, 0), step(compact, 0)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize("local", [True, False])
def test_the_layout_that_the_head_was_given_does_not_matter(rank_pool: RankPool, replicated: bool, local: bool) -> None:
    rank_pool.run(2, same_with_layout, replicated, local)


def refused_of_fsdp(rank: int, world: int) -> list[str]:
    messages = []
    rows, ids, _ = batch(0)
    model = parallelized(models()[1], False, "head")
    with pytest.raises(InputError) as error:
        compute_logprobs_from_hidden(rows, model.output.weight, ids)
    messages.append(str(error.value))
    model = models()[1]
    fully_shard(model.output, mesh=mesh_of(2), mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    with pytest.raises(InputError) as error:
        compute_logprobs_from_hidden(rows, model.output, ids)
    messages.append(str(error.value))
    assert "forward" not in vars(model.output)
    return messages


def test_what_fsdp2_would_make_wrong_is_refused(rank_pool: RankPool) -> None:
    for raw_weight, output_dtype in rank_pool.run(2, refused_of_fsdp):
        assert "sharded by FSDP2 and whole inside its module only; pass the module" in raw_weight
        assert "made (2, 3) of torch.bfloat16 of its result, (2, 3) of torch.float32" in output_dtype
        assert "FSDP2's output_dtype unset" in output_dtype


def with_lora(head: nn.Linear) -> nn.Module:
    class LoraLinear(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) + 1

    head.__class__ = LoraLinear
    return head


def with_hook(head: nn.Linear) -> nn.Module:
    head.register_forward_hook(lambda module, args, logits: logits.tanh())
    return head


def with_parametrization(head: nn.Linear) -> nn.Module:
    parametrize.register_parametrization(head, "weight", nn.Identity())
    return head


def with_compilation(head: nn.Linear) -> nn.Module:
    head.compile()
    return head


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_lora, "the head is a LoraLinear with a forward of its own, needed a plain nn.Linear"),
        (with_hook, "the head has a hook, with_hook.<locals>.<lambda>"),
        (with_parametrization, "the head's weight is parametrized"),
        (with_compilation, "the head is compiled by itself"),
        (lambda head: nn.Sequential(head), "the head is a Sequential with a forward of its own"),
    ],
)
def test_a_head_that_computes_more_is_refused(change: object, text: str) -> None:
    assert callable(change)
    rows, ids, _ = batch(0)
    with pytest.raises(InputError) as error:
        compute_logprobs_from_hidden(rows, change(nn.Linear(HIDDEN, VOCAB)), ids)
    assert text in str(error.value)


def test_a_call_that_raises_leaves_the_head_as_it_was() -> None:
    head, (rows, ids, _) = nn.Linear(HIDDEN, VOCAB), batch(0)
    with pytest.raises(InputError):
        compute_logprobs_from_hidden(rows, head, ids + VOCAB)
    assert torch.equal(head(rows), nn.functional.linear(rows, head.weight, head.bias))
    with pytest.raises(InputError, match="a head that is passed as a module has its own bias"):
        compute_logprobs_from_hidden(rows, head, ids, bias=head.bias)
