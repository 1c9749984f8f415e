"""The request of a micro-batch: what the head computes of which rows. It travels as an attribute of the loss mask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from compact_logits.engine.validation import check_chunk_bytes, check_flag, check_temperature, check_vocab_size
from compact_logits.errors import InputError
from compact_logits.host_values import as_index, describe
from compact_logits.megatron.kept_rows import ContextShare
from compact_logits.megatron.rank_check import check_request, tensor_parallel_group
from compact_logits.rows import RowSelection
from compact_logits.scorers.log_prob_scorer import Entropy, check_entropy
from compact_logits.scorers.top_p import TopPMask

__all__ = ["Outcome", "Request", "mark", "request_of", "set_request"]

_ATTRIBUTE = "_compact_logits_request"


@dataclass(frozen=True)
class Outcome:
    """What the head did with a request: the compact path, or the full path and why."""

    path: Literal["compact", "full"]
    reason: str = ""
    projected_rows: int = 0  # of the compact path: the kept ones, or this rank's part after balancing
    bytes_not_allocated: int = 0  # of logits, compared with the full path


@dataclass(eq=False)
class Request:
    """What the head is to compute of one micro-batch. The head sets `outcome`, and the consumer reads it. It is
    `None` if the head never saw the request; the model's output is then ordinary logits.

    With `batch` sequences side by side, the rows of the selection are those of `(sequence batch)`: all sequences' first
    row, then all sequences' second row. So are a shard's rows under sequence parallelism, as Megatron cuts them.

    Raises `InputError` for a setting of another type or outside its range.
    """

    selection: RowSelection
    batch: int = 1
    temperature: float | Tensor = 1.0  # scalar or (kept,)
    entropy: Entropy = "none"
    top_p: TopPMask | None = None  # of the kept rows
    sum_p2: bool = False  # a third scalar a row, the sum of squared probabilities
    share: ContextShare | None = None  # balance rows over context parallelism; scalar temperature, no top-p mask
    vocab_size: int | None = None  # ids from here on are padding, not counted; None counts every column
    chunk_bytes: int | None = None  # of logits; None for 1 GiB on a GPU, 256 MiB on a CPU
    fp32_logits: bool = False  # do not round the logits of 16-bit inputs; CUDA only
    strict: bool = False
    check_ranks: bool | None = None  # False: tensor-parallel ranks do not compare their requests
    outcome: Outcome | None = None
    largest_id: int | None = None  # of the targets, where the ranks have compared them
    _output: StorageWeakRef | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_entropy(self.entropy)
        for name in ("sum_p2", "fp32_logits", "strict"):
            check_flag(name, getattr(self, name))
        if self.check_ranks is not None:
            check_flag("check_ranks", self.check_ranks)
        check_temperature(self.temperature, (self.selection.kept,), self.selection.targets.device)
        if not isinstance(self.temperature, Tensor):
            self.temperature = float(self.temperature)
        self.vocab_size = check_vocab_size(self.vocab_size, self.selection.targets)
        self.chunk_bytes = check_chunk_bytes(self.chunk_bytes)
        batch = as_index(self.batch)
        if batch is None or batch < 1:
            raise InputError(f"batch must be a positive whole number of sequences, got {describe(self.batch)}")
        self.batch = batch
        if self.top_p is not None and self.top_p.recorded.shape[0] != self.selection.kept:
            raise InputError(
                f"the top-p mask is of {self.top_p.recorded.shape[0]} rows and {self.selection.kept} are kept; "
                f"build it for the kept rows"
            )
        if self.share is not None and (self.top_p is not None or isinstance(self.temperature, Tensor)):
            raise InputError(
                "context-parallel ranks exchange rows without a top-p mask or a temperature of their own; leave "
                "share None"
            )

    @property
    def compact(self) -> bool:
        """Whether the model's output holds this request's scalars instead of logits."""
        return self.outcome is not None and self.outcome.path == "compact"

    @property
    def reason(self) -> str:
        """Why the full path ran; empty if it did not, or if the head never saw the request."""
        return "" if self.outcome is None else self.outcome.reason

    def set_output(self, output: Tensor) -> Tensor:
        """Remember what the model's head returns for this request, and return it."""
        self._output = StorageWeakRef(output.untyped_storage())
        return output

    def answered_by(self, output: Tensor) -> bool:
        """Whether `output` has the storage of the tensor that the head returned for this request.

        True also after `detach`, which schedule plans call. False for a tensor computed from it, and for the logits of
        another model that was called with the same loss mask.
        """
        made = self._output
        return self.compact and made is not None and made.cdata == StorageWeakRef(output.untyped_storage()).cdata


def mark(
    loss_mask: Tensor,  # (1, rows)
    request: Request,
) -> Tensor:
    """Attach `request` to the loss mask that the model is called with, and return the mask.

    The attribute survives DDP, mixed-precision wrappers and schedule plans, which pass the tensor on as it is. It is
    lost by code that makes a new mask; the head then sees no request and runs the full path.
    Every tensor-parallel rank must call this, before the model: the ranks compare their requests, unless
    `request.check_ranks` is False, and all raise the same `DisagreementError` if these differ.
    Raises `InputError` where the mask has another number of rows than the selection.
    Collectives: one all-gather of 80 bytes a rank over Megatron's tensor-parallel group, whose result the host waits
    for; none for one rank or if `request.check_ranks` is False.
    """
    if loss_mask.numel() != request.selection.num_rows:
        raise InputError(
            f"the loss mask has {loss_mask.numel()} rows and the selection was built for "
            f"{request.selection.num_rows}; build it from this micro-batch's layout"
        )
    if request.check_ranks is not False:
        request.largest_id = check_request(request, tensor_parallel_group())
    return set_request(loss_mask, request)


def set_request(loss_mask: Tensor, request: Request) -> Tensor:
    """As `mark`, for a request that the ranks have compared already."""
    setattr(loss_mask, _ATTRIBUTE, request)
    return loss_mask


def request_of(loss_mask: object) -> Request | None:
    """The request a loss mask carries, if it is a tensor that carries one."""
    return getattr(loss_mask, _ATTRIBUTE, None) if isinstance(loss_mask, torch.Tensor) else None
