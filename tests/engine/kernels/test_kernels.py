"""What the kernels compute, against dense fp64: the torch ones here, the Triton ones in `test_interpreter`."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits.engine.kernels import new_stats

kernels: ModuleType
if os.environ.get("TRITON_INTERPRET") == "1":
    from compact_logits.engine.kernels import triton_kernels as kernels
else:
    from compact_logits.engine.kernels import torch_kernels as kernels

PADDING = 50.0

# What a row's logits are, as a function of random ones; the statistics of a row with NaN are NaN.
ROWS: dict[str, Any] = {
    "random": lambda z: z,
    "confident": lambda z: z.index_fill(0, torch.tensor([z.shape[0] // 2]), 60.0),
    "rising": lambda z: torch.linspace(-30, 30, z.shape[0]),
    "falling": lambda z: torch.linspace(30, -30, z.shape[0]),
    "masked columns": lambda z: z.where(torch.arange(z.shape[0]) % 3 != 0, -torch.inf),
    "nothing": lambda z: torch.full_like(z, -torch.inf),
    "nothing at first": lambda z: z.where(torch.arange(z.shape[0]) >= z.shape[0] * 2 // 3, -torch.inf),
    "NaN": lambda z: z.index_fill(0, torch.tensor([z.shape[0] // 3]), torch.nan),
}


def slice_of(columns: int, padding: int, seed: int = 0) -> Tensor:  # (rows, columns), padding behind each row
    generator = torch.Generator().manual_seed(seed)
    rows = [fill(torch.randn(columns, generator=generator) * 4) for fill in ROWS.values()]
    return torch.nn.functional.pad(torch.stack(rows), (0, padding), value=PADDING)[:, :columns]


def inverse_temperatures() -> Tensor:  # (rows,)
    return torch.linspace(0.7, 1.4, len(ROWS))


def dense_stats(logits: Tensor) -> Tensor:  # (rows, 4) fp64
    z = (logits * inverse_temperatures()[:, None]).double()
    maximum = z.amax(dim=1)
    shifted = z - maximum.masked_fill(maximum == -torch.inf, 0.0)[:, None]
    exp = shifted.exp()
    moment = torch.where(exp == 0, 0.0, exp * shifted)
    return torch.stack([maximum, exp.sum(1), moment.sum(1), exp.square().sum(1)], dim=1)


def assert_same(
    got: Tensor,  # (rows, ...)
    truth: Tensor,  # (rows, ...)
) -> None:
    torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("moment", [False, True])
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("widths", [(1,), (2, 1), (131,), (64, 129, 1), (4096,), (4097, 127), (700, 8321)])
def test_row_stats_of_slices_are_those_of_all_columns(widths: tuple[int, ...], moment: bool, squares: bool) -> None:
    slices = [slice_of(width, padding=place * 3, seed=place) for place, width in enumerate(widths)]
    if len(slices) > 1:  # another kind of row goes on in each
        slices = [each.roll(place, dims=0) for place, each in enumerate(slices)]
    stats = new_stats(slices[0], moment=moment, squares=squares)
    for logits in slices:
        kernels.row_stats_(stats, logits, inverse_temperatures(), moment, squares)
    truth = dense_stats(torch.cat(slices, dim=1))
    assert_same(stats[:, 1:], truth[:, [1, *[2] * moment, *[3] * squares]])
    numbers = ~truth[:, 1].isnan()  # the maximum of a row with NaN may be anything
    assert torch.equal(stats[numbers, 0], truth[numbers, 0])
    assert numbers.any()


@pytest.mark.parametrize("with_slope", [False, True])
@pytest.mark.parametrize("columns", [1, 131, 2048, 4999])
def test_softmax_grad_is_written_where_the_logits_are_and_nowhere_else(columns: int, with_slope: bool) -> None:
    logits, inverse = slice_of(columns, padding=9), inverse_temperatures()
    shift = dense_stats(logits)[:, 0].nan_to_num(3.0, neginf=0.0).float() + 0.5
    scale, slope = torch.linspace(-1, -2, len(ROWS)), torch.linspace(0.2, 2.0, len(ROWS)) if with_slope else None
    z = (logits * inverse[:, None] - shift[:, None]).double()
    factor = scale[:, None].double() + (0.0 if slope is None else slope[:, None] * z.clamp(min=-1e3))
    truth = z.exp() * factor
    kernels.softmax_grad_(logits, inverse, shift, scale, slope)
    assert_same(logits, truth)
    assert (logits.as_strided((len(ROWS), 9), (columns + 9, 1), columns) == PADDING).all()


@pytest.mark.parametrize("columns", [1, 131])
def test_write_at_passes_over_the_ids_of_other_slices(columns: int) -> None:
    logits, first = slice_of(columns, padding=9), 1000
    # Before the slice, in it (the last column twice, with one value), just behind it, in no vocabulary at all.
    ids = [first - 1, first + columns - 1, first + columns, 5, -1, first + columns - 1, first + columns // 2]
    listed = torch.tensor([ids]).repeat(len(ROWS), 1)
    listed[1] = -1  # a row with nothing in this slice
    values = torch.arange(listed.numel()).view_as(listed) / 7
    values[:, 5] = values[:, 1]
    if columns == 1:
        values[:, 6] = values[:, 1]
    truth = logits.double()
    for row in (0, *range(2, len(ROWS))):
        truth[row, columns - 1], truth[row, columns // 2] = values[row, 1], values[row, 6]
    kernels.write_at_(logits, listed, values, first)
    assert_same(logits, truth)
    assert (logits.as_strided((len(ROWS), 9), (columns + 9, 1), columns) == PADDING).all()


def test_rows_may_stand_more_than_2_to_the_31_elements_apart() -> None:
    # Of the 4 GiB only the pages of three rows are touched.
    stride, columns = 2**30 + 16, 130
    rows = torch.empty(2 * stride + columns, dtype=torch.float16).as_strided((3, columns), (stride, 1))
    rows.copy_(torch.randn(3, columns))
    near, inverse = rows.clone(), torch.tensor([1.0, 0.7, 1.4])
    stats, of_near = new_stats(inverse), new_stats(inverse)
    kernels.row_stats_(stats, rows, inverse, False, False)
    kernels.row_stats_(of_near, near, inverse, False, False)
    assert torch.equal(stats, of_near)
    ids, values = torch.tensor([[0], [129], [64]]), torch.tensor([[2.0], [3.0], [4.0]])
    for logits in (rows, near):
        kernels.softmax_grad_(logits, inverse, of_near[:, 0].float(), inverse, None)
        kernels.write_at_(logits, ids, values, 0)
    assert torch.equal(rows, near)
    assert near[2, 64] == 4.0
