"""The numeric functions over a sharded vocabulary, and arguments for them that differ on one rank or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from compact_logits import VocabShard, linear_log_probs, linear_topk_kl, log_probs, topk_kl
from compact_logits.errors import InputError
from compact_logits.integrations.torchforge import compute_logprobs, compute_logprobs_from_hidden
from tests.support.meshes import cut, mesh_of

__all__ = [
    "CALLS",
    "CUTS",
    "DIFFERENT",
    "REMEDY",
    "ROWS",
    "VOCAB",
    "arguments",
    "mesh_arguments",
    "outcome",
    "shard",
]

DIFFERENT = "the ranks that share this vocabulary were asked different things: "
REMEDY = "; give all of them the same loss mask, tokens, temperature and settings"
VOCAB, ROWS, CUTS = 12, 5, [0, 4, 12]


def shard(start: int, stop: int, group: Any = None) -> VocabShard:
    return VocabShard(start, stop, group or dist.group.WORLD)


def arguments(rank: int) -> dict[str, Any]:
    """The same request on every rank, and the rank's own slice of the vocabulary."""
    random = torch.Generator().manual_seed(3)
    columns = slice(CUTS[rank], CUTS[rank + 1])
    return {
        "hidden": torch.randn(ROWS, 4, generator=random).requires_grad_(),
        "weight": torch.randn(VOCAB, 4, generator=random)[columns].clone().requires_grad_(),
        "logits": torch.randn(ROWS, VOCAB, generator=random)[:, columns].clone().requires_grad_(),
        "targets": torch.randint(VOCAB, (ROWS,), generator=random),
        "teacher_log_probs": torch.randn(ROWS, 3, generator=random).log_softmax(dim=1) - 0.1,
        "teacher_ids": torch.rand(ROWS, VOCAB, generator=random).topk(3, dim=1).indices,
        "shard": shard(*CUTS[rank : rank + 2]),
    }


def mesh_arguments() -> dict[str, Any]:
    """The same for torchforge: DTensors over a mesh of all ranks, and plain ids; the ranks compare at every call."""
    random, mesh = torch.Generator().manual_seed(3), mesh_of(dist.get_world_size())
    return {
        "logits": cut(torch.randn(2, ROWS, VOCAB, generator=random), mesh, [Shard(2)], grad=True),
        "hidden": torch.randn(2, ROWS, 4, generator=random).requires_grad_(),
        "lm_head_weight": cut(torch.randn(VOCAB, 4, generator=random), mesh, [Shard(0)], grad=True),
        "input_ids": torch.randint(VOCAB, (2, 3), generator=random),
        "check_ranks": True,
    }


def _call(function: Callable[..., Any], *names: str) -> Callable[[dict[str, Any]], Tensor]:
    """`function` of the tensors that are named here, and of everything else that the arguments hold."""
    tensors = {"hidden", "weight", "logits", "targets", "teacher_log_probs", "teacher_ids", "lm_head_weight"}

    def call(given: dict[str, Any]) -> Tensor:
        out = function(**{name: value for name, value in given.items() if name in names or name not in tensors})
        values: Tensor = out if isinstance(out, Tensor) else out[0]
        return values

    return call


CALLS = {
    "linear_log_probs": _call(linear_log_probs, "hidden", "weight", "targets"),
    "log_probs": _call(log_probs, "logits", "targets"),
    "linear_topk_kl": _call(linear_topk_kl, "hidden", "weight", "teacher_log_probs", "teacher_ids"),
    "topk_kl": _call(topk_kl, "logits", "teacher_log_probs", "teacher_ids"),
    "compute_logprobs": _call(compute_logprobs, "logits"),
    "compute_logprobs_from_hidden": _call(compute_logprobs_from_hidden, "hidden", "lm_head_weight"),
}


def outcome(call: Callable[[dict[str, Any]], Tensor], given: dict[str, Any]) -> str:
    """The kind and the text of the error that the call raises."""
    try:
        call(given)
    except InputError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
