"""What a refused call costs, and what a forward that runs twice comes to."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.integrations.slime.recipe import refusals
from compact_logits.megatron import attach
from tests.support.allocation import AllocationTracker
from tests.support.collectives import count_collectives
from tests.support.gpt_paths import VOCAB, Cut, micro_batch
from tests.support.marked_gpt import call, kept_scalars, marked, objective
from tests.support.ranks import RankPool

WIDE = VOCAB + 8  # as no other tensor of the model is


def test_case_1_15_and_1_14_a_fallback_makes_no_tensor_of_its_own(rank_pool: RankPool) -> None:
    rank_pool.run(1, tensors_of_a_fallback)


def wide_tensors(model: Any, loss_mask: Tensor | None) -> Counter[tuple[int, ...]]:
    with AllocationTracker() as tracker, torch.no_grad():
        call(model, micro_batch(0, Cut(1), "holes"), loss_mask)
    return Counter(each.shape for each in tracker.records if each.shape and each.shape[-1] == WIDE)


def tensors_of_a_fallback(rank: int, world: int) -> None:
    """As many tensors as wide as the vocabulary as without us: no copy of the logits, no fused cross entropy."""
    micro = micro_batch(0, Cut(1), "holes")
    with cpu_megatron(rank, world, tp=1):
        plain, ours = (build_gpt(tp=1, vocab=WIDE, layers=1) for _ in range(2))
        attach(ours)
        hooked = ours.output_layer.register_forward_hook(lambda *_: None)
        loss_mask, request = marked(micro)
        without, refused = wide_tensors(plain, None), wide_tensors(ours, loss_mask)
        assert request.outcome is not None and request.outcome.path == "full"
        assert refused == without and any(56 in shape for shape in without)
        hooked.remove()
        assert not any(56 in shape for shape in wide_tensors(ours, marked(micro)[0]))


@pytest.mark.parametrize("tp", [1, 2])
def test_case_12_5_a_forward_that_is_run_again_asks_the_same(rank_pool: RankPool, tp: int) -> None:
    rank_pool.run(tp, run_again, Cut(tp))


def run_again(rank: int, world: int, cut: Cut) -> None:
    micro = micro_batch(rank, cut, "holes")
    with cpu_megatron(rank, world, tp=cut.tp):
        found = []
        for again in (False, True):
            model = build_gpt(tp=cut.tp, vocab=VOCAB, layers=1)
            attach(model)
            loss_mask, request = marked(micro, entropy="loss", chunk_bytes=3000)
            before = loss_mask.clone()
            calls = []

            def forward(anchor: Tensor, model: Any = model, mask: Tensor = loss_mask, calls: Any = calls) -> Tensor:
                with count_collectives() as counts:
                    output = call(model, micro, mask) + 0 * anchor
                calls.append(dict(counts))
                return output

            anchor = torch.zeros((), requires_grad=True)
            output = checkpoint(forward, anchor, use_reentrant=True) if again else forward(anchor)
            objective(output, micro, request).backward()
            assert len(calls) == 1 + again and all(each == calls[0] for each in calls)
            assert torch.equal(loss_mask, before) and request.compact
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            found.append((kept_scalars(output, micro, request).detach(), gradients))
        assert torch.equal(found[0][0], found[1][0])
        assert all(torch.equal(found[1][1][name], gradient) for name, gradient in found[0][1].items())


def test_case_5_4_label_smoothing_is_refused() -> None:
    (refusal,) = refusals(Namespace(loss_type="sft_loss", label_smoothing=0.1))
    assert str(refusal) == "--label-smoothing: label smoothing reads every column of the logits"
    assert refusals(Namespace(loss_type="sft_loss", label_smoothing=0.0)) == []
