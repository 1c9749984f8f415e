"""Whether all ranks of a group ask the same, found out before any message whose size they could disagree on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compact_logits.collectives import all_gather
from compact_logits.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["check_agreement", "digest"]

# SplitMix64's increment and first multiplier, as signed numbers: int64 products wrap around.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER = 0xBF58476D1CE4E5B9 - 2**64


def digest(
    values: Tensor,  # (...), numbers of any dtype
) -> Tensor:  # () int64, on the device of `values`
    """A number that stands for the values and their order. No synchronisation."""
    flat = values.detach().flatten()
    bits = flat.double().view(torch.int64) if flat.is_floating_point() else flat.to(torch.int64)
    mixed = bits + torch.arange(1, flat.shape[0] + 1, device=flat.device) * _INCREMENT
    mixed = (mixed ^ (mixed >> 30)) * _MULTIPLIER
    return (mixed ^ (mixed >> 27)).sum()


def check_agreement(
    group: ProcessGroup,
    facts: Mapping[str, int | Tensor],  # what must be the same; a tensor is a digest, () int64
    device: torch.device,
) -> None:
    """Raise the same `InputError` on every rank of `group` if a fact is not the same on all of them.

    Without it, ranks with other row counts exchange messages of other sizes: gloo then ends the process of the rank
    that expects less, NCCL waits or mixes up memory; and ranks with other targets return numbers that no rank can tell
    are wrong. Every rank must pass the same names.

    Collectives: one all-gather of 8 bytes a fact and rank, whatever the facts are; its result is waited for on the
    host. A rank that does not come makes the others raise the error of the back end when the group's timeout is over.
    """
    counts = {name: fact for name, fact in facts.items() if not isinstance(fact, Tensor)}
    digests = {name: fact for name, fact in facts.items() if isinstance(fact, Tensor)}
    sent = torch.tensor(list(counts.values()), dtype=torch.int64).to(device, non_blocking=True)
    sent = torch.cat([sent, *(fact.reshape(1).to(device, non_blocking=True) for fact in digests.values())])
    received = sent.new_empty(group.size() * sent.shape[0])
    all_gather(received, sent, group)
    of_ranks = received.view(group.size(), -1).tolist()
    for name, *values in zip([*counts, *digests], *of_ranks, strict=True):
        if len(set(values)) > 1:
            raise InputError(
                f"the ranks that share this vocabulary were asked different things: {_told(name, values, counts)}; "
                f"give all of them the same loss mask, tokens, temperature and settings"
            )


def _told(name: str, values: list[int], counts: Mapping[str, object]) -> str:
    if name in counts:
        return f"{name} is " + ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
    other = next(rank for rank, value in enumerate(values) if value != values[0])
    return f"{name} of rank {other} is not that of rank 0"
