"""Compare the arguments of all ranks of a group before any collective whose size depends on them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from compact_logits.engine.collectives import all_gather
from compact_logits.engine.kernels import use_torch_kernels, verdict
from compact_logits.engine.validation import check_flag
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.errors import DisagreementError, InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "RankCheck",
    "check_cover",
    "check_ids",
    "compares",
    "digest",
    "fingerprint",
    "gather_facts",
    "id_bounds",
    "raise_difference",
    "rank_message",
    "use_same_kernels",
]

# SplitMix64's increment and first multiplier, as signed numbers: int64 products wrap around.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER = 0xBF58476D1CE4E5B9 - 2**64

# In the message: whether a rank rejects its arguments, whether its Triton kernels are proven, its shard's start and
# stop, its smallest and largest id, and the facts of `compare`.
_NUMBERS = 15

_compared: WeakSet[ProcessGroup] = WeakSet()


def compares(
    shard: VocabShard,
    check_ranks: object,  # True, False, or None for a group's first call
) -> bool:
    """Whether the ranks of the shard's group compare their arguments at the next call."""
    if check_ranks is False or not shard.sharded:
        return False
    return check_ranks is not None or shard.group not in _compared


class RankCheck:
    """Context manager around the checks of one call's arguments: on exit, the ranks compare their arguments.

    All ranks of the vocabulary's group raise the same `DisagreementError` if their arguments differ or if their shards
    do not cover the vocabulary once, and the same `InputError` if an id is in no shard. If any rank rejects its
    arguments, but for its shard, with an `InputError`, every rank raises one.

    `check_ranks`: True for every call, False for none, None for a group's first call only, since the host waits for the
    result. Collectives: one all-gather of 120 bytes a rank; none if the shard has no other ranks, and none for meta
    tensors.
    """

    def __init__(
        self,
        function: str,  # name
        shard: object,  # as the caller passed it, not validated yet
        check_ranks: object,
        *arguments: object,  # the all-gather is on the device of the first tensor among them
    ) -> None:
        self._function = function
        self._check_ranks = check_ranks
        self._shard = shard if isinstance(shard, VocabShard) else VocabShard(0, 0)
        devices = [each.device for each in arguments if isinstance(each, Tensor)]
        self._device = devices[0] if devices else torch.device("cpu")
        compared = self._device.type != "meta" and compares(self._shard, check_ranks)
        self._group = self._shard.group if compared else None
        self._facts: dict[str, int | Tensor] = {}
        self._ids = torch.zeros(0, dtype=torch.int64)
        self._vocab_size: int | None = None

    def compare(
        self,
        ids: Tensor,  # (kept, ...) int64, global
        temperature: float | Tensor,  # scalar or (kept,)
        settings: Mapping[str, object],  # by name; their repr is compared
        *,
        vocab_size: int | None = None,  # ids from here on are padding
        rows: int | None = None,  # all rows; None if all are kept
        place: Tensor | None = None,  # (kept,) int64, positions among all rows; or a mask of the rows that count
        teacher: Tensor | None = None,  # (kept, k), log-probs
        hidden: Tensor | None = None,  # (..., hidden), whose gradient the ranks sum
    ) -> None:
        """Record this rank's arguments for the comparison on exit.

        Raises `InputError` unless `check_ranks` is a bool or None.
        """
        if self._check_ranks is not None:
            check_flag("check_ranks", self._check_ranks)
        if self._group is None:
            return
        nothing = torch.zeros(0)
        needs_grad = torch.is_grad_enabled() and hidden is not None and hidden.requires_grad
        self._ids, self._vocab_size = ids, vocab_size
        self._facts = {
            "the function": fingerprint(self._function),
            "the number of rows": ids.shape[0] if rows is None else rows,
            "the number of kept rows": ids.shape[0],
            "whether the hidden states need a gradient": int(needs_grad),
            f"one of {', '.join(settings)}": fingerprint(*settings.values(), vocab_size),
            "the place of the kept rows": digest(nothing if place is None else place),
            "the target ids" if teacher is None else "the teacher's ids": digest(ids),
            "the teacher's log-probs": digest(nothing if teacher is None else teacher),
            "the temperature": digest(torch.as_tensor(temperature, dtype=torch.float64)),
        }

    def __enter__(self) -> RankCheck:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group is None:
            return
        if error is None:
            self._raise_difference()
            _compared.add(self._group)
        elif isinstance(error, InputError):
            # The caller's own error is raised here, also if the all-gather fails.
            with suppress(Exception):
                gather_facts(self._group, [1] + [0] * (_NUMBERS - 1), self._device)

    def _raise_difference(self) -> None:
        assert self._group is not None
        bounds, proven = id_bounds(self._ids), verdict(self._device).proven
        values = [0, int(proven), self._shard.start, self._shard.stop, *bounds, *self._facts.values()]
        assert len(values) == _NUMBERS
        refused, kernels, starts, stops, least, largest, *others = gather_facts(self._group, values, self._device)
        refusing = [f"rank {rank}" for rank, flag in enumerate(refused) if flag]
        if refusing:
            raise InputError(
                f"{' and '.join(refusing)} of the group that shares this vocabulary refused what {self._function} was "
                f"given there, so that no rank computes it; the error raised there says why"
            )
        raise_difference(self._facts, others)
        check_cover(list(zip(starts, stops, strict=True)))
        check_ids(least[0], largest[0], max(stops) if self._vocab_size is None else self._vocab_size)
        use_same_kernels(self._device, kernels)


def digest(
    values: Tensor,  # (...), numbers of any dtype
) -> Tensor:  # () int64, on the device of `values`
    """A hash of the values and their order. No synchronisation."""
    flat = values.detach().flatten()
    bits = flat.double().view(torch.int64) if flat.is_floating_point() else flat.to(torch.int64)
    mixed = bits + torch.arange(1, flat.shape[0] + 1, device=flat.device) * _INCREMENT
    mixed = (mixed ^ (mixed >> 30)) * _MULTIPLIER
    return (mixed ^ (mixed >> 27)).sum()


def fingerprint(*settings: object) -> Tensor:  # () int64, on the CPU
    """A hash of the settings' repr."""
    return torch.tensor(zlib.crc32(repr(settings).encode()), device="cpu")


def id_bounds(
    ids: Tensor,  # (...) int64
) -> tuple[int | Tensor, int | Tensor]:
    """The least and the largest id, on their device. No synchronisation."""
    return (ids.amin(), ids.amax()) if ids.numel() else (0, 0)


def check_ids(least: int, largest: int, vocab: int) -> None:
    """Raise `InputError` unless all ids are in the vocabulary."""
    if least < 0 or largest >= vocab:
        wrong = least if least < 0 else largest
        raise InputError(
            f"the ids of the rows must be from 0 to {vocab - 1}, which is all that the shards hold, got {wrong}; pass "
            f"the tokens of the model's own vocabulary"
        )


def gather_facts(
    group: ProcessGroup,
    values: Sequence[int | Tensor],  # a tensor is () int64, on any device
    device: torch.device,
) -> list[tuple[int, ...]]:  # of each value, that of every rank
    """Every rank's values. Each rank must pass the same number of values.

    Collectives: one all-gather of 8 bytes a value and rank; the host waits for its result. If a rank never calls, the
    others raise the backend's error after the group's timeout.
    """
    return list(zip(*rank_message(group, values, device).tolist(), strict=True))


def rank_message(
    group: ProcessGroup,
    values: Sequence[int | Tensor],  # a tensor is () int64, on any device
    device: torch.device,
) -> Tensor:  # (ranks, values) int64, on `device`
    """As `gather_facts`, without the wait. Host values go to the device in one copy; device values are not read."""
    elsewhere = {place: value for place, value in enumerate(values) if isinstance(value, Tensor) and not value.is_cpu}
    numbers = [0 if place in elsewhere else int(value) for place, value in enumerate(values)]
    sent = torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
    for place, value in elsewhere.items():
        sent[place] = value
    received = sent.new_empty(group.size() * sent.shape[0])
    all_gather(received, sent, group)
    return received.view(group.size(), -1)


def raise_difference(
    facts: Mapping[str, int | Tensor],  # what must be the same; a tensor is a hash
    of_ranks: Sequence[tuple[int, ...]],  # of each fact, that of every rank
) -> None:
    """Raise the same `DisagreementError` on every rank for the first fact that is not the same on all of them.

    Without this check, ranks with different row counts send messages of different sizes: gloo then ends the process of
    the rank that expects less, and NCCL hangs or corrupts memory. Ranks with different targets return wrong numbers
    without any error. Every rank must pass the same names.
    """
    for (name, fact), values in zip(facts.items(), of_ranks, strict=True):
        if len(set(values)) > 1:
            difference = _of_numbers(name, values) if isinstance(fact, int) else _of_digests(name, values)
            raise DisagreementError(
                f"the ranks that share this vocabulary were asked different things: {difference}; "
                f"give all of them the same loss mask, tokens, temperature and settings"
            )


def use_same_kernels(
    device: torch.device,
    proven: Sequence[int],  # of each rank, whether its Triton kernels are proven
) -> None:
    """Run the torch kernels on this rank too, if another rank has to."""
    if verdict(device).proven and not all(proven):
        use_torch_kernels(device, f"those of rank {list(proven).index(0)} are not proven")


def check_cover(
    bounds: Sequence[tuple[int, int]],  # start and stop of each rank's shard
) -> None:
    """Raise `DisagreementError` unless the shards that hold anything cover the ids from 0 on, each once."""
    end = 0
    for start, stop in sorted(each for each in bounds if each[0] < each[1]):
        if start != end:
            fault = f"no rank holds the ids [{end}, {start})"
            if start < end:
                fault = f"two ranks hold the ids [{start}, {min(stop, end)})"
            every = ", ".join(f"[{first}, {last})" for first, last in bounds)
            raise DisagreementError(
                f"the ranks' shards must cover the vocabulary once, got {every} of ranks 0 to {len(bounds) - 1}, and "
                f"{fault}; pass the VocabShard of each rank's own slice"
            )
        end = stop


def _of_numbers(name: str, values: tuple[int, ...]) -> str:
    return f"{name} is " + ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))


def _of_digests(name: str, values: tuple[int, ...]) -> str:
    other = next(rank for rank, value in enumerate(values) if value != values[0])
    return f"{name} of rank {other} is not that of rank 0"
