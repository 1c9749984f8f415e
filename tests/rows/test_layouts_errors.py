"""What does not fit together is refused by name, with the numbers, and without a process group."""

from __future__ import annotations

import re

import pytest
import torch

from compact_logits.errors import LayoutError
from compact_logits.rows import contiguous, packed, zigzag

BUILDERS = [
    pytest.param(lambda totals, responses, rows: packed(totals, responses, rows), id="packed"),
    pytest.param(lambda totals, responses, rows: zigzag(totals, responses, rows, 0, 2), id="zigzag"),
    pytest.param(lambda totals, responses, rows: contiguous(totals, responses, rows, 0, 2), id="contiguous"),
]


def _refused(text: str):
    return pytest.raises(LayoutError, match=re.escape(text))


@pytest.mark.parametrize("build", BUILDERS)
def test_lengths_that_cannot_be(build):
    with _refused("sample 1 has response_length 7 but total_length 5; the total length counts the prompt and the"):
        build([4, 5], [1, 7], 64)
    with _refused("sample 0 has total_length -1 and response_length 0; lengths count tokens"):
        build([-1], [0], 64)
    with _refused("sample 0 has total_length 3 and response_length -2"):
        build([3], [-2], 64)
    with _refused(
        "one total length and one response length for each sample, got 2 total_lengths and 1 response_lengths"
    ):
        build([3, 4], [2], 64)


def test_case_7_6_too_few_rows():
    with _refused("packed layout of 2 sequences with 7 tokens needs 7 rows on this rank, got 6; pass the rows"):
        packed([3, 4], [1, 1], 6)
    with _refused(
        "zigzag (context-parallel size 2) layout of 2 sequences with 8 tokens needs 6 rows on this rank, got 5"
    ):
        zigzag([3, 5], [1, 1], 5, 0, 2)
    with _refused("contiguous (context-parallel size 2) layout of 1 sequences with 9 tokens needs 5 rows"):
        contiguous([9], [1], 4, 1, 2)
    assert packed([3, 4], [1, 1], 7).num_rows == zigzag([3, 5], [1, 1], 7, 0, 2).num_rows == 7


@pytest.mark.parametrize("build", [zigzag, contiguous])
@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_group(build, rank, size):
    with _refused(f"needed 0 <= cp_rank < cp_size, got cp_rank {rank} and cp_size {size}"):
        build([4], [2], 8, rank, size)


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("entries", [2, 4])
def test_a_mask_as_long_as_another_response(build, entries):
    layout = build([5, 6], [2, 3], 64)
    with _refused(
        f"the loss mask of sample 1 has {entries} entries but its response_length is 3; cut or pad it where the "
        "micro-batch is made"
    ):
        layout.rows_of_masks([torch.ones(2), torch.ones(entries)])


@pytest.mark.parametrize("build", BUILDERS)
def test_a_list_of_another_length_is_never_cut_to_fit(build):
    layout = build([5, 6], [2, 3], 64)
    with _refused("needed one loss mask for each of the 2 samples, got 1"):
        layout.rows_of_masks([torch.ones(2)])
    with _refused("needed one token sequence for each of the 2 samples, got 3"):
        layout.join_tokens([torch.ones(5), torch.ones(6), torch.ones(1)])
    with _refused("needed one response tensor for each of the 2 samples, got 0"):
        layout.slice_responses([])
    with _refused("needed one local response for each of the 2 samples, got 1"):
        layout.from_responses([torch.ones(2)])


@pytest.mark.parametrize("build", BUILDERS)
def test_a_mask_on_a_token_that_nothing_predicts(build):
    # Packed, the row before the second sequence is the last one of the first, which predicts none of its tokens.
    layout = build([3, 2], [1, 2], 64)
    assert layout.rows_of_masks([torch.ones(1), torch.tensor([0, 1])]).dtype == torch.bool
    with _refused("the loss mask of sample 1 counts the first token of its sequence, which no row predicts"):
        layout.rows_of_masks([torch.ones(1), torch.tensor([1, 1])])


def test_every_rank_refuses_a_mask_alike():
    for rank in range(4):
        with _refused("counts the first token of its sequence"):
            zigzag([3, 9], [3, 2], 8, rank, 4).rows_of_masks([torch.ones(3), torch.ones(2)])


def test_values_that_are_not_of_these_rows():
    layout = packed([5], [2], 8)
    with _refused("needed values of 8 rows, got (7, 2); pass what this rank computed of all its rows, rows first"):
        layout.to_responses(torch.ones(7, 2))
    with _refused("needed values of 8 rows, got ()"):
        layout.to_responses(torch.tensor(1.0))
    with _refused("the local response of sample 0 has 3 entries but its length on this rank is 2"):
        layout.from_responses([torch.ones(3)])
    with _refused("the token sequence of sample 0 has 4 entries but its total_length is 5"):
        layout.join_tokens([torch.ones(4)])
    with _refused("the loss mask of sample 0 has no axis but its response_length is 2"):
        layout.rows_of_masks([torch.tensor(1)])
