"""Every layout against one written position by position, on all ranks together, for lengths of every kind."""

from __future__ import annotations

import random

import pytest
import torch

from compact_logits.rows import Layout, contiguous, packed, zigzag

on_every_rank = pytest.mark.parametrize(
    ("kind", "cp_size"), [("packed", 1), *((kind, size) for kind in ("zigzag", "contiguous") for size in (1, 2, 4))]
)


def _places(kind: str, totals: list[int], cp_size: int) -> tuple[dict[tuple[int, int], tuple[int, int]], int]:
    """(sample, position) -> (rank, row), and the rows that a rank needs. One position at a time."""
    places, used = {}, [0] * cp_size
    if kind == "packed" or cp_size == 1:
        for sample, total in enumerate(totals):
            for position in range(total):
                places[sample, position] = (0, used[0])
                used[0] += 1
        return places, used[0]
    if kind == "contiguous":
        tokens = [(sample, position) for sample, total in enumerate(totals) for position in range(total)]
        slice_rows = 1
        while slice_rows * cp_size < len(tokens):
            slice_rows += 1
        slice_rows += 2
        for index, token in enumerate(tokens):
            places[token] = divmod(index, slice_rows)
        return places, slice_rows
    for sample, total in enumerate(totals):
        padded = total
        while padded % (2 * cp_size):
            padded += 1
        chunk = padded // (2 * cp_size)
        owner = [*range(cp_size), *reversed(range(cp_size))]
        for position in range(padded):
            rank = owner[position // chunk]
            if position < total:
                places[sample, position] = (rank, used[rank])
            used[rank] += 1
    assert len(set(used)) == 1
    return places, used[0]


def _build(kind: str, totals: list[int], responses: list[int], num_rows: int, rank: int, cp_size: int) -> Layout:
    if kind == "packed":
        return packed(totals, responses, num_rows)
    return (zigzag if kind == "zigzag" else contiguous)(totals, responses, num_rows, rank, cp_size)


def _cases() -> list[tuple[list[int], list[int]]]:
    rng = random.Random(20)
    cases = [
        ([1], [0]),
        ([2], [1]),
        ([1, 1, 1], [0, 0, 0]),
        ([0, 5, 0], [0, 4, 0]),
        ([3, 9], [2, 8]),
        ([8, 16], [3, 9]),
    ]
    for _ in range(30):
        totals = [rng.choice([1, 2, 3, 5, 7, 8, 9, 16, rng.randint(1, 40)]) for _ in range(rng.randint(1, 5))]
        cases.append((totals, [rng.randint(0, total - 1) for total in totals]))
    return cases


@on_every_rank
def test_rows_and_responses_stand_where_the_naive_layout_puts_them(kind, cp_size):
    for totals, responses in _cases():
        places, needed = _places(kind, totals, cp_size)
        num_rows = needed if kind == "contiguous" else needed + 3
        layouts = [_build(kind, totals, responses, num_rows, rank, cp_size) for rank in range(cp_size)]

        token = {key: index for index, key in enumerate((s, p) for s, n in enumerate(totals) for p in range(n))}
        source = [[-1] * num_rows for _ in range(cp_size)]
        label_source = [[-1] * num_rows for _ in range(cp_size)]
        predicted = [[[] for _ in totals] for _ in range(cp_size)]
        for (sample, position), (rank, row) in places.items():
            source[rank][row] = token[sample, position]
            label_source[rank][row] = token.get((sample, position + 1), -1)
            prompt = totals[sample] - responses[sample]
            if prompt <= position + 1 < totals[sample]:
                predicted[rank][sample].append((position + 1 - prompt, row))

        for rank, layout in enumerate(layouts):
            assert layout.source.tolist() == source[rank], (totals, rank)
            assert layout.label_source.tolist() == label_source[rank], (totals, rank)
            rows = {row for of_sample in predicted[rank] for _, row in of_sample}
            assert layout.predicts.tolist() == [row in rows for row in range(num_rows)]
            for sample in range(len(totals)):
                expected = sorted(predicted[rank][sample])
                assert layout.response_positions(sample).tolist() == [position for position, _ in expected]
                assert layout.response_rows(sample).tolist() == [row for _, row in expected]
                assert layout.local_response_lengths[sample] == len(expected)

        for sample, response in enumerate(responses):
            together = [r for layout in layouts for r in layout.response_positions(sample).tolist()]
            assert sorted(together) == list(range(response)), (totals, sample, "each response token on one rank, once")


@on_every_rank
def test_case_7_5_and_1_13_round_trip_restores_every_response(kind, cp_size):
    generator = torch.Generator().manual_seed(3)
    for totals, responses in _cases():
        num_rows = _places(kind, totals, cp_size)[1] + 5
        whole = [torch.rand(response, generator=generator) + 1 for response in responses]
        masks = [torch.randint(0, 2, (response,), generator=generator) for response in responses]
        restored = [torch.zeros(response) for response in responses]
        kept = [torch.zeros(response, dtype=torch.bool) for response in responses]
        for rank in range(cp_size):
            layout = _build(kind, totals, responses, num_rows, rank, cp_size)
            rows = layout.from_responses(layout.slice_responses(whole))
            assert torch.equal(rows != 0, layout.predicts), "zero exactly where the row predicts no response token"
            flat = torch.cat(whole)
            assert torch.equal(rows[layout.predicts], flat[layout.response_source[layout.predicts]])
            keep = layout.rows_of_masks(masks)
            for sample, local in enumerate(layout.to_responses(rows)):
                restored[sample][layout.response_positions(sample)] = local
            for sample, local in enumerate(layout.to_responses(keep)):
                kept[sample][layout.response_positions(sample)] = local
        for sample in range(len(totals)):
            assert torch.equal(restored[sample], whole[sample]), (totals, responses, sample)
            assert torch.equal(kept[sample], masks[sample] != 0)


def test_one_rank_of_either_context_parallel_layout_is_packed():
    for totals, responses in _cases():
        num_rows = sum(totals) + 2
        assert zigzag(totals, responses, num_rows, 0, 1) == packed(totals, responses, num_rows)
        assert contiguous(totals, responses, num_rows, 0, 1) == packed(totals, responses, num_rows)
