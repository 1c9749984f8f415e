"""Between a model's first layer and its head the host never waits for the device, but for the head's first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.megatron import attach, output_layer
from compact_logits.scorers.top_p import TopPMask
from tests.support.device_waits import find_waits
from tests.support.gpt_paths import VOCAB, Cut, micro_batch
from tests.support.marked_gpt import marked
from tests.support.ranks import RankPool

ASKS: dict[str, dict[str, Any]] = {
    "log-probs": {},
    "entropy": {"entropy": "loss", "temperature": 0.7, "sum_p2": True},
    "several slices": {"entropy": "metric", "chunk_bytes": 1},
    "padding": {"vocab_size": VOCAB + 5},
    "top-p": {"top_p": True, "entropy": "loss"},
}

scatter = output_layer.scatter


def waiting(values: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    return scatter(values, indices, num_rows + int(values.sum() > 1e9))


def masking(values: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    return scatter(values[values[:, 0] <= 0], indices, num_rows)


def copying(values: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    return scatter(values, indices.cpu(), num_rows)


def waits(rank: int, world: int, cut: Cut, ask: str, scatter: Callable[..., Tensor]) -> list[str]:
    """Those of the second call of a model; the first compares what the ranks' heads are like."""
    micro, asked = micro_batch(rank, cut, "holes"), dict(ASKS[ask])
    kept = micro.selection.kept
    if asked.pop("top_p", False):
        ids, rows = torch.arange(3).repeat(kept), torch.arange(kept).repeat_interleave(3)
        asked["top_p"] = TopPMask(ids, rows, torch.ones(kept, dtype=torch.bool))
    with cpu_megatron(rank, world, tp=cut.tp), mock.patch.object(output_layer, "scatter", scatter):
        model: Any = build_gpt(tp=cut.tp, vocab=4 * VOCAB, layers=1)
        attach(model)
        hidden = torch.randn(56 // cut.tp, 1, 32, requires_grad=True)
        given = dict.fromkeys(
            ("input_ids", "position_ids", "labels", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
        )
        for _ in range(2):
            loss_mask, request = marked(micro, **asked)
            selection = request.selection
            with find_waits(hidden, *model.parameters(), selection.indices, selection.targets, loss_mask) as found:
                model._postprocess(hidden_states=hidden, loss_mask=loss_mask, **given)
            assert request.compact, request.outcome
        return found


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("tp", [1, 2])
def test_no_operation_of_the_head_waits_for_the_device(rank_pool: RankPool, tp: int, ask: str) -> None:
    assert rank_pool.run(tp, waits, Cut(tp), ask, scatter) == [[]] * tp


@pytest.mark.parametrize(
    ("fault", "name"), [(waiting, "_local_scalar_dense"), (masking, "index"), (copying, "cpu")], ids=str
)
def test_one_that_is_put_there_is_found(rank_pool: RankPool, fault: Callable[..., Tensor], name: str) -> None:
    (found,) = rank_pool.run(1, waits, Cut(1), "log-probs", fault)
    assert found and found[0].startswith(name), found
