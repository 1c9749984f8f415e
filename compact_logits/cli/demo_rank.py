"""The demo's work on one rank: the same training twice from the same start, and the comparison of the two."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compact_logits.cli.comparison import BOUNDS, Comparison, compare
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.cli.microbatch import pack
from compact_logits.cli.rollouts import Rollout
from compact_logits.cli.training import CompactPath, FullPath, Settings, Training, train

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Job", "RankOutcome", "compare_paths", "run_rank"]


@dataclass(frozen=True)
class Job:
    """What to train, and on what: `batches` are micro-batches of rollouts."""

    batches: list[list[Rollout]]
    vocab: int
    dtype: torch.dtype
    settings: Settings
    seed: int = 0
    hidden: int = 128
    layers: int = 2


@dataclass(frozen=True)
class RankOutcome:
    full: Training
    compact: Training
    comparison: Comparison
    rows: int
    kept: int
    megatron: str


def run_rank(rank: int, world: int, init_method: str, tick: Callable[[], None], job: Job) -> RankOutcome:
    """Train over the full, then over the compact path. The returned trainings hold no gradients any more."""
    torch.set_num_threads(1)
    with cpu_megatron(rank, world, tp=world, init_method=init_method):
        import megatron.core
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        return compare_paths(world, group, tick, job, str(megatron.core.__version__))


def compare_paths(world: int, group: ProcessGroup, tick: Callable[[], None], job: Job, megatron: str) -> RankOutcome:
    """The same, within Megatron's parallel state."""
    draw = random.Random(job.seed)
    batches = [pack(rollouts, [draw.gauss(0.0, 1.0) for _ in rollouts], multiple=8 * world) for rollouts in job.batches]

    def trained(path: type[Any]) -> Training:
        model = build_gpt(
            tp=world,
            vocab=job.vocab,
            hidden=job.hidden,
            layers=job.layers,
            dtype=job.dtype,
            seed=job.seed,
            max_length=max(batch.tokens.shape[1] for batch in batches),
        )
        return train(path, model, group, batches, job.settings, job.vocab // world, tick)

    full, compact = trained(FullPath), trained(CompactPath)
    comparison = compare(full, compact, gradient_steps=BOUNDS[job.dtype].gradient_steps)
    full.gradients, compact.gradients = [], []
    return RankOutcome(
        full,
        compact,
        comparison,
        rows=sum(batch.tokens.shape[1] for batch in batches),
        kept=sum(batch.selection.kept for batch in batches),
        megatron=megatron,
    )
