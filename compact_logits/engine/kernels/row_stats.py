"""The statistics of a row: what the softmax of all its columns needs, slice by slice and rank by rank.

Columns: the maximum `M` of `z_j`, `sum exp(z_j - M)`; with `moment` also `sum exp(z_j - M) (z_j - M)`, with `squares`
last `sum exp(z_j - M)^2`. They are fp64, so that a result is rounded once however many slices there were.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LEAST_EXPONENT", "combine_stats", "new_stats"]

# A logit of -inf (a masked column) has p = 0 and adds nothing to the entropy, but 0 * -inf would be NaN. From here down
# p is 0 in fp64 too, and the product with any gradient is still finite.
LEAST_EXPONENT = -1e3


def new_stats(
    like: Tensor,  # (rows, ...)
    *,
    moment: bool = False,
    squares: bool = False,
) -> Tensor:  # (rows, 2 to 4) fp64
    """The statistics of no columns."""
    stats = like.new_zeros(like.shape[0], 2 + moment + squares, dtype=torch.float64)
    stats[:, 0] = -torch.inf
    return stats


def combine_stats(
    parts: Tensor,  # (parts, rows, 2 to 4) fp64, of different columns
    *,
    moment: bool = False,
    squares: bool = False,
) -> Tensor:  # (rows, 2 to 4) fp64
    """The statistics of all these columns together. No collective.

    With `M = max_i m_i` and `w_i = exp(m_i - M)`: `S = sum_i w_i s_i`, the moment `sum_i w_i (u_i + (m_i - M) s_i)` and
    the squares `sum_i w_i^2 q_i`; the online softmax of Milakov and Gimelshein (arXiv:1805.02867), with its moment.
    """
    if parts.shape[0] == 1:
        return parts[0]
    maximum = parts[:, :, 0].amax(dim=0)
    shift = parts[:, :, 0] - maximum.masked_fill(maximum == -torch.inf, 0.0)
    weight = shift.exp()
    columns = [maximum, (weight * parts[:, :, 1]).sum(dim=0)]
    if moment:
        # A part without columns has weight 0 and shift -inf, whose product would be NaN.
        shifted = torch.addcmul(parts[:, :, 2], shift.clamp(min=LEAST_EXPONENT), parts[:, :, 1])
        columns.append((weight * shifted).sum(dim=0))
    if squares:
        columns.append((weight.square() * parts[:, :, -1]).sum(dim=0))
    return torch.stack(columns, dim=1)
