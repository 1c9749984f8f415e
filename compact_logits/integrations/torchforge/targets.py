"""The ids whose log-probs torchforge wants, and the form in which it wants them back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compact_logits.engine import validation
from compact_logits.engine.dtensor import VocabPlacement
from compact_logits.engine.slices import accumulation_dtype
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.errors import InputError
from compact_logits.scorers.log_prob_scorer import LogProbScorer, inverse_temperatures

__all__ = ["Targets", "aligned_window", "check_settings", "log_prob_scorer", "warn_of_compile", "window_settings"]

logger = logging.getLogger("compact_logits")

# The default `ignore_index` of `torch.nn.functional.cross_entropy`, which torchforge calls.
_IGNORED = -100


@dataclass(frozen=True)
class Targets:
    """`ids`: this rank's own, legal ones only, those that `ignored` marks being replaced by 0."""

    ids: Tensor  # (local batch, target positions) int64, on the logits' device
    ignored: Tensor  # (local batch, target positions) bool
    given: Tensor
    placement: VocabPlacement | None

    @classmethod
    def of(
        cls,
        input_ids: Tensor,  # (batch, target positions)
        placement: VocabPlacement | None,
        vocab: int,
        device: torch.device,
    ) -> Targets:
        """Raise `InputError` unless `input_ids` has two dimensions and holds ids of the vocabulary. No collective.

        Host values are checked against the whole vocabulary, so that every rank of its mesh axis raises alike.
        """
        validation.check_tensor("input_ids", input_ids)
        # An empty list makes a tensor of floats.
        integer = not (input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool)
        if input_ids.dim() != 2 or (input_ids.numel() and not integer):
            raise InputError(
                f"needed integer input_ids (batch, target positions), got {tuple(input_ids.shape)} of {input_ids.dtype}"
            )
        if placement is None and isinstance(input_ids, DTensor):
            raise InputError("input_ids is a DTensor and the other input is a plain tensor; pass both in the same form")
        local = input_ids if placement is None else placement.local_rows(input_ids, "input_ids")
        ids = local.to(device, torch.int64)
        ignored = ids == _IGNORED
        ids = ids.masked_fill(ignored, 0)
        validation.check_row_ids(ids, ids.shape, VocabShard(0, vocab), "input_ids")
        return cls(ids, ignored, input_ids, placement)

    def returned(
        self,
        log_probs: Tensor,  # (local batch, target positions)
    ) -> Tensor:  # (batch, target positions)
        """Zero at ignored ids; on the device of the given ids, and a DTensor where they are one."""
        kept = log_probs.masked_fill(self.ignored, 0.0)
        if isinstance(self.given, DTensor):
            assert self.placement is not None
            return self.placement.shared_rows(kept, self.given)
        return kept.to(self.given.device)


def aligned_window(
    shape: Sequence[int],  # batch, positions, ...
    ids_shape: Sequence[int],  # batch, target positions
    align: bool,
    name: str,
) -> slice:
    """The positions that predict the ids. Raises `InputError` where there are not enough, or none to spare."""
    batch, positions = shape[:2]
    ids_batch, wanted = ids_shape
    if batch != ids_batch:
        raise InputError(
            f"{name} has {batch} sequences on this rank and input_ids {ids_batch}; plain ids are this rank's own rows, "
            f"pass a DTensor to give all"
        )
    if align and positions < wanted + 1:
        raise InputError(
            f"{name} has {positions} positions for {wanted} ids; align=True needs at least {wanted + 1}, one before "
            f"each id and the last one unused: pass the {name} of prompt and response, or align=False"
        )
    if not align and positions != wanted:
        raise InputError(f"{name} has {positions} positions for {wanted} ids; align=False needs as many of each")
    return slice(positions - wanted - 1, positions - 1) if align else slice(0, positions)


def window_settings(
    shape: Sequence[int],  # batch, positions, ...
    window: slice,
) -> dict[str, object]:
    """Which of how many positions predict the ids, as ranks that share a vocabulary compare it."""
    return {"batch": shape[0], "positions": shape[1], "align": window}


def check_settings(temperature: float, *, align: bool, compile: bool) -> None:
    """Raise `InputError` unless the temperature is positive and finite, and the two others are `True` or `False`."""
    validation.check_temperature(temperature, ())
    validation.check_flag("align", align)
    validation.check_flag("compile", compile)
    if compile:
        warn_of_compile()


@functools.cache
def warn_of_compile() -> None:
    """Log once that `compile` does nothing any more."""
    logger.warning(
        "compile no longer reaches compute_logprobs: the Triton kernels, which are the default on CUDA, replace the "
        "compiled passes over logits. The argument does nothing in this release and will be gone in the next"
    )


def log_prob_scorer(
    ids: Tensor,  # (...) int64, global
    shard: VocabShard,
    temperature: float,
    dtype: torch.dtype,  # of the logits
) -> LogProbScorer:
    """The scorer of these ids, in their order."""
    rows = ids.flatten()
    inverse = inverse_temperatures(float(temperature), rows, accumulation_dtype(dtype))
    return LogProbScorer(rows, shard, inverse, entropy="none")
