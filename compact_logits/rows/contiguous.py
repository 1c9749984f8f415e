"""Context parallelism in contiguous slices: the packed sequence cut into one slice a rank (all-gather attention)."""

from __future__ import annotations

from collections.abc import Sequence

from compact_logits.rows.checks import check_cp, check_enough_rows, checked_lengths
from compact_logits.rows.layout import Layout, Run

__all__ = ["contiguous"]


def contiguous(
    total_lengths: Sequence[int],  # per sample, prompt and response together
    response_lengths: Sequence[int],  # per sample
    num_rows: int,  # rows on this rank, padding included
    cp_rank: int,
    cp_size: int,
) -> Layout:
    """The layout of rank `cp_rank` where the packed sequence is padded at its end and cut into `cp_size` equal slices.

    Rank `r` holds the packed rows `[r * num_rows, (r + 1) * num_rows)`, and of each response what these predict. No
    row predicts the first token of an all-response sequence; its entry is on the rank of the packed row before it, if
    there is one.

    Collectives: none. Raises `LayoutError` on lengths that do not fit together or `num_rows`, or an illegal rank.
    """
    check_cp(cp_rank, cp_size)
    totals, responses = checked_lengths(total_lengths, response_lengths)
    check_enough_rows(f"contiguous (context-parallel size {cp_size})", num_rows, -(-sum(totals) // cp_size), totals)
    begin, end = cp_rank * num_rows, (cp_rank + 1) * num_rows
    runs, blanks, start = [], set(), 0
    for sample, (total, response) in enumerate(zip(totals, responses, strict=True)):
        first, stop = max(start, begin), min(start + total, end)
        if first < stop:
            runs.append(Run(sample, first - begin, first - start, stop - first))
        if total == response > 0 and begin <= start - 1 < end:
            blanks.add(sample)
        start += total
    return Layout(totals, responses, num_rows, tuple(runs), frozenset(blanks))
