"""A few micro-batches over a pipeline under Megatron's own schedules, by either path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.megatron import attach
from tests.support.gpt_paths import VOCAB, Cut, micro_batch
from tests.support.marked_gpt import kept_scalars, marked

__all__ = ["MASKS", "Pipeline", "Ran", "run_pipeline"]

MASKS = ("holes", "nothing", "everything", "one row")


@dataclass(frozen=True)
class Pipeline:
    tp: int
    pp: int
    vpp: int | None = None

    @property
    def world(self) -> int:
        return self.tp * self.pp


@dataclass
class Ran:
    """Of this rank: log-prob and entropy of each micro-batch, in training and in a forward-only pass, where it has the
    last stage; gradients by stage and name; shapes of what its stages returned; outcomes of its requests."""

    scalars: list[Tensor]
    gradients: dict[str, Tensor]
    shapes: set[tuple[int, ...]]
    outcomes: list[str | None]


def run_pipeline(rank: int, world: int, pipeline: Pipeline, asks: bool, tied: bool) -> Ran:
    came = Ran([], {}, set(), [])
    with cpu_megatron(rank, world, tp=pipeline.tp, pp=pipeline.pp, vpp=pipeline.vpp):
        stages = [stage_of(pipeline, number, tied) for number in range(pipeline.vpp or 1)]
        if asks:
            for stage in stages:
                attach(stage)
        for forward_only in (False, True):
            with torch.set_grad_enabled(not forward_only):
                scheduled(pipeline, stages, rank % pipeline.tp, asks, forward_only, came)
        for number, stage in enumerate(stages):
            for name, parameter in stage.named_parameters():
                came.gradients[f"stage {number}: {name}"] = parameter.grad
    return came


def stage_of(pipeline: Pipeline, number: int, tied: bool) -> Any:
    return build_gpt(
        tp=pipeline.tp,
        pp=pipeline.pp,
        vocab=VOCAB,
        layers=pipeline.pp * (pipeline.vpp or 1),
        tied=tied,
        vp_stage=number if pipeline.vpp else None,
        virtual_pipeline_model_parallel_size=pipeline.vpp,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable lengths ask for it, also where there are no experts
        batch_p2p_comm=False,
        overlap_p2p_comm=pipeline.vpp is not None,
        deallocate_pipeline_outputs=True,
    )


def scheduled(pipeline: Pipeline, stages: list[Any], tp_rank: int, asks: bool, forward_only: bool, came: Ran) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(numbers: Iterator[int], stage: Any) -> tuple[Tensor, Any]:
        micro = micro_batch(tp_rank, Cut(pipeline.tp), MASKS[next(numbers)])
        loss_mask, request = (
            marked(micro, entropy="metric" if forward_only else "loss", chunk_bytes=3000)
            if asks
            else (micro.loss_mask, None)
        )
        output = stage(micro.tokens, None, None, packed_seq_params=micro.packed_seq_params, loss_mask=loss_mask)
        came.shapes.add(tuple(output.shape))
        if request is not None:
            came.outcomes.append(None if request.outcome is None else request.outcome.path)

        def loss(given: Tensor) -> tuple[Tensor, ...]:
            if request is not None:
                assert request.answered_by(given) and given._base is None
                assert given.untyped_storage().nbytes() == given.nbytes, "not its own storage"
            scalars = kept_scalars(given, micro, request)
            came.scalars.append(scalars.detach().clone())
            if forward_only:
                return torch.empty(0), {}
            weights = micro.weights[micro.selection.indices]
            total = (scalars * weights).sum() + 0 * given.sum()
            return total, torch.tensor(1), {"loss": total.detach()}

        return output, loss

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(range(len(MASKS))) for _ in stages] if pipeline.vpp else iter(range(len(MASKS))),
        model=stages if pipeline.vpp else stages[0],
        num_microbatches=len(MASKS),
        seq_length=56,
        micro_batch_size=1,
        forward_only=forward_only,
    )
