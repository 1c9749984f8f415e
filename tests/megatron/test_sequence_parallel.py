"""Rows gathered before the head under sequence parallelism: their gradient is reduced once, not once by each of two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compact_logits import reference
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.megatron import attach
from compact_logits.megatron.attach import gpt_model_of
from tests.support.gpt_paths import VOCAB, Cut, Micro, micro_batch
from tests.support.marked_gpt import marked, objective
from tests.support.ranks import RankPool

NOTHING = dict.fromkeys(("input_ids", "position_ids", "labels", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"))
NOTHING |= {"mtp_in_postprocess": None}


def hidden_of(rank: int) -> Tensor:  # (rows / 2, 1, hidden), this rank's part
    whole = torch.randn(56, 1, 32, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return whole.chunk(2)[rank].clone().requires_grad_()


def gathered_first(head: torch.nn.Module, hidden: Tensor, micro: Micro, *, reduces: bool) -> Tensor:
    """The loss of the kept rows' logits, from rows gathered here and a head that is told so by switching its flag."""
    from megatron.core.tensor_parallel import mappings

    rows = mappings.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=reduces)
    kept = micro.selection.indices
    head.sequence_parallel = False
    try:
        logits, _ = head(rows[kept])
    finally:
        head.sequence_parallel = True
    logits = mappings.gather_from_tensor_model_parallel_region(logits)[:, 0]
    scalars = torch.stack(reference.log_probs(logits, micro.selection.targets), dim=1)
    return (scalars * micro.weights[kept].to(scalars.dtype)).sum()


def gradients(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of this rank's hidden states: on the full path, on ours, and gathered first with and without a reduction."""
    micro = micro_batch(rank, Cut(2), "holes")
    found = []
    with cpu_megatron(rank, world, tp=2):
        model = gpt_model_of(build_gpt(tp=2, vocab=VOCAB, layers=1, dtype=torch.float64))
        assert model.output_layer.sequence_parallel
        for asks in (False, True):
            if asks:
                attach(model)
            loss_mask, request = marked(micro, entropy="loss", chunk_bytes=3000) if asks else (micro.loss_mask, None)
            hidden = hidden_of(rank)
            objective(
                model._postprocess(hidden_states=hidden, loss_mask=loss_mask, **NOTHING), micro, request
            ).backward()
            found.append(hidden.grad)
        for reduces in (True, False):
            hidden = hidden_of(rank)
            gathered_first(model.output_layer, hidden, micro, reduces=reduces).backward()
            found.append(hidden.grad)
    return tuple(found)


def test_case_7_8_the_hidden_gradient_is_reduced_once(rank_pool: RankPool) -> None:
    for full, ours, twice, once in rank_pool.run(2, gradients):
        assert full.norm() > 0.1
        torch.testing.assert_close(ours, full, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(once, full)
        # The naive way, with nothing to show for it but a number twice too large.
        assert (twice.norm() / full.norm()).item() == pytest.approx(2.0, abs=1e-6)
