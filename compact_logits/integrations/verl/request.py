"""The settings of a call of verl's top-k loss, handed down to the vocab-parallel KL, and the results handed up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from compact_logits.config import Config
from compact_logits.engine.slices import default_budget
from compact_logits.engine.validation import check_flag
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.errors import ConfigError, InputError, RefusedError
from compact_logits.host_values import as_index, describe
from compact_logits.integrations.verl.tail_mode import TAIL_MODE, tail_mass_eps
from compact_logits.scorers.topk_kl import topk_kl

__all__ = ["Request", "forward_kl_wrapper", "topk_loss_wrapper", "vocab_parallel_kl_wrapper"]

_BATCH: ContextVar[Any] = ContextVar("compact_logits_verl_batch", default=None)
_REQUEST: ContextVar[Request | None] = ContextVar("compact_logits_verl_request", default=None)


@dataclass
class Request:
    """`chunk_rows`: verl's own bound on the tokens held at once. The KL sets `answered` and `tail`."""

    wants_tail: bool = False
    tail_mass_eps: float = 1e-6
    chunk_rows: int | None = None
    loss_mask: Tensor | None = None  # (batch, tokens) bool
    answered: bool = False
    tail: dict[str, Tensor] = field(default_factory=dict)  # (batch, tokens) each

    @classmethod
    def of(cls, loss_config: Any) -> Request:
        """Raises `ConfigError` for a chunk size that is no number of tokens, `InputError` for a switch that is none."""
        wants_tail = getattr(loss_config, "loss_mode", None) == TAIL_MODE
        chunked = getattr(loss_config, "use_chunked_topk", False)
        check_flag("use_chunked_topk", chunked)
        rows = getattr(loss_config, "chunked_topk_chunk_size", None) if chunked else None
        chunk_rows = as_index(rows)
        if rows is not None and (chunk_rows is None or chunk_rows < 1):
            raise ConfigError(
                f"chunked_topk_chunk_size must be a positive whole number of tokens, got {describe(rows)}"
            )
        return cls(
            wants_tail=wants_tail,
            tail_mass_eps=tail_mass_eps(loss_config) if wants_tail else cls.tail_mass_eps,
            chunk_rows=chunk_rows,
        )


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def topk_loss_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `compute_topk_loss`, the last function to see the micro-batch."""

    def compute_topk_loss(
        config: Any, distillation_config: Any, data: Any, student_logits: Tensor, data_format: str
    ) -> Any:
        with _set(_BATCH, data):
            return original(config, distillation_config, data, student_logits, data_format)

    return compute_topk_loss


def forward_kl_wrapper(
    original: Callable[..., Any],
    layout: ModuleType,  # where verl's functions from sequences to the rows of the logits stand
    response_rows: Callable[[Tensor, Any], Tensor],
) -> Callable[..., Any]:
    """Around Megatron's `compute_forward_kl_topk`, which knows the settings and the layout of the rows."""

    def compute_forward_kl_topk(
        student_logits: Tensor,
        teacher_topk_log_probs: Tensor,
        teacher_topk_ids: Tensor,
        config: Any,
        data_format: str,
    ) -> dict[str, Tensor]:
        request = Request.of(config.distillation_loss)
        batch = _BATCH.get()
        if batch is not None and all(name in batch for name in ("prompts", "responses", "response_mask")):
            in_sequences = _loss_mask(batch, teacher_topk_ids, response_rows)
            to_rows = layout.preprocess_thd_engine if data_format == "thd" else layout.preprocess_bshd_engine
            request.loss_mask = to_rows(in_sequences, pre_process=True)[0]
        with _set(_REQUEST, request):
            outputs: dict[str, Tensor] = original(
                student_logits, teacher_topk_log_probs, teacher_topk_ids, config, data_format
            )
        if not request.answered:
            raise RefusedError(
                "verl's compute_forward_kl_topk did not call its vocab-parallel KL; this version is not supported, "
                "unset COMPACT_LOGITS"
            )
        return {**outputs, **request.tail}

    return compute_forward_kl_topk


def vocab_parallel_kl_wrapper(config: Config) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """In place of `_VocabParallelKLDivergence.apply`: the same five tensors, without its vocabulary-sized buffers."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(
            cls: type,
            vp_logits: Tensor,  # (batch, tokens, vocab_local)
            target_topk_logps: Tensor,  # (batch, tokens, k)
            target_topk_indices: Tensor,  # (batch, tokens, k), global ids
            log_prob_min_clamp: float | None,
        ) -> tuple[Tensor, ...]:  # (batch, tokens) each
            request = _REQUEST.get() or Request()
            width, group = vp_logits.shape[-1], parallel_state.get_tensor_model_parallel_group()
            chunk_bytes = default_budget(vp_logits.device) if config.chunk_bytes is None else config.chunk_bytes
            if request.chunk_rows is not None:
                chunk_bytes = min(chunk_bytes, request.chunk_rows * width * vp_logits.element_size())
            kl = topk_kl(
                vp_logits,
                target_topk_logps,
                target_topk_indices.to(torch.int64),
                shard=VocabShard(group.rank() * width, (group.rank() + 1) * width, group),
                tail=request.wants_tail,
                log_prob_min_clamp=log_prob_min_clamp,
                tail_mass_eps=request.tail_mass_eps,
                chunk_bytes=max(chunk_bytes, 1),
                loss_mask=request.loss_mask,
                check_ranks=config.check_ranks,
            )
            request.answered = True
            request.tail = {
                name: value for name, value in zip(kl._fields[5:], kl[5:], strict=True) if value is not None
            }
            return kl.loss, kl.student_mass, kl.teacher_mass, kl.overlap_count, kl.overlap_token_advantage

        return apply

    return wrap


def _loss_mask(
    batch: Any,
    teacher_topk_ids: Any,  # nested Tensor (batch, tokens, k)
    response_rows: Callable[[Tensor, Any], Tensor],
) -> Tensor:  # (batch, tokens) bool, nested
    """Which token rows verl's consumer will read, found by sending each row's number through the consumer's own way."""
    offsets = teacher_topk_ids.offsets()
    rows = teacher_topk_ids.values().shape[0]
    numbers = response_rows(torch.arange(1, rows + 1, device=offsets.device), batch)
    mask = batch["response_mask"].bool()
    mask = mask.to_padded_tensor(False) if mask.is_nested else mask
    if mask.shape != numbers.shape:
        raise InputError(
            f"needed a response mask {tuple(numbers.shape)}, as the responses are, got {tuple(mask.shape)}; "
            f"the mask and the responses belong to different micro-batches"
        )
    # Number 0 is the padding behind a response, which no row stands for.
    read = torch.zeros(rows + 1, dtype=torch.bool, device=offsets.device)
    read[torch.where(mask, numbers, 0)] = True
    return torch.nested.nested_tensor_from_jagged(read[1:], offsets)
