"""Checks of lengths, ranks and per-sample lists. They look at host values only, so they come before any collective."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compact_logits.errors import LayoutError
from compact_logits.host_values import as_index, describe

__all__ = ["check_cp", "check_enough_rows", "check_per_sample", "checked_lengths"]


def checked_lengths(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The lengths as plain ints. Raises `LayoutError` unless `0 <= response <= total` for each sample of both."""
    totals, responses = _whole("total_length", total_lengths), _whole("response_length", response_lengths)
    if len(totals) != len(responses):
        raise LayoutError(
            f"needed one total length and one response length for each sample, "
            f"got {len(totals)} total_lengths and {len(responses)} response_lengths"
        )
    for sample, (total, response) in enumerate(zip(totals, responses, strict=True)):
        if total < 0 or response < 0:
            raise LayoutError(
                f"sample {sample} has total_length {total} and response_length {response}; lengths count tokens, "
                f"so they start at 0"
            )
        if response > total:
            raise LayoutError(
                f"sample {sample} has response_length {response} but total_length {total}; "
                f"the total length counts the prompt and the response together"
            )
    return totals, responses


def _whole(name: str, lengths: Sequence[int]) -> tuple[int, ...]:
    whole = []
    for sample, length in enumerate(lengths):
        number = as_index(length)
        if number is None:
            raise LayoutError(f"sample {sample} has {name} {describe(length)}; lengths are whole numbers of tokens")
        whole.append(number)
    return tuple(whole)


def check_cp(cp_rank: int, cp_size: int) -> None:
    """Raise `LayoutError` unless both are whole numbers and `0 <= cp_rank < cp_size`."""
    rank, size = as_index(cp_rank), as_index(cp_size)
    if rank is None or size is None or not 0 <= rank < size:
        raise LayoutError(
            f"needed 0 <= cp_rank < cp_size, got cp_rank {describe(cp_rank)} and cp_size {describe(cp_size)}"
        )


def check_enough_rows(layout: str, num_rows: int, needed: int, total_lengths: Sequence[int]) -> None:
    """Raise `LayoutError` unless `num_rows` is a whole number, and at least `needed`."""
    rows = as_index(num_rows)
    if rows is None or rows < needed:
        raise LayoutError(
            f"the {layout} layout of {len(total_lengths)} sequences with {sum(total_lengths)} tokens needs {needed} "
            f"rows on this rank, got {describe(num_rows)}; pass the rows of this rank's model input, padding included "
            f"and before sequence parallelism splits them"
        )


def check_per_sample(name: str, values: Sequence[Tensor], lengths: Sequence[int], counted: str) -> None:
    """Raise `LayoutError` unless there is one tensor for each sample, with `lengths[sample]` entries."""
    if len(values) != len(lengths):
        raise LayoutError(f"needed one {name} for each of the {len(lengths)} samples, got {len(values)}")
    for sample, (value, length) in enumerate(zip(values, lengths, strict=True)):
        if value.dim() == 0 or value.shape[0] != length:
            entries = "no axis" if value.dim() == 0 else f"{value.shape[0]} entries"
            raise LayoutError(
                f"the {name} of sample {sample} has {entries} but its {counted} is {length}; "
                f"cut or pad it where the micro-batch is made"
            )
