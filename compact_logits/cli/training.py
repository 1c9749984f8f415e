"""A few optimiser steps of policy training on one rank, over one of two ways from hidden states to log-probs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from compact_logits.cli.cpu_model import sum_gradients
from compact_logits.cli.full_path import dense_log_probs
from compact_logits.cli.largest_logits import LargestLogits
from compact_logits.cli.microbatch import MicroBatch
from compact_logits.errors import RefusedError

__all__ = ["CompactPath", "FullPath", "Settings", "Training", "train"]


@dataclass(frozen=True)
class Settings:
    """The recipe. The loss is GRPO's clipped surrogate with an entropy bonus, averaged over the counted tokens."""

    steps: int
    temperature: float = 0.8
    learning_rate: float = 1e-3
    clip: float = 0.2
    entropy_coefficient: float = 0.01
    chunk_bytes: int | None = None


@dataclass
class Training:
    """What came of it, on one rank."""

    losses: list[float] = field(default_factory=list)  # per step
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # per step
    seconds: float = 0.0  # the log-prob pass and all steps
    largest_bytes: int = 0
    largest_shape: tuple[int, ...] = ()
    largest_dtype: str = ""


class FullPath:
    """Logits of every row, and from them log-prob and entropy of every row."""

    def __init__(self, model: Any, group: dist.ProcessGroup, settings: Settings) -> None:
        self._model, self._group, self._temperature = model, group, settings.temperature

    def __enter__(self) -> FullPath:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:  # log_probs (rows,), entropy (rows,)
        logits = self._model(batch.tokens, batch.positions, None, packed_seq_params=batch.packed_seq_params)
        rows = rearrange(logits, "1 rows vocab -> rows vocab")
        return dense_log_probs(rows, batch.labels, group=self._group, temperature=self._temperature)


class CompactPath:
    """The same model with the compact head, attached for as long as the context lasts."""

    def __init__(self, model: Any, group: dist.ProcessGroup, settings: Settings) -> None:
        self._model, self._settings = model, settings

    def __enter__(self) -> CompactPath:
        from compact_logits.megatron import attach

        attach(self._model)
        return self

    def __exit__(self, *_: object) -> None:
        from compact_logits.megatron import detach

        detach(self._model)

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:  # log_probs (rows,), entropy (rows,)
        from compact_logits.megatron import Request, mark

        request = Request(
            batch.selection,
            temperature=self._settings.temperature,
            entropy="loss",
            chunk_bytes=self._settings.chunk_bytes,
        )
        scalars = self._model(
            batch.tokens,
            batch.positions,
            None,
            packed_seq_params=batch.packed_seq_params,
            loss_mask=mark(batch.loss_mask.clone(), request),
        )
        if not request.compact:
            reason = "the head never saw the request" if request.outcome is None else request.outcome.reason
            raise RefusedError(f"the compact path did not run: {reason}; there is nothing to compare")
        log_probs, entropy = rearrange(scalars, "1 rows scalar -> scalar rows").unbind()
        return log_probs, entropy


def train(
    make_path: type[FullPath] | type[CompactPath],
    model: Any,
    group: dist.ProcessGroup,  # tensor parallel
    batches: list[MicroBatch],
    settings: Settings,
    vocab_local: int,
    on_batch: Callable[[], None] = lambda: None,
) -> Training:
    """Take the old log-probs, then `settings.steps` AdamW steps, each over all `batches`; the model ends up trained.

    First the longest micro-batch is passed once with an eye on its tensors, outside the clock and without a step.
    `on_batch` is called after every pass of a micro-batch: once for that, and `steps + 1` times for each.
    """
    training = Training()
    counted = sum(int((batch.loss_mask != 0).sum()) for batch in batches)
    scale = 1.0 / max(counted, 1)
    with make_path(model, group, settings) as path:
        weight = next(p for name, p in model.named_parameters() if name.endswith("output_layer.weight"))
        longest = max(batches, key=lambda batch: batch.tokens.shape[1])
        with LargestLogits(vocab_local, weight) as largest:
            _loss(path(longest), None, longest, settings, scale).backward()
        model.zero_grad(set_to_none=True)
        training.largest_bytes, training.largest_shape = largest.nbytes, largest.shape
        training.largest_dtype = largest.dtype
        on_batch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
        start = time.perf_counter()
        old = []
        with torch.no_grad():
            for batch in batches:
                old.append(path(batch)[0])
                on_batch()
        for _ in range(settings.steps):
            total = 0.0
            for batch, old_log_probs in zip(batches, old, strict=True):
                loss = _loss(path(batch), old_log_probs, batch, settings, scale)
                loss.backward()
                total += loss.item()
                on_batch()
            sum_gradients(model)
            training.losses.append(total)
            training.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        training.seconds = time.perf_counter() - start
    return training


def _loss(
    new: tuple[Tensor, Tensor],  # log_probs (rows,), entropy (rows,)
    old_log_probs: Tensor | None,  # (rows,)
    batch: MicroBatch,
    settings: Settings,
    scale: float,
) -> Tensor:  # scalar
    """One micro-batch's share of the loss. Rows that do not count are taken out before any arithmetic, not multiplied
    by 0, so that nothing they hold can reach it."""
    counts = rearrange(batch.loss_mask != 0, "1 rows -> rows")
    log_probs, entropy = new[0][counts], new[1][counts]
    old = log_probs.detach() if old_log_probs is None else old_log_probs[counts]
    advantages = batch.advantages[counts]
    ratio = (log_probs - old).exp()
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    return -(surrogate + settings.entropy_coefficient * entropy).sum() * scale
