"""One call of `get_logprobs` on the compact path: its labels, the request to the head, and the log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from compact_logits.config import Config
from compact_logits.errors import InputError
from compact_logits.integrations.megatron_rl.marks import Mark, mark_of
from compact_logits.megatron.output_processor import output_processor
from compact_logits.megatron.rank_check import host_mask, tensor_parallel_group
from compact_logits.megatron.request import Request
from compact_logits.rows import RowSelection

__all__ = ["LogProbsCall", "current_call"]

_current: ContextVar[LogProbsCall | None] = ContextVar("compact_logits_megatron_rl_call", default=None)


def current_call() -> LogProbsCall | None:
    """The call of `get_logprobs` that this thread is in, if it is one that takes the compact path."""
    return _current.get()


class LogProbsCall:
    """`get_logprobs` itself is unchanged: a forward pre-hook adds Megatron's output processor to the model's call."""

    def __init__(
        self,
        tokens: Tensor,  # (batch, sequence) int64
        config: Config,
    ) -> None:
        self._mark: Mark = mark_of(tokens)
        self._config = config
        # Without context parallelism the last position's log-prob is cut off, and its label never read.
        self._labels = torch.cat([tokens[:, 1:], tokens[:, -1:]], dim=1)  # (batch, local sequence)
        self._keep = self._keep_of_all(tokens)  # (batch, local sequence) bool
        self._request: Request | None = None

    @contextmanager
    def running(self, model: torch.nn.Module) -> Iterator[None]:
        """Within the context, `current_call()` is this call, and forwards of `model`, a GPTModel, carry its request."""
        token = _current.set(self)
        try:
            with model.register_forward_pre_hook(self._add_request, with_kwargs=True):
                yield
        finally:
            _current.reset(token)

    def cut(
        self,
        local_labels: Tensor,  # (batch, local sequence), the label of every position of this context-parallel rank
        positions: Tensor,  # (local sequence,) int64, their positions in the whole sequence
    ) -> None:
        """Use the labels and positions to which `get_logprobs` has cut the sequence for context parallelism."""
        self._labels = local_labels
        self._keep = self._keep.index_select(1, positions.to(self._keep.device))

    def answer(
        self,
        output: Tensor,  # (batch, local positions, 2), of the model
        index: Tensor,  # (batch, local positions) int64
    ) -> Tensor:  # (batch, local positions) fp32
        """The log-probs that `get_logprobs` would now compute from logits.

        Raises `InputError` if the head has not computed them, since a log-prob of the gathered path, in another dtype,
        must not be compared with one of this path.
        """
        outcome = None if self._request is None else self._request.outcome
        if outcome is None or outcome.path != "compact":
            reason = "its output processor was never called" if outcome is None else outcome.reason
            raise InputError(
                f"get_logprobs takes the compact path for this model, but the output layer did not answer: {reason}; "
                f"unset COMPACT_LOGITS, since log-probs of two paths must not meet in one ratio"
            )
        if tuple(output.shape) != (*index.shape, 2):
            raise InputError(
                f"needed one answer for each of the {tuple(index.shape)} labels, got {tuple(output.shape)}; "
                f"this version's get_logprobs is not the proven one"
            )
        return output[..., 0].contiguous()

    def _keep_of_all(self, tokens: Tensor) -> Tensor:
        mask = self._mark.loss_mask
        counted = torch.ones(tokens.shape[0], tokens.shape[1] - 1, dtype=torch.bool) if mask is None else mask != 0
        return F.pad(counted, (0, 1), value=False)

    def _add_request(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch, config = self._labels.shape[0], self._config
        labels = rearrange(self._labels, "batch position -> (position batch)")
        on_device = rearrange(self._keep, "batch position -> (position batch)").to(labels.device)
        group = tensor_parallel_group() if config.check_ranks is not False else None
        settings = (batch, self._mark.temperature, config.fp32_logits)
        keep, largest_id = host_mask(on_device, lambda: labels, settings, group)
        self._request = Request(
            RowSelection.build(keep, torch.arange(keep.shape[0], device="cpu"), labels),
            batch=batch,
            temperature=self._mark.temperature,
            chunk_bytes=config.chunk_bytes,
            fp32_logits=config.fp32_logits,
            check_ranks=config.check_ranks,
            largest_id=largest_id,
        )
        processor = {"output_processor": output_processor, "output_processor_context": (model, self._request)}
        return args, {**kwargs, **processor}
