"""The ways from hidden states to torchforge's log-probs that its bench compares, each from one sharded head."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from compact_logits.integrations.torchforge import compute_logprobs, compute_logprobs_from_hidden

__all__ = ["Run", "Way", "gathered_definition", "ways"]

# (hidden, weight, ids) -> log-probs; the DTensors lie on one mesh axis, hidden replicated, the weight by vocabulary.
Run = Callable[[DTensor, DTensor, Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    """One row of the table. `around` stands around forward and backward."""

    name: str
    compiled: bool
    run: Run
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def gathered_definition(
    logits: Tensor,  # (batch, positions, vocab)
    input_ids: Tensor,  # (batch, target positions) int64
    temperature: float = 1.0,
    align: bool = True,
) -> Tensor:  # (batch, target positions), in the dtype of logits but at least fp32
    """What torchforge computes, in its order: the logits before each id, divided in their dtype, widened, and their
    cross entropy. Stands for its function where no checkout is named, and for the truth in fp64."""
    if align:
        logits = logits[:, -input_ids.shape[1] - 1 : -1]
    tempered = logits / temperature
    wide = tempered.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide.reshape(-1, wide.shape[-1]), input_ids.reshape(-1), reduction="none")
    return -losses.reshape(input_ids.shape)


def ways(root: str, temperature: float) -> list[Way]:
    """All of them, torchforge's own function from the checkout at `root`, or its definition where that is empty."""
    theirs = _theirs(root)
    found = [
        Way("ours from logits", False, _from_logits(compute_logprobs, temperature)),
        Way("ours from hidden", False, _from_hidden(temperature)),
    ]
    for compiled in (True, False):
        function = torch.compile(theirs) if compiled else theirs
        found = [
            Way("full_tensor + torchforge's", compiled, _from_logits(function, temperature, gather=True)),
            Way("loss_parallel + torchforge's", compiled, _from_logits(function, temperature), loss_parallel),
            *found,
        ]
    return found


def _from_logits(function: Callable[..., Tensor], temperature: float, *, gather: bool = False) -> Run:
    def run(hidden: DTensor, weight: DTensor, ids: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)
        assert isinstance(logits, DTensor)
        log_probs = function(logits.full_tensor() if gather else logits, ids, temperature)
        return log_probs.to_local() if isinstance(log_probs, DTensor) else log_probs

    return run


def _from_hidden(temperature: float) -> Run:
    def run(hidden: DTensor, weight: DTensor, ids: Tensor) -> Tensor:
        return compute_logprobs_from_hidden(hidden, weight, ids, temperature)

    return run


def _theirs(root: str) -> Callable[..., Tensor]:
    if not root:
        return gathered_definition
    source = str(Path(root) / "src")
    if source not in sys.path:
        sys.path.insert(0, source)
    function: Callable[..., Tensor] = importlib.import_module("forge.util.ops").compute_logprobs
    return function
