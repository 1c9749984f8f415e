"""The passes over a slice of logits that every scorer is made of, and which kernels run them on this device.

Two go over all logits: `row_stats_` reads them once, `softmax_grad_` reads and writes them once. `write_at_` stores the
few columns that a scorer knows by id. Each is defined in torch (`torch_kernels`), which runs on a CPU and is what tests
compare with, and written in Triton (`triton_kernels`), which runs on CUDA once it has proven itself (`verdict`).

They are registered as operators of torch, so that fake tensors and memory simulations see them.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from compact_logits.engine.kernels import torch_kernels
from compact_logits.engine.kernels.row_stats import LEAST_EXPONENT, combine_stats, new_stats
from compact_logits.engine.kernels.verify import use_torch_kernels, verdict

__all__ = [
    "LEAST_EXPONENT",
    "combine_stats",
    "new_stats",
    "row_stats_",
    "softmax_grad_",
    "use_torch_kernels",
    "verdict",
    "write_at_",
]


def _kernels(logits: Tensor) -> ModuleType:
    if logits.dtype == torch.float64 or not verdict(logits.device).proven:
        return torch_kernels
    from compact_logits.engine.kernels import triton_kernels

    return triton_kernels


@torch.library.custom_op("compact_logits::row_stats_", mutates_args=("stats",))
def row_stats_(
    stats: Tensor,  # (rows, 2 to 4) fp64, as `new_stats` makes them
    logits: Tensor,  # (rows, columns), any float, rows of any stride
    inverse_temperature: Tensor,  # (rows,) fp32, fp64 for fp64 logits
    moment: bool,
    squares: bool,
) -> None:
    """Add the columns of a slice to the statistics of each row (`row_stats`). Logits are read once."""
    if logits.numel():
        _kernels(logits).row_stats_(stats, logits, inverse_temperature, moment, squares)


@torch.library.custom_op("compact_logits::softmax_grad_", mutates_args=("logits",))
def softmax_grad_(
    logits: Tensor,  # (rows, columns), any float, rows of any stride
    inverse_temperature: Tensor,  # (rows,) fp32, fp64 for fp64 logits, as the three that follow
    shift: Tensor,  # (rows,)
    scale: Tensor,  # (rows,)
    slope: Tensor | None,  # (rows,)
) -> None:
    """`logits <- exp(z - shift) * (scale + slope * (z - shift))` with `z = logits * inverse_temperature`, in place.

    Computed in fp32 (fp64 for fp64 logits) and rounded once. Logits are read once and written once.
    """
    if logits.numel():
        _kernels(logits).softmax_grad_(logits, inverse_temperature, shift, scale, slope)


@torch.library.custom_op("compact_logits::write_at_", mutates_args=("logits",))
def write_at_(
    logits: Tensor,  # (rows, columns)
    ids: Tensor,  # (rows, k) int64
    values: Tensor,  # (rows, k), of an id that stands there twice the same
    first: int,
) -> None:
    """`logits[row, ids[row] - first] <- values[row]`, where that is a column of this slice.

    Other ids are masked, never clamped: a clamped one could write over a column that another id is right to write.
    """
    if logits.numel() and ids.numel():
        _kernels(logits).write_at_(logits, ids, values, first)


@row_stats_.register_fake
def _(stats: Tensor, logits: Tensor, inverse_temperature: Tensor, moment: bool, squares: bool) -> None: ...


@softmax_grad_.register_fake
def _(logits: Tensor, inverse_temperature: Tensor, shift: Tensor, scale: Tensor, slope: Tensor | None) -> None: ...


@write_at_.register_fake
def _(logits: Tensor, ids: Tensor, values: Tensor, first: int) -> None: ...
