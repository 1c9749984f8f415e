"""The three layouts, written out by hand."""

from __future__ import annotations

import pytest
import torch

from compact_logits.rows import Layout, contiguous, packed, zigzag


def _on_both_ranks(build, totals: list[int], responses: list[int], num_rows: int) -> list[Layout]:
    return [build(totals, responses, num_rows, rank, 2) for rank in range(2)]


def test_case_7_3_packed_labels_stop_at_the_border_between_two_sequences():
    layout = packed([3, 2], [2, 1], 6)
    tokens = layout.join_tokens([torch.tensor([10, 11, 12]), torch.tensor([20, 21])])
    assert layout.source.tolist() == [0, 1, 2, 3, 4, -1]
    assert layout.label_source.tolist() == [1, 2, -1, 4, -1, -1]
    assert [tokens[i].item() if i >= 0 else None for i in layout.label_source] == [11, 12, None, 21, None, None]
    assert layout.labels(tokens).tolist() == [11, 12, 0, 21, 0, 0]
    assert packed([], [], 3).labels(tokens[:0]).tolist() == [0, 0, 0]
    assert layout.predicts.tolist() == [True, True, False, True, False, False]


def test_case_7_2_the_first_response_token_is_predicted_by_the_last_prompt_row():
    layout = packed([5], [2], 8)
    assert layout.response_rows(0).tolist() == [2, 3]
    assert layout.label_source[2] == 3, (
        "row 2, the last of three prompt tokens, predicts token 3, the first response one"
    )
    keep = layout.rows_of_masks([torch.tensor([1, 0])])
    assert keep.tolist() == [False, False, True, False, False, False, False, False]


def test_a_mask_with_interior_zeros_selects_by_position():
    layout = packed([8], [6], 8)
    keep = layout.rows_of_masks([torch.tensor([1, 1, 0, 0, 1, 1])])
    assert keep.nonzero().squeeze(1).tolist() == [1, 2, 5, 6]
    values = torch.zeros(8)
    values[keep] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert layout.to_responses(values)[0].tolist() == [1, 2, 0, 0, 3, 4]


def test_a_mask_counts_where_it_is_not_zero():
    keep = packed([5], [4], 5).rows_of_masks([torch.tensor([2.0, 0.0, -1.0, 0.5])])
    assert keep.tolist() == [True, False, True, True, False]


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk():
    first, second = _on_both_ranks(zigzag, [8], [8 - 3], 4)
    assert first.source.tolist() == [0, 1, 6, 7]
    assert second.source.tolist() == [2, 3, 4, 5]
    assert first.label_source.tolist() == [1, 2, 7, -1]
    assert second.label_source.tolist() == [3, 4, 5, 6]
    assert first.response_source.tolist() == [-1, -1, 4, -1]
    assert second.response_source.tolist() == [0, 1, 2, 3]


def test_zigzag_pads_inside_each_sequence_and_at_the_end():
    # 5 tokens in chunks of 2 are padded to 8, 3 tokens in chunks of 1 to 4.
    first, second = _on_both_ranks(zigzag, [5, 3], [4, 1], 8)
    assert first.source.tolist() == [0, 1, -1, -1, 5, -1, -1, -1]
    assert second.source.tolist() == [2, 3, 4, -1, 6, 7, -1, -1]
    assert first.label_source.tolist() == [1, 2, -1, -1, 6, -1, -1, -1]
    assert second.label_source.tolist() == [3, 4, -1, -1, 7, -1, -1, -1]
    assert [first.response_positions(0).tolist(), second.response_positions(0).tolist()] == [[0, 1], [2, 3]]
    assert [first.response_rows(1).tolist(), second.response_rows(1).tolist()] == [[], [4]]


def test_zigzag_orders_a_response_as_early_chunk_then_late_chunk():
    layout = zigzag([8], [7], 6, cp_rank=0, cp_size=2)
    assert layout.response_positions(0).tolist() == [0, 1, 6]
    assert layout.to_responses(torch.arange(6.0))[0].tolist() == [0, 1, 2]
    assert layout.from_responses([torch.tensor([7.0, 8.0, 9.0])]).tolist() == [7, 8, 9, 0, 0, 0]


def test_contiguous_cuts_the_packed_sequence():
    first, second = _on_both_ranks(contiguous, [8], [5], 4)
    assert first.source.tolist() == [0, 1, 2, 3]
    assert second.source.tolist() == [4, 5, 6, 7]
    assert first.label_source.tolist() == [1, 2, 3, 4], "the label of a slice's last row is on the next rank"
    assert first.response_positions(0).tolist() == [0, 1]
    assert second.response_positions(0).tolist() == [2, 3, 4]


def test_contiguous_slices_ignore_where_sequences_end():
    first, second = _on_both_ranks(contiguous, [3, 4], [2, 3], 4)
    assert first.source.tolist() == [0, 1, 2, 3]
    assert second.source.tolist() == [4, 5, 6, -1]
    assert first.label_source.tolist() == [1, 2, -1, 4]
    assert [first.response_rows(i).tolist() for i in (0, 1)] == [[0, 1], [3]]
    assert [second.response_rows(i).tolist() for i in (0, 1)] == [[], [0, 1]]


@pytest.mark.parametrize(("build", "rank"), [(zigzag, 1), (contiguous, 0)])
def test_case_7_5_a_rank_with_prompt_only_has_an_empty_response(build, rank):
    layout = build([8], [1], 4, rank, 2)
    assert layout.local_response_lengths == (0,)
    values = torch.randn(4, 3, requires_grad=True)
    (local,) = layout.to_responses(values)
    assert local.shape == (0, 3)
    local.sum().backward()
    assert values.grad is not None and not values.grad.any(), "an empty response must still hang on the graph"
    assert not layout.rows_of_masks([torch.ones(1)]).any()


def test_case_7_6_rows_may_exceed_the_tokens_by_any_padding():
    totals = [1820, 6247, 7334]
    layout = packed(totals, [20, 47, 34], 15616)
    assert not layout.predicts[sum(totals) :].any()
    assert int(layout.predicts.sum()) == 20 + 47 + 34
    assert layout.rows_of_masks([torch.ones(n) for n in (20, 47, 34)]).sum() == 101


@pytest.mark.parametrize(
    ("build", "where"), [(packed, ()), (zigzag, (0, 2)), (zigzag, (1, 2)), (contiguous, (0, 2)), (contiguous, (1, 2))]
)
def test_an_empty_response_counts_no_row(build, where):
    layout = build([4, 3, 0], [0, 3 - 1, 0], 8, *where)
    assert layout.local_response_lengths[0] == layout.local_response_lengths[2] == 0
    masks = [torch.zeros(0), torch.zeros(2), torch.zeros(0)]
    assert int(layout.rows_of_masks(masks).sum()) == 0


def test_a_micro_batch_without_samples_is_all_padding():
    layout = packed([], [], 4)
    assert layout.source.tolist() == layout.label_source.tolist() == [-1] * 4
    assert layout.to_responses(torch.ones(4)) == []
    assert layout.from_responses([]).tolist() == [0.0] * 4
    assert layout.rows_of_masks([]).tolist() == [False] * 4
    assert layout.join_tokens([]).shape == (0,)


def test_an_all_response_sample_keeps_a_zero_for_the_token_that_nothing_predicts():
    layout = packed([2, 3], [2, 3], 5)
    assert layout.local_response_lengths == (2, 3), "whoever splits by response length needs every entry"
    assert layout.response_rows(1).tolist() == [-1, 2, 3]
    assert [local.tolist() for local in layout.to_responses(torch.arange(5.0) + 10)] == [[0, 10], [0, 12, 13]]
    assert layout.rows_of_masks([torch.tensor([0, 1]), torch.tensor([0, 0, 1])]).tolist() == [1, 0, 0, 1, 0]
    restored = layout.from_responses([torch.tensor([5.0, 6.0]), torch.tensor([7.0, 8.0, 9.0])])
    assert restored.tolist() == [6, 0, 8, 9, 0], "the entries 5 and 7 have no row"


def test_contiguous_keeps_that_zero_on_the_rank_of_the_row_before():
    first, second = _on_both_ranks(contiguous, [4, 3], [4, 3], 4)
    assert [first.response_rows(i).tolist() for i in (0, 1)] == [[0, 1, 2], [-1]]
    assert [second.response_rows(i).tolist() for i in (0, 1)] == [[], [0, 1]]
    assert [first.response_positions(i).tolist() for i in (0, 1)] == [[1, 2, 3], [0]]
    assert [local.tolist() for local in first.to_responses(torch.ones(4))] == [[1, 1, 1], [0]]


def test_case_7_11_trailing_axes_pass_through_both_ways():
    layout = zigzag([7, 5], [4, 2], 10, cp_rank=1, cp_size=2)
    values = torch.randn(10, 3, 2)
    local = layout.to_responses(values)
    assert [tuple(part.shape) for part in local] == [(n, 3, 2) for n in layout.local_response_lengths]
    assert torch.equal(layout.from_responses(local)[layout.predicts], values[layout.predicts])


def test_log_prob_and_entropy_of_an_entry_come_from_the_same_row():
    layout = packed([6], [4], 8)
    per_row = torch.stack([torch.arange(8.0), torch.arange(8.0) * 10], dim=-1)
    log_probs, entropy = layout.to_responses(per_row)[0].unbind(-1)
    assert torch.equal(log_probs * 10, entropy)
    assert log_probs.tolist() == [1, 2, 3, 4]


def test_responses_do_not_share_storage_with_the_rows():
    values = torch.arange(6.0)
    (local,) = packed([5], [3], 6).to_responses(values)
    local.zero_()
    assert values.tolist() == [0, 1, 2, 3, 4, 5]


def test_both_ways_have_the_gradient_of_a_selection():
    layout = zigzag([7, 3], [5, 2], 6, cp_rank=0, cp_size=2)
    values = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda rows: tuple(layout.to_responses(rows)), values)
    local = [torch.randn(n, dtype=torch.float64, requires_grad=True) for n in layout.local_response_lengths]
    assert torch.autograd.gradcheck(lambda *parts: layout.from_responses(parts), local)


def test_lengths_may_be_tensors_and_equal_layouts_are_equal():
    by_tensor = packed(torch.tensor([3, 2]), [torch.tensor(1), torch.tensor(1)], 6)
    assert by_tensor == packed([3, 2], [1, 1], 6)
    assert by_tensor.total_lengths == (3, 2) and type(by_tensor.total_lengths[0]) is int
