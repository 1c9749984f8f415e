"""Compare the requests of the tensor-parallel ranks, and the states of their heads.

Requests are compared before the model's forward, where the host waits for the loss mask anyway. The state of the head
is compared at its first call with a request. If it changes later on a rank, that rank raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from megatron.core import parallel_state
from torch import Tensor

from compact_logits.engine.kernels import verdict
from compact_logits.engine.rank_check import (
    check_ids,
    digest,
    fingerprint,
    gather_facts,
    id_bounds,
    raise_difference,
    rank_message,
    use_same_kernels,
)
from compact_logits.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from compact_logits.megatron.request import Request

__all__ = ["check_head", "check_request", "forget_head", "host_mask", "tensor_parallel_group"]

_Facts = Mapping[str, int | Tensor]

# Of each head, what was compared in its first compact call with and without gradients.
_HEADS: WeakKeyDictionary[Any, dict[bool, dict[str, object]]] = WeakKeyDictionary()


def tensor_parallel_group() -> ProcessGroup | None:
    """Megatron's tensor-parallel group, None where there is none or it has one rank."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    group: ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group if group.size() > 1 else None


def check_request(request: Request, group: ProcessGroup | None) -> int | None:
    """Raise the same `DisagreementError` on every rank of `group` if their requests differ.

    Returns the largest target id, None where nothing was compared. Raises `InputError` on every rank if an id is
    negative. Collectives: one all-gather of 80 bytes a rank, whose result the host waits for; none without a group.
    """
    if group is None:
        return None
    selection, top_p = request.selection, request.top_p
    # If context-parallel ranks balance their rows, the selections of all of them decide which rank projects how many.
    selections = (selection, *(() if request.share is None else request.share.selections))
    of_top_p = [torch.zeros(0)] if top_p is None else [top_p.ids, top_p.row_of, top_p.recorded]
    settings = (request.batch, request.entropy, request.sum_p2, request.vocab_size, request.fp32_logits)
    facts: _Facts = {
        "the number of rows": selection.num_rows,
        "the number of kept rows": selection.kept,
        "whether gradients are on": int(torch.is_grad_enabled()),
        "the entropy, batch size, logits' dtype or vocabulary size": fingerprint(*settings),
        "the place of the kept rows": torch.stack([digest(each.host_indices) for each in selections]).sum(),
        "the target ids": digest(selection.targets),
        "the temperature": digest(torch.as_tensor(request.temperature, dtype=torch.float64)),
        "the recorded top-p sets": torch.stack([digest(each) for each in of_top_p]).sum(),
    }
    values = [*id_bounds(selection.targets), *facts.values()]
    return _largest_id(facts, gather_facts(group, values, selection.targets.device))


def host_mask(
    keep: Tensor,  # (rows,) bool
    labels: Callable[[], Tensor],  # (rows,) int64, on the device of `keep`: the id that each row predicts
    settings: tuple[object, ...],  # their repr is compared
    group: ProcessGroup | None,
    *,
    recorded: Sequence[Any] = (),  # the recorded top-p sets: lists or tensors of integers
) -> tuple[Tensor, int | None]:  # keep on the CPU; the largest id of a kept row, None where nothing was compared
    """Copy the mask of the kept rows to the host, and compare the arguments of the ranks of `group`.

    One wait for the device, for both. Errors and collectives as `check_request`, but 64 bytes a rank.
    """
    if group is None:
        return keep.cpu(), None
    chosen = torch.where(keep, labels(), 0)
    facts: _Facts = {
        "the number of rows": keep.shape[0],
        "whether gradients are on": int(torch.is_grad_enabled()),
        "the temperature, entropy, batch size or another setting": fingerprint(*settings),
        "the place of the kept rows": digest(keep),
        "the target ids": digest(chosen),
        "the recorded top-p sets": digest(torch.stack([digest(torch.as_tensor(each)) for each in recorded or [0]])),
    }
    message = rank_message(group, [*id_bounds(chosen), *facts.values()], keep.device)
    both = torch.cat([message.flatten().view(torch.uint8), keep.view(torch.uint8)]).cpu()
    received, host_keep = both[: 8 * message.numel()].view(torch.int64), both[8 * message.numel() :]
    of_ranks = list(zip(*received.view(message.shape).tolist(), strict=True))
    return host_keep.view(torch.bool), _largest_id(facts, of_ranks)


def _largest_id(facts: _Facts, of_ranks: list[tuple[int, ...]]) -> int:
    least, largest, *others = of_ranks
    raise_difference(facts, others)
    check_ids(least[0], 0, 1)
    return largest[0]


def forget_head(
    head: Any,  # a ColumnParallelLinear
) -> None:
    """Let the next call of this head with a request compare the ranks anew."""
    if head is not None:  # as on all pipeline stages but the last
        _HEADS.pop(head, None)


def check_head(
    head: Any,  # a ColumnParallelLinear
    hidden: Tensor,  # (sequence / tensor-parallel size, batch, hidden)
    weight: Tensor | None,  # (vocab_local, hidden)
    request: Request,
    refusal: str | None,  # why this rank keeps the full path
) -> None:
    """Raise the same `DisagreementError` on every tensor-parallel rank if the states of their heads differ.

    The state is compared at the head's first request with gradients and at its first one without. If it changes later,
    this rank raises `InputError`: it cannot take the full path, since the others are in a collective already. A rank
    whose Triton kernels are not proven makes all use the torch kernels. Raises `InputError` on every rank where the
    request has an id that no rank has.
    Collectives: at these first calls one all-gather of 48 bytes a rank, whose result the host waits for; none where
    there is one rank or the request asks for no check.
    """
    group = getattr(head, "tp_group", None)  # a head of another type, which is refused, has none
    if request.check_ranks is False or group is None or group.size() == 1:
        return
    state: dict[str, object] = {
        "whether the full path is kept": refusal is not None,
        "the dtype of the hidden states": hidden.dtype,
        "whether the hidden states need a gradient": hidden.requires_grad,
        "whether the weight needs a gradient": weight is not None and weight.requires_grad,
        "whether the weight has a main_grad": getattr(weight, "main_grad", None) is not None,
    }
    seen = _HEADS.setdefault(head, {})
    before = seen.get(torch.is_grad_enabled())
    if before is None:
        facts = {name: fingerprint(value) for name, value in state.items()}
        proven = verdict(hidden.device).proven
        *of_ranks, kernels = gather_facts(group, [*facts.values(), int(proven)], hidden.device)
        raise_difference(facts, of_ranks)
        use_same_kernels(hidden.device, kernels)
        before = seen[torch.is_grad_enabled()] = state
    for name, value in state.items():
        if value != before[name]:
            raise InputError(
                f"{name} has changed since this head's first compact call, from {before[name]} to {value}"
                f"{f' ({refusal})' if refusal else ''}, and the other tensor-parallel ranks cannot know; keep it as it "
                f"was, or detach and attach the model on every rank after the change"
            )
    if request.largest_id is not None and refusal is None:  # a refused head may have no output_size
        check_ids(0, request.largest_id, head.output_size if request.vocab_size is None else request.vocab_size)
