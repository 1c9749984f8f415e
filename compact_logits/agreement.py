"""Whether all ranks of a group ask the same, found out before any message whose size they could disagree on."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compact_logits.collectives import all_gather
from compact_logits.errors import DisagreementError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["check_agreement", "digest", "exchanged", "fingerprint", "refuse_difference"]

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


def fingerprint(*settings: object) -> Tensor:  # () int64, on the host
    """A number that stands for what the settings print."""
    return torch.tensor(zlib.crc32(repr(settings).encode()))


def check_agreement(
    group: ProcessGroup,
    facts: Mapping[str, int | Tensor],  # what must be the same; a tensor is a digest, () int64
    device: torch.device,
) -> None:
    """Raise the same `DisagreementError` on every rank of `group` if a fact is not the same on all of them.

    Without it, ranks with other row counts exchange messages of other sizes: gloo then ends the process of the rank
    that expects less, NCCL waits or mixes up memory; and ranks with other targets return numbers that no rank can tell
    are wrong. Every rank must pass the same names.

    Collectives: as `exchanged`.
    """
    refuse_difference(facts, exchanged(group, list(facts.values()), device))


def exchanged(
    group: ProcessGroup,
    values: Sequence[int | Tensor],  # a tensor is () int64, on any device
    device: torch.device,
) -> list[tuple[int, ...]]:  # of each value, that of every rank
    """Every rank's values, which must be as many on each.

    Collectives: one all-gather of 8 bytes a value and rank, whatever the values are; its result is waited for on the
    host. A rank that does not come makes the others raise the error of the back end when the group's timeout is over.
    """
    sent = _message(values, device)
    received = sent.new_empty(group.size() * sent.shape[0])
    all_gather(received, sent, group)
    return list(zip(*received.view(group.size(), -1).tolist(), strict=True))


def _message(values: Sequence[int | Tensor], device: torch.device) -> Tensor:  # (values,) int64, on `device`
    """What the host knows travels in one copy, what the device knows does not leave it."""
    elsewhere = {place: value for place, value in enumerate(values) if isinstance(value, Tensor) and not value.is_cpu}
    numbers = [0 if place in elsewhere else int(value) for place, value in enumerate(values)]
    sent = torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
    for place, value in elsewhere.items():
        sent[place] = value
    return sent


def refuse_difference(
    facts: Mapping[str, int | Tensor],
    of_ranks: Sequence[tuple[int, ...]],  # of each fact, that of every rank
) -> None:
    """Raise `DisagreementError` for the first fact that is not the same on all ranks."""
    for (name, fact), values in zip(facts.items(), of_ranks, strict=True):
        if len(set(values)) > 1:
            told = _of_numbers(name, values) if isinstance(fact, int) else _of_digests(name, values)
            raise DisagreementError(
                f"the ranks that share this vocabulary were asked different things: {told}; "
                f"give all of them the same loss mask, tokens, temperature and settings"
            )


def _of_numbers(name: str, values: tuple[int, ...]) -> str:
    return f"{name} is " + ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))


def _of_digests(name: str, values: tuple[int, ...]) -> str:
    other = next(rank for rank, value in enumerate(values) if value != values[0])
    return f"{name} of rank {other} is not that of rank 0"
