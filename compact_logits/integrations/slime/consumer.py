"""The wrapper of slime's log-prob function, which reads the head's scalars instead of logits."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compact_logits.errors import InputError, RefusedError
from compact_logits.integrations.slime.batch import TokenList
from compact_logits.integrations.slime.passes import rollout_temperature
from compact_logits.megatron import HeadMetrics, Outcome, Request

__all__ = ["log_probs_wrapper"]

logger = logging.getLogger("compact_logits")

_NOT_REACHED = (
    "the model's head never saw the request: a wrapper has made a loss mask of its own, or the model's class does not "
    "go through GPTModel._postprocess"
)


def log_probs_wrapper(
    original: Callable[..., Any],
    redistribute: Callable[..., None],  # slime's own exchange from contiguous to zigzag context parallelism
    metrics: HeadMetrics,
) -> Callable[..., Any]:
    """Wrap slime's `get_log_probs_and_entropy`: the same result, from the head's scalars where the compact path ran.

    Where it did not, the first argument holds ordinary logits and the original reads them. The request's outcome
    decides, never the shape. A request that never reached the head is counted in `metrics` as a fallback and logged
    once, or raised as `RefusedError` if the request is strict. Raises `InputError` if this call reads something else
    than was requested, and if the first argument is not the tensor that the head returned.
    """
    warned = False

    def fall_back(request: Request) -> None:
        nonlocal warned
        request.outcome = Outcome("full", _NOT_REACHED)
        metrics.record(request)
        if request.strict:
            raise RefusedError(f"COMPACT_LOGITS=strict: {_NOT_REACHED}; set COMPACT_LOGITS=1 to let the full path run")
        if not warned:
            warned = True
            logger.warning("full path: %s", _NOT_REACHED)

    def get_log_probs_and_entropy(
        logits: Tensor,  # (1, rows, 2) fp32 log-prob and entropy, or (1, rows, vocab_local) logits
        *,
        args: Namespace,
        unconcat_tokens: list[Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
        with_entropy: bool = False,
        non_loss_data: bool = True,
        top_p_token_ids: Any = None,
        top_p_token_offsets: Any = None,
    ) -> tuple[Tensor, dict[str, list[Tensor]]]:
        request = unconcat_tokens.request if isinstance(unconcat_tokens, TokenList) else None
        if request is not None and request.outcome is None:
            fall_back(request)
        if request is None or not request.compact:
            return original(
                logits,
                args=args,
                unconcat_tokens=unconcat_tokens,
                total_lengths=total_lengths,
                response_lengths=response_lengths,
                with_entropy=with_entropy,
                non_loss_data=non_loss_data,
                top_p_token_ids=top_p_token_ids,
                top_p_token_offsets=top_p_token_offsets,
            )
        assert isinstance(unconcat_tokens, TokenList)
        _check_consumer(logits, request, args, with_entropy=with_entropy, top_p=top_p_token_ids is not None)
        log_prob, entropy = logits[0].unbind(dim=-1)
        result = {"log_probs": unconcat_tokens.layout.to_responses(log_prob)}
        if with_entropy:
            # A metric must not be in the graph: slime's contiguous exchange would add a backward collective.
            wanted = entropy if request.entropy == "loss" else entropy.detach()
            result["entropy"] = unconcat_tokens.layout.to_responses(wanted)
        if args.allgather_cp:
            redistribute(
                result,
                logits_local_len=logits.shape[1],
                total_lengths=total_lengths,
                response_lengths=response_lengths,
            )
        return torch.empty((0,), device=logits.device), result

    get_log_probs_and_entropy.__wrapped__ = original  # type: ignore[attr-defined]
    return get_log_probs_and_entropy


def _check_consumer(logits: Tensor, request: Request, args: Namespace, *, with_entropy: bool, top_p: bool) -> None:
    rows = request.selection.num_rows
    if not request.answered_by(logits):
        raise InputError(
            f"the head has computed its scalars, but the loss was given another tensor, {tuple(logits.shape)} of "
            f"{logits.dtype}; hand on what the model returned, or unset COMPACT_LOGITS if something must change it"
        )
    if tuple(logits.shape) != (1, rows, 2) or logits.dtype != torch.float32:
        raise InputError(f"needed the head's fp32 (1, {rows}, 2), got {tuple(logits.shape)} of {logits.dtype}")
    temperature = rollout_temperature(args)
    if temperature != request.temperature:
        raise InputError(f"the head was asked at temperature {request.temperature}, the loss reads at {temperature}")
    needs_graph = with_entropy and getattr(args, "entropy_coef", 0.0) != 0 and torch.is_grad_enabled()
    if (with_entropy and request.entropy == "none") or (needs_graph and request.entropy != "loss"):
        wanted = "loss" if needs_graph else "metric"
        raise InputError(f"the head was asked for entropy={request.entropy!r}, the loss reads entropy={wanted!r}")
    if top_p != (request.top_p is not None):
        asked, read = ("without", "with") if top_p else ("with", "without")
        raise InputError(f"the head was asked {asked} the recorded top-p sets, the loss reads {read} them")
