"""From slime's micro-batch to a request: lengths, masks and tokens become the rows that count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compact_logits.config import Config
from compact_logits.errors import LayoutError
from compact_logits.integrations.slime.passes import Pass
from compact_logits.integrations.slime.replay import top_p_mask
from compact_logits.megatron import Request
from compact_logits.megatron.kept_rows import ContextShare
from compact_logits.megatron.rank_check import host_mask, tensor_parallel_group
from compact_logits.megatron.request import set_request
from compact_logits.rows import Layout, RowSelection, contiguous, packed, zigzag

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CheckedIterator", "TokenList", "mark_batch"]


class TokenList(list[Tensor]):
    """slime's list of token tensors, carrying the micro-batch's request to the function that reads the output."""

    request: Request
    layout: Layout


class CheckedIterator:
    """slime's data iterator; raises `LayoutError` for a micro-batch whose masks and lengths disagree.

    It waits for the device once for each all-response sample whose mask is on the device.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        batch: dict[str, Any] = self._iterator.get_next(keys)
        masks, totals, responses = (batch.get(key) for key in ("loss_masks", "total_lengths", "response_lengths"))
        if masks is None or totals is None or responses is None:
            return batch
        if not len(masks) == len(totals) == len(responses) == len(batch["tokens"]):
            raise LayoutError(
                f"the micro-batch has {len(batch['tokens'])} token lists, {len(masks)} loss masks, {len(totals)} total "
                f"and {len(responses)} response lengths; each sample needs one of each"
            )
        for sample, (mask, total, response) in enumerate(zip(masks, totals, responses, strict=True)):
            if mask.shape[0] != response:
                raise LayoutError(
                    f"sample {sample}: the loss mask has {mask.shape[0]} entries and the response {response} tokens; "
                    f"give every response token one entry"
                )
            if response == total and response and bool(mask[0] != 0):
                raise LayoutError(
                    f"sample {sample}: the response starts at the sequence's first token, which no row predicts, but "
                    f"its loss mask counts it; mask it out or give the sample a prompt"
                )
        return batch


def mark_batch(
    batch: dict[str, Any],
    pass_: Pass,
    config: Config,
    *,
    allgather_cp: bool,
    cp_rank: int,
    cp_size: int,
    cp_group: ProcessGroup | None = None,
) -> None:
    """Build the request of one micro-batch, attach it to its loss mask for the model and to its token list for the
    consumer.

    One wait for the device: the aligned loss mask is copied to the host, and with it what the tensor-parallel ranks
    compare (`host_mask`); another if `config` balances rows over `cp_group`, and those of `top_p_mask`.
    Collectives: one all-gather of 64 bytes a rank over the tensor-parallel group, if it has more than one rank and
    `config.check_ranks` is not False.
    """
    lengths = (batch["total_lengths"], batch["response_lengths"], batch["tokens"].shape[1])
    cut = contiguous if allgather_cp else zigzag
    layout = packed(*lengths) if cp_size == 1 else cut(*lengths, cp_rank, cp_size)
    tokens = batch["unconcat_tokens"]
    joined = layout.join_tokens(tokens)
    group = tensor_parallel_group() if config.check_ranks is not False else None
    settings = (*lengths, pass_, config.fp32_logits, config.cp_balance)
    ids, offsets = batch.get("rollout_top_p_token_ids"), batch.get("rollout_top_p_token_offsets")
    if not pass_.replays_top_p or ids is None or offsets is None:  # slime itself raises where one of the two is missing
        ids = offsets = None
    recorded = [] if ids is None or offsets is None else [*ids, *offsets]
    on_device = batch["full_loss_masks"][0] != 0
    keep, largest_id = host_mask(on_device, lambda: layout.labels(joined), settings, group, recorded=recorded)
    stray = (keep & ~layout.predicts).nonzero()
    if stray.numel():
        raise LayoutError(
            f"row {int(stray[0])} is in the loss mask but predicts no response token; the loss mask must be aligned to "
            f"the row before the token"
        )
    selection = RowSelection.build(keep, layout.label_source, joined)
    top_p = None if ids is None or offsets is None else top_p_mask(ids, offsets, layout, selection)
    share = None
    if config.cp_balance and cp_size > 1 and top_p is None and cp_group is not None:
        layouts = [cut(*lengths, rank, cp_size) for rank in range(cp_size)]
        share = _share(batch["loss_masks"], joined, layouts, cp_group)
    request = Request(
        selection=selection,
        share=share,
        temperature=pass_.temperature,
        entropy=pass_.entropy,
        top_p=top_p,
        chunk_bytes=config.chunk_bytes,
        fp32_logits=config.fp32_logits,
        check_ranks=config.check_ranks,
        largest_id=largest_id,
        strict=config.mode == "strict",
    )
    carrier = TokenList(tokens)
    carrier.request, carrier.layout = request, layout
    batch["unconcat_tokens"] = carrier
    batch["full_loss_masks"] = set_request(batch["full_loss_masks"], request)


def _share(
    loss_masks: Sequence[Tensor],  # per sample (response,)
    tokens: Tensor,  # (tokens,), all sequences one after another
    layouts: Sequence[Layout],  # of every context-parallel rank
    cp_group: ProcessGroup,
) -> ContextShare:
    lengths = list(layouts[0].response_lengths)
    masks = torch.cat(list(loss_masks)).cpu().split(lengths) if lengths else ()
    selections = [RowSelection.build(each.rows_of_masks(masks), each.label_source, tokens) for each in layouts]
    return ContextShare(cp_group, tuple(selections))
