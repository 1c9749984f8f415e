"""The wrapper of slime's training step, which adds the head's metrics to those that slime logs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from compact_logits.integrations.slime.passes import current_pass
from compact_logits.megatron import HeadMetrics

__all__ = ["step_wrapper"]

logger = logging.getLogger("compact_logits")


def step_wrapper(original: Callable[..., Any], metrics: HeadMetrics) -> Callable[..., Any]:
    """Wrap slime's `train_one_step`: its metrics and, where the pass is compacted, the step's `HeadMetrics.metrics`.

    slime logs the returned metrics on one rank, with `train/` before each key. Only that rank also logs them as one
    line. The metrics are of that rank's own micro-batches. No collective, no device synchronisation.
    """

    def train_one_step(*args: Any, **kwargs: Any) -> Any:
        metrics.take()  # drop the counts of the passes before
        losses, grad_norm = original(*args, **kwargs)
        if current_pass() is None or not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return losses, grad_norm
        step = metrics.take()
        if _logs():
            logger.info("compact_logits: %s", step)
        return {**losses, **step.metrics()}, grad_norm

    return train_one_step


def _logs() -> bool:
    """Whether slime logs the step from this rank, which is on the last pipeline stage."""
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
