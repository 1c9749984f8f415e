"""Whether the ranks that share a vocabulary make the same call, found out once each has checked its own arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType

import torch
from torch import Tensor

from compact_logits.agreement import digest, exchanged, fingerprint, refuse_difference
from compact_logits.errors import DisagreementError, InputError
from compact_logits.validation import check_flag
from compact_logits.vocab_parallel import VocabShard

__all__ = ["AskedAlike", "check_cover"]

# Whether a rank refuses its arguments, both ends of its shard, and what `told` makes the rest of.
_NUMBERS = 12


class AskedAlike:
    """Around the checks of one call's arguments, at whose end stands `told`: on leaving, the ranks compare the call.

    Then all ranks of the vocabulary's group raise the same `DisagreementError` where they were asked different things,
    or where their shards do not cover the vocabulary once. Where the checks of some ranks raise `InputError`, it is
    theirs, and the others raise one that names these ranks, instead of waiting for them.

    Collectives: one all-gather of 96 bytes a rank, whatever is called, as `agreement.exchanged` makes it. None, and no
    comparison, where the shard has no other ranks, with `check_ranks=False`, for tensors without memory (meta), and
    inside a graph that `torch.compile` traces, which cannot wait for a result.
    """

    def __init__(
        self,
        function: str,  # name
        shard: object,  # a VocabShard, unless what the caller passed is none
        check_ranks: object,
        *arguments: object,  # the message travels on the device of the first tensor among them
    ) -> None:
        self._function = function
        self._check_ranks = check_ranks
        self._shard = shard if isinstance(shard, VocabShard) else VocabShard(0, 0)
        devices = [each.device for each in arguments if isinstance(each, Tensor)]
        self._device = devices[0] if devices else torch.device("cpu")
        left_out = check_ranks is False or self._device.type == "meta" or torch.compiler.is_compiling()
        self._group = self._shard.group if self._shard.sharded and not left_out else None
        self._facts: dict[str, int | Tensor] = {}

    def told(
        self,
        ids: Tensor,  # (kept, ...) int64, global
        temperature: float | Tensor,  # scalar or (kept,)
        settings: Mapping[str, object],  # by name; what they print is compared
        *,
        rows: int | None = None,  # of which those kept were chosen; None for these
        place: Tensor | None = None,  # (kept,) int64, among all rows
        teacher: Tensor | None = None,  # (kept, k), log-probs
        hidden: Tensor | None = None,  # (..., hidden), whose gradient the ranks sum
    ) -> None:
        """What this rank was asked. Raises `InputError` where `check_ranks` is no switch."""
        check_flag("check_ranks", self._check_ranks)
        if self._group is None:
            return
        nothing = torch.zeros(0)
        needs_grad = torch.is_grad_enabled() and hidden is not None and hidden.requires_grad
        self._facts = {
            "the function": fingerprint(self._function),
            "the number of rows": ids.shape[0] if rows is None else rows,
            "the number of kept rows": ids.shape[0],
            "whether the hidden states need a gradient": int(needs_grad),
            f"one of {', '.join(settings)}": fingerprint(*settings.values()),
            "the place of the kept rows": digest(nothing if place is None else place),
            "the target ids" if teacher is None else "the teacher's ids": digest(ids),
            "the teacher's log-probs": digest(nothing if teacher is None else teacher),
            "the temperature": digest(torch.as_tensor(temperature, dtype=torch.float64)),
        }

    def __enter__(self) -> AskedAlike:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._group is None:
            return
        if error is None:
            self._compare()
        elif isinstance(error, InputError):
            # The caller's own error is what matters here, also where the others cannot be told.
            with suppress(Exception):
                exchanged(self._group, [1] + [0] * (_NUMBERS - 1), self._device)

    def _compare(self) -> None:
        assert self._group is not None
        values = [0, self._shard.start, self._shard.stop, *self._facts.values()]
        assert len(values) == _NUMBERS
        refused, starts, stops, *others = exchanged(self._group, values, self._device)
        refusing = [f"rank {rank}" for rank, flag in enumerate(refused) if flag]
        if refusing:
            raise InputError(
                f"{' and '.join(refusing)} of the group that shares this vocabulary refused what {self._function} was "
                f"given there, so that no rank computes it; the error raised there says why"
            )
        refuse_difference(self._facts, others)
        check_cover(list(zip(starts, stops, strict=True)))


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
