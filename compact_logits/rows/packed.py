"""No context parallelism: the sequences one after another, then padding."""

from __future__ import annotations

from collections.abc import Sequence

from compact_logits.rows.checks import check_enough_rows, checked_lengths
from compact_logits.rows.layout import Layout, Run

__all__ = ["packed"]


def packed(
    total_lengths: Sequence[int],  # per sample, prompt and response together
    response_lengths: Sequence[int],  # per sample
    num_rows: int,  # rows of the packed sequence, padding included
) -> Layout:
    """The layout of sequences packed without padding between them, padded at the end up to `num_rows`.

    A sample's local response is its whole response, also where its first token has no predicting row.
    Collectives: none. Raises `LayoutError` on lengths that do not fit together or `num_rows`.
    """
    totals, responses = checked_lengths(total_lengths, response_lengths)
    check_enough_rows("packed", num_rows, sum(totals), totals)
    runs, row = [], 0
    for sample, total in enumerate(totals):
        if total:
            runs.append(Run(sample, row, 0, total))
        row += total
    blanks = {
        sample for sample, (total, response) in enumerate(zip(totals, responses, strict=True)) if total == response > 0
    }
    return Layout(totals, responses, num_rows, tuple(runs), frozenset(blanks))
