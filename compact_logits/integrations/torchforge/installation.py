"""torchforge's `compute_logprobs` replaced wherever it was imported, and its reference model's logits left sharded."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compact_logits.config import Config
from compact_logits.engine.rank_check import compares
from compact_logits.errors import DisagreementError, InputError, RefusedError
from compact_logits.integrations.torchforge.endpoint import EndpointPatch
from compact_logits.integrations.torchforge.logits import compute_logprobs, place_logits
from compact_logits.patching import Patch, PatchSet

__all__ = ["Installation", "ShardedLogits"]

logger = logging.getLogger("compact_logits")


@dataclass(frozen=True)
class ShardedLogits:
    """What the reference model sees of its logits while only their log-probs are wanted. It gathers every DTensor; this
    is none, and anything but `compute_logprobs` that reads it fails."""

    logits: DTensor


class Installation:
    """The patches of one process. `refused`: why calls took the full path, each reason once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.refused: dict[str, None] = {}
        ops = importlib.import_module("forge.util.ops")
        reference_model = importlib.import_module("forge.actors.reference_model").ReferenceModel
        parameters = ("input_ids", "max_req_tokens", "return_logprobs")
        self.patches = PatchSet(
            Patch(
                ops,
                "compute_logprobs",
                self._compute_logprobs,
                requires=("logits", "input_ids", "temperature", "align"),
            ),
            EndpointPatch(reference_model, "forward", self._forward, requires=parameters),
        )

    def _compute_logprobs(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        # Called from losses that torchforge compiles: they break their graph here.
        @torch.compiler.disable
        def wrapper(
            logits: Tensor | ShardedLogits, input_ids: Tensor, temperature: float = 1.0, align: bool = True
        ) -> Tensor:
            given = logits.logits if isinstance(logits, ShardedLogits) else logits
            config, alone = self.config, False
            try:
                if isinstance(given, DTensor):
                    shard = place_logits(given, align).shard
                    # What this rank refuses, the others may be computing: at a later call of a group nobody compares.
                    alone = (
                        shard.sharded and config.check_ranks is not False and not compares(shard, config.check_ranks)
                    )
                return compute_logprobs(
                    given, input_ids, temperature, align, chunk_bytes=config.chunk_bytes, check_ranks=config.check_ranks
                )
            except InputError as error:
                if alone or isinstance(error, DisagreementError):
                    raise
                self._refuse(error)
            whole = logits.logits.full_tensor() if isinstance(logits, ShardedLogits) else logits
            return original(whole, input_ids, temperature, align)

        return wrapper

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if not given["return_logprobs"]:
                return await original(*args, **kwargs)
            actor = args[0]
            hook = actor.model.register_forward_hook(self._keep_sharded)
            try:
                return await original(*args, **kwargs)
            finally:
                hook.remove()

        return wrapper

    def _keep_sharded(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, DTensor):
            return output
        try:
            placement = place_logits(output, align=True)
        except InputError as error:
            self._refuse(error)
            return output
        return output if placement.axis is None else ShardedLogits(output)

    def _refuse(self, error: InputError) -> None:
        if self.config.mode == "strict":
            raise RefusedError(f"COMPACT_LOGITS=strict: {error}") from error
        reason = str(error)
        if reason not in self.refused:
            self.refused[reason] = None
            logger.warning("torchforge's own compute_logprobs takes this call: %s", reason)
