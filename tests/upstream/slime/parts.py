"""What stands around the model in slime's actor: gradient buckets, optimizer, scheduler, weights of other policies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits.cli.cpu_model import build_gpt
from tests.upstream.slime.recipes import Layout, Recipe
from tests.upstream.slime.rollout import VOCAB

__all__ = ["Chunk", "KeepingOptimizer", "Policies", "Scheduler", "build_chunks"]

# Seed of the weights that the actor's are moved towards, and how far.
_SHIFTS = {"ref": (1, 0.04), "old_actor": (2, 0.02), "teacher": (3, 0.05), "rollout": (4, 0.02)}


class Chunk(torch.nn.Module):
    """A model chunk where Megatron's DDP would be: the same sums of gradients, at once instead of in buckets."""

    ddp_config = SimpleNamespace(use_megatron_fsdp=False)

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.config = module.config
        self.role = "actor"

    def forward(self, **kwargs: Any) -> Any:
        return self.module(**kwargs)

    def zero_grad_buffer(self) -> None:
        self.zero_grad(set_to_none=True)

    def finish_grad_sync(self, **_: Any) -> None:
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for name, parameter in self.named_parameters():
            # DDP waits for every parameter's gradient, on every rank, for ever.
            assert parameter.grad is not None or not parameter.requires_grad, f"{name} has no gradient on this rank"
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                if not self.config.calculate_per_token_loss:
                    parameter.grad /= group.size()

    def scale_gradients(self, factor: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad *= factor


class KeepingOptimizer:
    """Keeps the gradients of every step, and changes no weight."""

    scale_loss = None
    param_groups: tuple[()] = ()

    def __init__(self, chunks: list[Chunk]) -> None:
        self._chunks = chunks
        self.steps: list[dict[str, Tensor]] = []

    def step(self) -> tuple[bool, float, int]:
        kept = {
            f"{number}: {name.replace('module.', '')}": parameter.grad.clone()
            for number, chunk in enumerate(self._chunks)
            for name, parameter in chunk.named_parameters()
            if parameter.grad is not None
        }
        self.steps.append(kept)
        return True, float(sum(gradient.double().square().sum() for gradient in kept.values()) ** 0.5), 0

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad(set_to_none=True)


class Scheduler:
    def step(self, increment: int) -> None: ...


class Policies:
    """The actor's weights and those of the policies near it, by slime's names; slime switches between them."""

    def __init__(self, recipe: Recipe, layout: Layout, chunks: list[Chunk], tags: set[str]) -> None:
        self._chunks = chunks
        actor = [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]
        self._weights = {"actor": actor}
        for tag in tags:
            seed, share = _SHIFTS[tag]
            others = [parameter for chunk in build_chunks(recipe, layout, seed) for parameter in chunk.parameters()]
            self._weights[tag] = [
                torch.lerp(ours, other.detach(), share) for ours, other in zip(actor, others, strict=True)
            ]

    @property
    def backup_tags(self) -> list[str]:
        return list(self._weights)

    @torch.no_grad()
    def restore(self, tag: str) -> None:
        parameters = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        for parameter, weight in zip(parameters, self._weights[tag], strict=True):
            parameter.copy_(weight)

    def backup(self, tag: str) -> None:
        """slime takes the actor's weights over after training. Here training has changed none."""


def build_chunks(recipe: Recipe, layout: Layout, seed: int = 0) -> list[Chunk]:
    """The model chunks of this rank: one, or one for each virtual pipeline stage."""
    stages = range(layout.vpp) if layout.vpp else (None,)
    pipeline: dict[str, Any] = {}
    if layout.pp > 1:
        pipeline = {
            "layers": layout.pp * (layout.vpp or 1),
            "virtual_pipeline_model_parallel_size": layout.vpp,
            "variable_seq_lengths": True,
            "moe_token_dispatcher_type": "alltoall",  # variable lengths ask for it, also where there are no experts
            "batch_p2p_comm": False,
            "overlap_p2p_comm": layout.vpp is not None,  # else two stages would mix up what they send each other
            "deallocate_pipeline_outputs": True,
        }
    return [
        Chunk(
            build_gpt(
                tp=layout.tp,
                cp=layout.cp,
                pp=layout.pp,
                vocab=VOCAB,
                dtype=layout.dtype,
                contiguous_cp=layout.allgather_cp,
                seed=seed,
                vp_stage=stage,
                **pipeline,
                **recipe.model,
            )
        )
        for stage in stages
    ]
