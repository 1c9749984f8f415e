"""slime's recorded rollout top-p sets, for the kept rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from compact_logits.errors import LayoutError
from compact_logits.rows import Layout, RowSelection
from compact_logits.scorers.top_p import TopPMask

__all__ = ["top_p_mask"]


def top_p_mask(
    token_ids: Sequence[Any],  # per sample (listed,) integers, tensor or list
    token_offsets: Sequence[Any],  # per sample (recorded + 1,): token `r` of the response kept ids[o[r]:o[r + 1]]
    layout: Layout,
    selection: RowSelection,
) -> TopPMask:
    """The top-p set of every kept row. As in slime, a response token without recorded offsets is not restricted.

    Loops over samples, never over tokens. Device synchronisation: one for each sample whose record is on the device.
    Raises `LayoutError` where the lists do not have one entry a sample, `InputError` where a span leaves its list.
    """
    if not len(token_ids) == len(token_offsets) == len(layout.response_lengths):
        raise LayoutError(
            f"needed one recorded top-p list and one offset list for each of {len(layout.response_lengths)} samples, "
            f"got {len(token_ids)} and {len(token_offsets)}"
        )
    ids = [_host(value) for value in token_ids]
    starts, stops, recorded = [], [], []
    bases = [end - each.shape[0] for end, each in zip(accumulate(each.shape[0] for each in ids), ids, strict=True)]
    for value, base, response in zip(token_offsets, bases, layout.response_lengths, strict=True):
        offsets = _host(value)[: response + 1]
        missing = response - max(offsets.shape[0] - 1, 0)
        unrecorded = torch.zeros(missing, dtype=torch.int64)
        starts += [offsets[:-1] + base, unrecorded]
        stops += [offsets[1:] + base, unrecorded]
        recorded += [torch.arange(response) < response - missing]
    row_of = layout.response_source[selection.host_indices]
    first, last = (torch.cat([torch.arange(0), *parts])[row_of] for parts in (starts, stops))
    flags = torch.cat([torch.zeros(0, dtype=torch.bool), *recorded])[row_of]
    return TopPMask.build(torch.cat([torch.arange(0), *ids]), first, last, flags)


def _host(value: Any) -> Tensor:  # (n,) int64 on the CPU
    return torch.as_tensor(value).to(device="cpu", dtype=torch.int64)
