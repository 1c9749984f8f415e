"""Combined forward and backward passes: the head runs in a node of a schedule plan, and the loss in another."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.megatron import Request, attach
from compact_logits.megatron.attach import gpt_model_of
from tests.support.gpt_paths import VOCAB, Cut, Micro, micro_batch
from tests.support.marked_gpt import marked, objective
from tests.support.ranks import RankPool
from tests.support.schedule_plan import InFlight, one_stream

MASKS = ("holes", "nothing", "everything")
NOTHING = dict.fromkeys(
    ("input_ids", "position_ids", "labels", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "mtp_in_postprocess")
)


def build(cut: Cut, dtype: torch.dtype) -> Any:
    return gpt_model_of(build_gpt(tp=cut.tp, vocab=VOCAB, layers=1, dtype=dtype))


def hidden_of(number: int, cut: Cut, dtype: torch.dtype) -> Tensor:
    """The same for every rank as long as it is whole; of each rank its part."""
    whole = torch.randn(56, 1, 32, generator=torch.Generator().manual_seed(number))
    rank = torch.distributed.get_rank()
    return whole.chunk(cut.tp)[rank % cut.tp].to(dtype).clone().requires_grad_()


def loss_of(micro: Micro, request: Request | None) -> Any:
    def loss(given: Tensor) -> Tensor:
        assert request is None or request.answered_by(given)
        return objective(given, micro, request)

    return loss


def planned(model: Any, cut: Cut, dtype: torch.dtype, asks: bool) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Losses and gradients of the hidden states of each micro-batch, and the weight's; all forwards come first."""
    model.zero_grad(set_to_none=True)
    flights, losses = [], []
    for number, mask in enumerate(MASKS):
        micro = micro_batch(torch.distributed.get_rank(), cut, mask)
        loss_mask, request = marked(micro, entropy="loss", chunk_bytes=3000) if asks else (micro.loss_mask, None)
        hidden = hidden_of(number, cut, dtype)
        flights.append(InFlight.forward(model, micro, loss_mask, hidden, loss_of(micro, request)))
        losses.append(flights[-1].total.detach())
        assert request is None or request.compact, request.outcome
    d_hiddens = [flight.backward() for flight in flights]
    return losses, d_hiddens, model.output_layer.weight.grad.clone()


def direct(model: Any, cut: Cut, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The same through one graph, without a plan."""
    model.zero_grad(set_to_none=True)
    losses, hiddens = [], []
    for number, mask in enumerate(MASKS):
        micro = micro_batch(torch.distributed.get_rank(), cut, mask)
        loss_mask, request = marked(micro, entropy="loss", chunk_bytes=3000)
        hiddens.append(hidden_of(number, cut, dtype))
        output = model._postprocess(hidden_states=hiddens[-1], loss_mask=loss_mask, **NOTHING)
        losses.append(objective(output, micro, request))
    for each in losses:
        each.backward()
    return losses, [hidden.grad for hidden in hiddens], model.output_layer.weight.grad.clone()


def compared(rank: int, world: int, cut: Cut) -> None:
    with cpu_megatron(rank, world, tp=cut.tp), one_stream():
        for dtype in (torch.float32, torch.bfloat16):
            model = build(cut, dtype)
            full = planned(model, cut, dtype, asks=False)
            attach(model)
            ours, plain = planned(model, cut, dtype, asks=True), direct(model, cut, dtype)
            assert all(each.dtype == torch.float32 for each in ours[0])
            assert all(torch.equal(*each) for each in zip(ours[0], plain[0], strict=True))
            assert all(torch.equal(*each) for each in zip(ours[1], plain[1], strict=True))
            assert torch.equal(ours[2], plain[2])
            limit = 1e-4 if dtype == torch.float32 else 2e-2
            for found, expected in zip([*ours[1], ours[2]], [*full[1], full[2]], strict=True):
                assert (found - expected).norm() <= limit * expected.norm()
            assert not ours[1][1].any() and ours[2].any()


@pytest.mark.parametrize("tp", [1, 2])
def test_case_8_2_through_a_plan_as_through_one_graph(rank_pool: RankPool, tp: int) -> None:
    rank_pool.run(tp, compared, Cut(tp))


def test_case_8_2_what_does_not_pass_between_the_nodes(rank_pool: RankPool) -> None:
    rank_pool.run(1, lost)


def lost(rank: int, world: int) -> None:
    """Why the request travels on the loss mask: the output's attributes are lost, and a dict is no output."""
    cut, micro, seen = Cut(1), micro_batch(0, Cut(1), "holes"), []

    def loss(given: Tensor) -> Tensor:
        seen.append(hasattr(given, "tag"))
        return given.sum()

    with cpu_megatron(rank, world, tp=1), one_stream():
        model = build(cut, torch.float32)
        hidden = hidden_of(0, cut, torch.float32)
        InFlight.forward(model, micro, micro.loss_mask, hidden, loss, tag="tag")
        assert seen == [False]
        model._postprocess = MethodType(lambda self, hidden_states, **_: {"log_probs": hidden_states}, model)
        with pytest.raises(AttributeError):
            InFlight.forward(model, micro, micro.loss_mask, hidden, loss)
