"""The largest micro-batch whose head fits a given memory, on the gathered and on the compact path, by simulation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from compact_logits.errors import InputError
from compact_logits.host_values import as_float, describe
from compact_logits.memory import HeadBytes, HeadSize, StorageBytes, simulate

__all__ = ["Path", "Policy", "head_bytes", "largest_micro_batch"]

Path = Literal["gathered", "compact"]

_LARGEST = 4096
_SIMULATED = 16  # sequences that are run one by one


@dataclass(frozen=True)
class Policy:
    """What the memory of one rank's head depends on, for micro-batches of sequences of one length."""

    vocab: int  # padded, of all ranks
    hidden: int
    sequence: int  # positions of a sequence, or of a packed bin, on one context-parallel rank
    tp: int = 1
    sequence_parallel: bool = True
    dtype: torch.dtype = torch.bfloat16
    fused: bool = True  # the weight's gradient goes into an existing `main_grad`
    density: float = 1.0  # share of the log-probs that are selected; the gathered path computes all
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        density = as_float(self.density)
        if density is None or not 0.0 <= density <= 1.0:
            raise InputError(f"the density is a share of the log-probs, from 0 to 1, got {describe(self.density)}")
        if self.sequence < 2:
            raise InputError(f"a log-prob needs a token and the one before it, got sequences of {self.sequence}")
        self.size_of(1)

    def size_of(self, micro_batch: int) -> HeadSize:
        """The head that this many sequences make. Raises `InputError` for sizes that are none."""
        return HeadSize(
            rows=micro_batch * self.sequence,
            kept=round(self.density * micro_batch * (self.sequence - 1)),
            vocab=self.vocab,
            hidden=self.hidden,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            dtype=self.dtype,
            entropy="none",
            fused=self.fused,
            chunk_bytes=self.chunk_bytes,
        )


def head_bytes(policy: Policy, micro_batch: int, path: Path) -> HeadBytes:
    """What the actor's pass, forward and backward, holds at once from the last hidden states to the log-probs.

    The passes for old and reference log-probs hold less, and Megatron-RL gives them the same micro-batch. Needs a
    process without a process group where `policy.tp` is more than 1.
    """
    if path == "compact":
        return simulate(policy.size_of(micro_batch), "compact")
    if micro_batch <= _SIMULATED:
        return _gathered(policy, micro_batch)
    # Each further sequence adds the same, once there are enough of them that the peak no longer moves.
    most, less = _gathered(policy, _SIMULATED), _gathered(policy, _SIMULATED - 1)
    further = micro_batch - _SIMULATED
    return HeadBytes(
        forward=most.forward + further * (most.forward - less.forward),
        saved=most.saved + further * (most.saved - less.saved),
        backward=most.backward + further * (most.backward - less.backward),
    )


def largest_micro_batch(policy: Policy, path: Path, memory: int, *, bytes_per_sequence: int = 0) -> int:
    """The most sequences a micro-batch may have, up to 4096, for its head to fit `memory` bytes; 0 if none does.

    `bytes_per_sequence`: what the rest of the model holds of each sequence while the head runs, its saved activations
    for the most part.
    """

    def fits(micro_batch: int) -> bool:
        return head_bytes(policy, micro_batch, path).peak + micro_batch * bytes_per_sequence <= memory

    low, high = 0, 1
    while high <= _LARGEST and fits(high):
        low, high = high, 2 * high
    while low < _LARGEST and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@cache
def _gathered(policy: Policy, micro_batch: int) -> HeadBytes:
    """The gathered path's operators on meta tensors. Holds what `get_logprobs` of Megatron-LM d98e8a64dd holds."""
    policy.size_of(micro_batch)
    local = policy.sequence // policy.tp if policy.sequence_parallel else policy.sequence
    with StorageBytes() as counted:
        hidden = torch.empty(local, micro_batch, policy.hidden, dtype=policy.dtype, device="meta", requires_grad=True)
        weight = torch.empty(policy.vocab // policy.tp, policy.hidden, dtype=policy.dtype, device="meta")
        weight.requires_grad_(not policy.fused)
        labels = torch.zeros(micro_batch, policy.sequence - 1, dtype=torch.int64, device="meta")
        inputs = counted.live
        counted.restart_peak()
        log_probs = _log_probs(hidden, weight, labels, policy)
        forward, saved = counted.peak - inputs, counted.live - inputs
        counted.restart_peak()
        log_probs.sum().backward()
        return HeadBytes(forward=forward, saved=saved, backward=counted.peak - inputs)


def _log_probs(
    hidden: Tensor,  # (local sequence, batch, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    labels: Tensor,  # (batch, sequence - 1)
    policy: Policy,
) -> Tensor:  # (batch, sequence - 1)
    if policy.tp > 1 and policy.sequence_parallel:
        hidden = torch.cat([hidden] * policy.tp)
    logits = _MegatronLinear.apply(hidden, weight)
    if policy.tp > 1:
        logits = _GatherVocabulary.apply(logits, policy.tp)
    logits = logits.transpose(0, 1).contiguous()
    rows = zip(logits[:, :-1], labels, strict=True)
    if policy.dtype in (torch.float32, torch.float64):
        chosen = logits[:, :-1].gather(-1, labels[..., None]).squeeze(-1)
        return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row, _ in rows])
    return torch.stack([F.log_softmax(row, dim=-1).gather(-1, ids[:, None]).squeeze(-1) for row, ids in rows])


class _MegatronLinear(torch.autograd.Function):
    """Holds what Megatron's linear layer does: in backward, the incoming gradient and a contiguous one side by side."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (sequence, batch, hidden)
        weight: Tensor,  # (vocab_local, hidden)
    ) -> Tensor:  # (sequence, batch, vocab_local)
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad: Tensor,  # (sequence, batch, vocab_local)
    ) -> tuple[Tensor, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        d_hidden = grad.matmul(weight)
        rows = grad.contiguous().flatten(0, 1)
        return d_hidden, rows.t().matmul(hidden.flatten(0, 1)) if ctx.needs_input_grad[1] else None


class _GatherVocabulary(torch.autograd.Function):
    """The bytes of Megatron's gather over the last axis, between ranks that are not there."""

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,  # (sequence, batch, vocab_local)
        ranks: int,
    ) -> Tensor:  # (sequence, batch, vocab)
        ctx.ranks = ranks
        received = shard.new_empty(ranks * shard.shape[0], *shard.shape[1:])
        return torch.cat(received.chunk(ranks), dim=-1)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad: Tensor,  # (sequence, batch, vocab)
    ) -> tuple[Tensor, None]:
        return grad.chunk(ctx.ranks, dim=-1)[0].contiguous(), None
