"""Context parallelism in a zigzag: a rank has an early and a late chunk of every sequence, to balance attention."""

from __future__ import annotations

from collections.abc import Sequence

from compact_logits.rows.checks import check_cp, check_enough_rows, checked_lengths
from compact_logits.rows.layout import Layout, Run
from compact_logits.rows.packed import packed

__all__ = ["zigzag"]


def zigzag(
    total_lengths: Sequence[int],  # per sample, prompt and response together
    response_lengths: Sequence[int],  # per sample
    num_rows: int,  # rows on this rank, padding included
    cp_rank: int,
    cp_size: int,
) -> Layout:
    """The layout of rank `cp_rank` where each sequence is padded to `2 * cp_size` equal chunks and cut between ranks.

    A chunk has `ceil(total / (2 * cp_size))` rows. Rank `r` holds the chunks `r` and `2 * cp_size - 1 - r` of each
    sequence, sequence after sequence, then padding up to `num_rows`. On one rank nothing is cut, and nothing is padded
    between sequences: `packed`.

    Collectives: none. Raises `LayoutError` on lengths that do not fit together or `num_rows`, or an illegal rank.
    """
    check_cp(cp_rank, cp_size)
    if cp_size == 1:
        return packed(total_lengths, response_lengths, num_rows)
    totals, responses = checked_lengths(total_lengths, response_lengths)
    chunks = [-(-total // (2 * cp_size)) for total in totals]
    check_enough_rows(f"zigzag (context-parallel size {cp_size})", num_rows, 2 * sum(chunks), totals)
    runs, row = [], 0
    for sample, (total, chunk) in enumerate(zip(totals, chunks, strict=True)):
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            length = min(chunk, total - index * chunk)
            if length > 0:
                runs.append(Run(sample, row, index * chunk, length))
            row += chunk
    return Layout(totals, responses, num_rows, tuple(runs))
