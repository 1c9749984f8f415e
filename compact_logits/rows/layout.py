"""A rank's token layout: a list of runs. Everything else is derived from it, the same way for every layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from compact_logits.errors import LayoutError
from compact_logits.host_values import to_device
from compact_logits.rows.checks import check_per_sample

__all__ = ["Layout", "ResponseSpan", "Run"]


class Run(NamedTuple):
    """The local rows `[row, row + length)` hold the tokens `[position, position + length)` of one sequence."""

    sample: int
    row: int
    position: int
    length: int


class ResponseSpan(NamedTuple):
    """The local rows `[row, row + length)` predict the response tokens `[response, response + length)` of one sample.

    `row` is `None` for a response token that no row predicts but that has an entry in this rank's response layout.
    """

    row: int | None
    response: int
    length: int


@dataclass(frozen=True)
class Layout:
    """What each row of one context-parallel rank holds and predicts. Built by `packed`, `zigzag` or `contiguous`.

    Response token `r` of a sample is predicted by the row of the token before it: the first one by the last prompt
    row. The first token of a sequence is predicted by no row. Nothing here communicates; the index tensors are on the
    CPU and come from the lengths alone.
    """

    total_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    num_rows: int
    runs: tuple[Run, ...]
    # All-response samples whose first token has an entry in this rank's response layout, although no row predicts it.
    blanks: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        end = sample = 0
        for run in self.runs:
            assert run.sample >= sample and run.row >= end and run.length > 0, f"runs must ascend, got {self.runs}"
            assert 0 <= run.position <= self.total_lengths[run.sample] - run.length, f"{run} leaves its sequence"
            sample, end = run.sample, run.row + run.length
        assert end <= self.num_rows, f"runs end at row {end} of {self.num_rows}"

    @cached_property
    def response_spans(self) -> tuple[tuple[ResponseSpan, ...], ...]:
        """For each sample its spans on this rank, in ascending response order."""
        spans: list[list[ResponseSpan]] = [[] for _ in self.total_lengths]
        for sample in self.blanks:
            spans[sample].append(ResponseSpan(None, 0, 1))
        for run in self.runs:
            total, prompt = self.total_lengths[run.sample], self._prompt(run.sample)
            first = max(run.position, prompt - 1)
            stop = min(run.position + run.length, total - 1)
            if first < stop:
                span = ResponseSpan(run.row + first - run.position, first + 1 - prompt, stop - first)
                spans[run.sample].append(span)
        return tuple(map(tuple, spans))

    @cached_property
    def local_response_lengths(self) -> tuple[int, ...]:
        """How many entries of each sample's response are in this rank's response layout."""
        return tuple(sum(span.length for span in spans) for spans in self.response_spans)

    @cached_property
    def source(self) -> Tensor:  # (rows,) int64
        """The row's own token, as an index into all sequences one after another without padding; -1 for padding."""
        source = torch.full((self.num_rows,), -1)
        for run, start in self._runs_and_starts():
            source[run.row : run.row + run.length] = torch.arange(start, start + run.length)
        return source

    @cached_property
    def label_source(self) -> Tensor:  # (rows,) int64
        """The token at the next position of the same sequence, indexed as `source`; -1 where there is none."""
        label_source = torch.full((self.num_rows,), -1)
        for run, start in self._runs_and_starts():
            length = min(run.length, self.total_lengths[run.sample] - 1 - run.position)
            label_source[run.row : run.row + length] = torch.arange(start + 1, start + 1 + length)
        return label_source

    def labels(
        self,
        tokens: Tensor,  # (tokens,) int64, as `join_tokens` gives them
    ) -> Tensor:  # (rows,) int64, on the device of `tokens`
        """The token that each row predicts, 0 where it predicts none. Device synchronisation: none."""
        if not tokens.shape[0]:
            return tokens.new_zeros(self.num_rows)
        source = to_device(self.label_source, tokens.device)
        return torch.where(source >= 0, tokens[source.clamp(min=0)], 0)

    @cached_property
    def response_source(self) -> Tensor:  # (rows,) int64
        """The response token that the row predicts, as an index into all whole responses one after another; or -1."""
        response_source = torch.full((self.num_rows,), -1)
        for spans, start in zip(self.response_spans, _starts(self.response_lengths), strict=True):
            for row, response, length in spans:
                if row is not None:
                    first = start + response
                    response_source[row : row + length] = torch.arange(first, first + length)
        return response_source

    @cached_property
    def predicts(self) -> Tensor:  # (rows,) bool
        """Whether the row predicts a response token."""
        return self.response_source >= 0

    def response_rows(self, sample: int) -> Tensor:  # (local response,) int64
        """The local row that predicts each entry of the sample's local response; -1 for an entry nothing predicts."""
        rows = [
            torch.full((length,), -1) if row is None else torch.arange(row, row + length)
            for row, _, length in self.response_spans[sample]
        ]
        return torch.cat([torch.arange(0), *rows])

    def response_positions(self, sample: int) -> Tensor:  # (local response,) int64
        """Which token of the sample's whole response each entry of its local response is."""
        spans = self.response_spans[sample]
        return torch.cat([torch.arange(0), *(torch.arange(first, first + length) for _, first, length in spans)])

    def to_responses(
        self,
        values: Tensor,  # (rows, ...)
    ) -> list[Tensor]:  # per sample (local response, ...)
        """Take the predictor rows of each sample, in response order. Differentiable.

        Each tensor has its own storage and is part of the graph of `values`, also if it is empty. An entry that no row
        predicts is exactly 0. Raises `LayoutError` where `values` does not have `num_rows` rows.
        """
        if values.dim() == 0 or values.shape[0] != self.num_rows:
            raise LayoutError(
                f"needed values of {self.num_rows} rows, got {tuple(values.shape)}; pass what this rank computed of "
                f"all its rows, rows first"
            )
        blank = values.new_zeros(1, *values.shape[1:])
        return [
            torch.cat([values[:0], *(blank if row is None else values[row : row + n] for row, _, n in spans)])
            for spans in self.response_spans
        ]

    def from_responses(
        self,
        local: Sequence[Tensor],  # per sample (local response, ...)
    ) -> Tensor:  # (rows, ...)
        """The inverse of `to_responses`: each entry at the row that predicts it, exactly 0 elsewhere. Differentiable.

        An entry that nothing predicts is dropped. Raises `LayoutError` unless there is a tensor for each sample, with
        as many entries as its local response. Without samples there is no dtype to follow: fp32 `(rows,)`.
        """
        check_per_sample("local response", local, self.local_response_lengths, "length on this rank")
        first = local[0] if local else torch.empty(0)
        zeros = first.new_zeros(self.num_rows, *first.shape[1:])
        pieces, end = [], 0
        for value, spans in zip(local, self.response_spans, strict=True):
            parts = value.split([span.length for span in spans]) if spans else ()
            for part, span in zip(parts, spans, strict=True):
                if span.row is not None:
                    pieces += [zeros[end : span.row], part]
                    end = span.row + span.length
        return torch.cat([*pieces, zeros[end:]])

    def slice_responses(
        self,
        responses: Sequence[Tensor],  # per sample (response, ...)
    ) -> list[Tensor]:  # per sample (local response, ...)
        """Cut tensors of the whole response down to this rank's response layout, in the order of `to_responses`."""
        check_per_sample("response tensor", responses, self.response_lengths, "response_length")
        return [
            torch.cat([value[:0], *(value[first : first + length] for _, first, length in spans)])
            for value, spans in zip(responses, self.response_spans, strict=True)
        ]

    def rows_of_masks(
        self,
        loss_masks: Sequence[Tensor],  # per sample (response,), counted where not 0
    ) -> Tensor:  # (rows,) bool, on the CPU
        """The predictor rows whose response token counts in the loss. Device synchronisation: one, none for CPU masks.

        Raises `LayoutError`, alike on every rank, where a mask and its response differ in length and where a mask
        counts the first token of a sequence, which no row predicts.
        """
        check_per_sample("loss mask", loss_masks, self.response_lengths, "response_length")
        if not loss_masks:
            return torch.zeros(self.num_rows, dtype=torch.bool)
        keep = torch.cat([mask != 0 for mask in loss_masks]).cpu().split(self.response_lengths)
        for sample, mask in enumerate(keep):
            if self._prompt(sample) == 0 and bool(mask[:1].any()):
                raise LayoutError(
                    f"the loss mask of sample {sample} counts the first token of its sequence, which no row predicts "
                    f"(response_length {self.response_lengths[sample]} is the total_length); set that entry to 0 or "
                    f"give the sample a prompt"
                )
        return self.from_responses(self.slice_responses(keep))

    def join_tokens(
        self,
        tokens: Sequence[Tensor],  # per sample (total,)
    ) -> Tensor:  # (tokens,), what `source` and `label_source` index
        """All sequences one after another. Raises `LayoutError` where a sequence is not as long as its total length."""
        check_per_sample("token sequence", tokens, self.total_lengths, "total_length")
        return torch.cat(list(tokens)) if tokens else torch.arange(0)

    def _prompt(self, sample: int) -> int:
        return self.total_lengths[sample] - self.response_lengths[sample]

    def _runs_and_starts(self) -> list[tuple[Run, int]]:
        starts = _starts(self.total_lengths)
        return [(run, starts[run.sample] + run.position) for run in self.runs]


def _starts(lengths: tuple[int, ...]) -> list[int]:
    return [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
