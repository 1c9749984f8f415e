"""Pipeline parallelism under Megatron's own schedules: only the last stage has a head, and its output is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.megatron import attach
from tests.support.gpt_paths import VOCAB, Cut, micro_batch
from tests.support.marked_gpt import call, marked
from tests.support.pipelined import MASKS, Pipeline, Ran, run_pipeline
from tests.support.ranks import RankPool


def both_paths(rank: int, world: int, pipeline: Pipeline, tied: bool) -> tuple[Ran, Ran]:
    return run_pipeline(rank, world, pipeline, False, tied), run_pipeline(rank, world, pipeline, True, tied)


@pytest.mark.parametrize(
    ("pipeline", "tied"),
    [(Pipeline(1, 2), True), (Pipeline(1, 2, vpp=2), False), (Pipeline(2, 2), False)],
    ids=["1F1B, tied", "interleaved", "1F1B, TP"],
)
def test_case_8_10_every_stage_is_as_on_the_full_path(rank_pool: RankPool, pipeline: Pipeline, tied: bool) -> None:
    ranks = rank_pool.run(pipeline.world, both_paths, pipeline, tied)
    for rank, (full, ours) in enumerate(ranks):
        last = rank // pipeline.tp == pipeline.pp - 1
        assert len(ours.scalars) == len(full.scalars) == (2 * len(MASKS) if last else 0)
        for found, expected in zip(ours.scalars, full.scalars, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        for name, expected in full.gradients.items():
            found = ours.gradients[name]
            assert expected.norm() > 0 and (found - expected).norm() <= 1e-4 * expected.norm(), name
        inner = (56 // pipeline.tp, 1, 32)
        stages = pipeline.vpp or 1
        assert ours.shapes == ({(1, 56, 2)} if last else set()) | ({inner} if not last or stages > 1 else set())
        # A stage without a head never answers, and is never told that it should have.
        assert ours.outcomes.count("compact") == (2 * len(MASKS) if last else 0)
        assert ours.outcomes.count(None) == len(ours.outcomes) - ours.outcomes.count("compact")
        assert ours.outcomes.count(None) == 2 * len(MASKS) * (stages - last)


def test_backward_after_the_output_was_freed(rank_pool: RankPool) -> None:
    rank_pool.run(1, freed)


def freed(rank: int, world: int) -> None:
    """As schedules free what a stage has sent on: its data gone, its graph kept."""
    from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor

    micro = micro_batch(0, Cut(1), "holes")
    gradient = torch.randn(1, 56, 2, generator=torch.Generator().manual_seed(4))

    def run(free: bool) -> dict[str, Tensor | None]:
        model: Any = build_gpt(tp=1, vocab=VOCAB, layers=1)
        attach(model)
        output = call(model, micro, marked(micro, entropy="loss", chunk_bytes=3000)[0])
        assert output._base is None and output.is_contiguous()
        if not free:
            output.backward(gradient)
        else:
            deallocate_output_tensor(output, True)
            assert output.numel() == 1
            custom_backward(output, gradient)
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    with cpu_megatron(rank, world, tp=1):
        kept, freed = run(False), run(True)
        for name, expected in kept.items():
            found = freed[name]
            assert expected is not None and found is not None and torch.equal(found, expected), name
