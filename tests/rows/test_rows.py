"""Rows are selected by where they stand, and come back there: the rest is exactly zero, in value and in gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compact_logits import RowSelection, linear_log_probs, scatter, select
from compact_logits.errors import InputError
from tests.support.linear_head import Head, assert_as_good_as_plain

NAN = math.nan


def selection(mask: list[int], tokens: Tensor | None = None) -> RowSelection:
    """One sequence: row `i` predicts token `i + 1`, the last row nothing."""
    rows = len(mask)
    source = torch.tensor([*range(1, rows), -1]) if rows else torch.empty(0, dtype=torch.int64)
    return RowSelection.build(
        torch.tensor(mask, dtype=torch.bool), source, torch.arange(rows) if tokens is None else tokens
    )


def test_case_7_4_interior_zeros_select_by_position() -> None:
    chosen = selection([1, 1, 0, 0, 1, 1, 0], torch.arange(100, 107))
    assert chosen.indices.tolist() == chosen.host_indices.tolist() == [0, 1, 4, 5]
    assert chosen.targets.tolist() == [101, 102, 105, 106] and chosen.kept == 4 and chosen.num_rows == 7
    values = torch.tensor([1.5, 2.5, 3.5, 4.5])
    assert scatter(values, chosen.indices, 7).tolist() == [1.5, 2.5, 0.0, 0.0, 3.5, 4.5, 0.0]


@given(mask=st.lists(st.booleans(), max_size=24), shards=st.sampled_from([1, 2, 3, 4, 8]))
def test_shards_hold_every_kept_row_once(mask: list[bool], shards: int) -> None:
    mask = [*mask, False]
    mask += [False] * (-len(mask) % shards)
    chosen = selection([int(kept) for kept in mask])
    per_shard = len(mask) // shards
    counts = chosen.counts(shards)
    assert len(counts) == shards and sum(counts) == chosen.kept == sum(mask)
    for rank in range(shards):
        mine = mask[rank * per_shard : (rank + 1) * per_shard]
        local = chosen.of_shard(rank, shards)
        assert local.dtype == torch.int64
        assert local.tolist() == [row for row, kept in enumerate(mine) if kept]
        assert counts[rank] == sum(mine)


@given(mask=st.lists(st.booleans(), max_size=16), trailing=st.lists(st.integers(1, 3), max_size=2))
def test_scatter_undoes_select(mask: list[bool], trailing: list[int]) -> None:
    keep = torch.tensor(mask, dtype=torch.bool)
    indices = keep.nonzero().squeeze(1)
    rows = torch.randn(len(mask), *trailing) + 10
    kept = select(rows, indices)
    assert torch.equal(kept, rows[keep])
    back = scatter(kept, indices, len(mask))
    assert torch.equal(back[keep], rows[keep]) and bool((back[~keep] == 0).all())


def test_case_1_3_all_rows_selected_is_as_if_none_were_left_out() -> None:
    head = Head.random(12, 6, 29)
    results = []
    for through in (True, False):
        hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
        indices = torch.arange(12)
        rows = select(hidden, indices) if through else hidden
        result = linear_log_probs(rows, weight, head.targets, entropy="loss")
        outputs = [scatter(output, indices, 12) if through else output for output in result]
        torch.autograd.backward(outputs, [head.d_log_probs, head.d_entropy])
        results.append([*(output.detach() for output in outputs), hidden.grad, weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("off_mask", [NAN, math.inf, 1e30])
def test_case_4_4_rows_off_the_mask_reach_nothing(off_mask: float, dtype: torch.dtype) -> None:
    keep = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0], dtype=torch.bool)
    indices = keep.nonzero().squeeze(1)
    head = Head.random(4, 6, 29, dtype)
    hidden = torch.full((8, 6), off_mask, dtype=dtype)
    hidden[keep] = head.hidden
    weight = head.weight.clone().requires_grad_()
    hidden.requires_grad_()
    result = linear_log_probs(select(hidden, indices), weight, head.targets, entropy="loss")
    log_prob, entropy = (scatter(output, indices, 8) for output in result)
    assert bool((log_prob[~keep] == 0).all()) and bool((entropy[~keep] == 0).all())
    # Nor does a gradient that comes back for such a row.
    d_log_prob, d_entropy = (torch.full((8,), NAN) for _ in range(2))
    d_log_prob[keep], d_entropy[keep] = head.d_log_probs, head.d_entropy
    torch.autograd.backward([log_prob, entropy], [d_log_prob, d_entropy])
    assert bool((hidden.grad[~keep] == 0).all())
    ours = {"log_probs": log_prob.detach()[keep], "entropy": entropy.detach()[keep]}
    ours |= {"d_hidden": hidden.grad[keep], "d_weight": weight.grad}
    assert_as_good_as_plain(ours, head.plain(), head.truth())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_case_4_5_and_4_6_and_4_7_and_4_8_an_empty_mask_gives_zeros_attached_and_of_the_usual_dtype(
    dtype: torch.dtype,
) -> None:
    chosen = selection([0] * 6)
    assert chosen.kept == 0 and chosen.counts(2) == (0, 0)
    poison = [torch.full((40, 8), NAN, dtype=dtype) for _ in range(8)]
    del poison
    head = Head.random(6, 8, 40, dtype, bias=True)
    hidden, weight, bias = (t.requires_grad_() for t in (head.hidden, head.weight, head.bias))
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        result = linear_log_probs(select(hidden, chosen.indices), weight, chosen.targets, bias=bias, entropy="loss")
        full = [scatter(output, chosen.indices, 6) for output in result]
        sum(output.sum() for output in full).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    some = linear_log_probs(hidden, weight, head.targets, bias=bias, entropy="loss")
    for output, usual in zip(full, some, strict=True):
        assert output.shape == (6,) and output.dtype == usual.dtype and bool((output == 0).all())
    for leaf in (hidden, weight, bias):
        assert leaf.grad.dtype == dtype and bool((leaf.grad == 0).all())


def test_case_5_11_what_is_not_written_is_zero_whatever_the_memory_held() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert scatter(torch.ones(2), torch.tensor([1, 3]), 5).tolist() == [0, 1, 0, 1, 0]
        assert scatter(torch.ones(0, 2), torch.empty(0, dtype=torch.int64), 2).tolist() == [[0, 0], [0, 0]]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kept", [[], [2], [0, 1, 2, 3]])
def test_case_12_1_scattered_values_own_their_storage(kept: list[int]) -> None:
    values = torch.randn(len(kept), requires_grad=True)
    out = scatter(values, torch.tensor(kept, dtype=torch.int64), 4)
    assert out._base is None and not out._is_view()
    assert (
        out.untyped_storage().nbytes() == 16 and out.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()
    )
    root = (out * 2).sum()
    out.data = torch.empty(1)
    root.backward()
    assert values.grad.tolist() == [2.0] * len(kept)


def test_case_14_2_and_14_3_zeros_off_the_mask_leave_sums_and_counts_right() -> None:
    head = Head.random(4, 6, 29)
    keep = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0], dtype=torch.bool)
    indices = keep.nonzero().squeeze(1)
    result = linear_log_probs(head.hidden, head.weight, head.targets, entropy="metric")
    entropy = scatter(result.entropy, indices, 8)
    assert bool((entropy >= 0).all()) and bool((entropy[keep] > 0).all())
    assert (entropy.sum() / keep.sum()).item() == pytest.approx(head.truth()["entropy"].mean().item(), rel=1e-6)


def test_case_7_9_values_are_one_a_row_and_never_averaged() -> None:
    head = Head.random(5, 6, 29)
    alone = [
        linear_log_probs(head.hidden[i : i + 1], head.weight, head.targets[i : i + 1], entropy="metric")
        for i in range(5)
    ]
    together = linear_log_probs(head.hidden, head.weight, head.targets, entropy="metric")
    torch.testing.assert_close(together.log_probs, torch.cat([one.log_probs for one in alone]), rtol=0, atol=1e-6)
    torch.testing.assert_close(together.entropy, torch.cat([one.entropy for one in alone]), rtol=0, atol=1e-6)


def test_targets_are_int64_whatever_the_tokens_are() -> None:
    for dtype in (torch.int32, torch.int64, torch.uint8):
        chosen = selection([1, 0, 1, 0], torch.tensor([7, 8, 9, 10], dtype=dtype))
        assert chosen.targets.dtype == chosen.indices.dtype == torch.int64 and chosen.targets.tolist() == [8, 10]


A, B = torch.tensor([True, False, False, False]), torch.tensor([False, False, True, False])
SOURCE, TOKENS = torch.tensor([1, 2, 3, -1]), torch.arange(4)


def test_case_1_4_each_term_reads_its_own_rows_of_the_union() -> None:
    both = RowSelection.of_masks([A, B], SOURCE, TOKENS)
    assert both.indices.tolist() == [0, 2] and both.targets.tolist() == [1, 3]
    head = Head.random(4, 5, 9)
    hidden = head.hidden.clone().requires_grad_()
    log_probs = linear_log_probs(select(hidden, both.indices), head.weight, both.targets).log_probs
    dense = torch.log_softmax(head.hidden @ head.weight.T, dim=1)
    scattered = scatter(log_probs, both.indices, 4)
    for values in (log_probs, scattered):
        assert both.read(values, A).tolist() == pytest.approx([dense[0, 1].item()])
        assert both.read(values, B).tolist() == pytest.approx([dense[2, 3].item()])
        assert torch.equal(both.read(values, A | B), log_probs)
        assert both.read(values, A & B).shape == (0,)
    both.read(log_probs, B).sum().backward()
    assert hidden.grad is not None and hidden.grad.any(dim=1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("mask", [B, A | B, torch.tensor([True, False, False, True])])
def test_case_1_4_a_row_that_was_not_selected_is_not_read_as_zero(mask: Tensor) -> None:
    policy_alone = RowSelection.of_masks([A], SOURCE, TOKENS)
    row = int((mask & ~A).nonzero()[0])
    error = f"row {row} is read but was not selected; build the selection of all masks that are read: RowSelection.of_"
    for values in (torch.zeros(1), torch.zeros(4)):
        with pytest.raises(InputError, match=error):
            policy_alone.read(values, mask)
    nothing = RowSelection.of_masks([A & B], SOURCE, TOKENS)
    with pytest.raises(InputError, match="is read but was not selected"):
        nothing.read(torch.zeros(0), mask)


@given(chosen=st.lists(st.integers(0, 7), min_size=1, max_size=40))
def test_what_is_read_is_what_stands_there(chosen: list[int]) -> None:
    """Three masks, a bit each; every union is read back by every mask, from kept and from scattered values."""
    bits = torch.tensor([*chosen, 0])
    masks = [(bits & 1 << bit) != 0 for bit in range(3)]
    rows = bits.shape[0]
    source = torch.tensor([*range(1, rows), -1])
    both = RowSelection.of_masks(masks[:2], source, torch.arange(rows))
    values = torch.arange(float(rows)) + 0.5
    for mask in masks[:2]:
        assert torch.equal(both.read(values[both.indices], mask), values[mask])
        assert torch.equal(both.read(scatter(values[both.indices], both.indices, rows), mask), values[mask])
    if bool((masks[2] & ~masks[0] & ~masks[1]).any()):
        with pytest.raises(InputError, match="was not selected"):
            both.read(values, masks[2])
    else:
        assert torch.equal(both.read(values, masks[2]), values[masks[2]])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: RowSelection.of_masks([], SOURCE, TOKENS), "needed one or more bool masks of one shape, got none"),
        (
            lambda: RowSelection.of_masks([A, B[:3]], SOURCE, TOKENS),
            r"masks of one shape, got \(4,\) of torch.bool, \(3,\) of torch.bool",
        ),
        (lambda: RowSelection.of_masks([A, B.int()], SOURCE, TOKENS), r"\(4,\) of torch.int32"),
        (
            lambda: RowSelection.of_masks([A], SOURCE, TOKENS).read(torch.zeros(4), A.int()),
            r"needed a bool mask \(4,\) on the CPU, got \(4,\) of torch.int32 on cpu",
        ),
        (
            lambda: RowSelection.of_masks([A], SOURCE, TOKENS).read(torch.zeros(2), A),
            r"needed values of the 1 kept rows or of all 4, got \(2,\)",
        ),
    ],
)
def test_what_is_no_row_set(call: Callable[[], object], error: str) -> None:
    with pytest.raises(InputError, match=error):
        call()
