"""The GPT model cut into pipeline stages, under Megatron's own schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from compact_logits.cli.cpu_model import build_gpt, cpu_megatron, packed_seq_params
from tests.support.ranks import RankPool

VOCAB, ROWS = 96, 16


def train_step(
    rank: int, world: int, tp: int, pp: int, weights: dict[tuple[int, str], Tensor] | None
) -> tuple[dict[tuple[int, str], Tensor], dict[tuple[int, str], Tensor], list[float]]:
    """Weights and gradients by TP rank and name, counted over all stages, and the losses of two micro-batches."""
    with cpu_megatron(rank, world, tp=tp, pp=pp):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        model = build_gpt(tp=tp, pp=pp, vocab=VOCAB, layers=2)
        tp_rank, stage = rank % tp, rank // tp
        names = {
            name.replace("layers.0.", f"layers.{stage}.") if pp > 1 else name: name
            for name, _ in model.named_parameters()
        }
        parameters = {(tp_rank, whole): model.get_parameter(name) for whole, name in names.items()}
        if weights is not None:
            with torch.no_grad():
                for key, parameter in parameters.items():
                    parameter.copy_(weights[key])
        before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
        random = torch.Generator().manual_seed(2)
        tokens = torch.randint(VOCAB, (2, 1, ROWS), generator=random)
        slope = torch.randn(2, ROWS, VOCAB, generator=random)

        def forward_step(numbers: Iterator[int], stage_model: torch.nn.Module) -> tuple[Tensor, Any]:
            number = next(numbers)
            positions = torch.arange(ROWS)[None]
            out = stage_model(tokens[number], positions, None, packed_seq_params=packed_seq_params([0, 10, ROWS]))
            mine = slope[number].chunk(tp, dim=1)[tp_rank]

            def loss(logits: Tensor) -> tuple[Tensor, dict[str, float]]:
                total = (logits[0] * mine).sum()
                return total, {"loss": total.item()}

            return out, loss

        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(range(2)),
            model=[model],
            num_microbatches=2,
            seq_length=ROWS,
            micro_batch_size=1,
            forward_only=False,
        )
        gradients = {key: parameter.grad for key, parameter in parameters.items()}
        return before, gradients, [report["loss"] for report in reports]


def merged(parts: list[dict[tuple[int, str], Tensor]]) -> dict[tuple[int, str], Tensor]:
    return {key: value for part in parts for key, value in part.items()}


def test_two_stages_equal_one(rank_pool: RankPool) -> None:
    cut = rank_pool.run(4, train_step, 2, 2, None)
    weights = merged([part[0] for part in cut])
    whole = rank_pool.run(2, train_step, 2, 1, weights)
    assert cut[2][2] and cut[0][2] == [], "the last stage has the losses, the first has none"
    for tp_rank in range(2):
        torch.testing.assert_close(cut[2 + tp_rank][2], whole[tp_rank][2], rtol=1e-5, atol=1e-5)
    expected, found = merged([part[1] for part in whole]), merged([part[1] for part in cut])
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient.norm() > 0
        torch.testing.assert_close(
            found[key], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
