"""The patches of `megatron.rl`, and the decision whether a model takes the compact path."""

from __future__ import annotations

import importlib
import inspect
import logging
from argparse import Namespace
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from compact_logits.config import Config
from compact_logits.errors import InputError, RefusedError
from compact_logits.integrations.megatron_rl.call import LogProbsCall, current_call
from compact_logits.integrations.megatron_rl.marks import mark_of, mark_tokens
from compact_logits.integrations.megatron_rl.recipe import Refusal, inner_gpt, refusals
from compact_logits.patching import Patch, PatchSet

__all__ = ["Installation"]

logger = logging.getLogger("compact_logits")


class Installation:
    """The patches of one process. A model takes the compact path in every pass or in none; its first pass decides."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._decisions: WeakKeyDictionary[Any, tuple[Refusal, ...]] = WeakKeyDictionary()
        self._logged: set[Refusal] = set()
        rl_utils = importlib.import_module("megatron.rl.rl_utils")
        packing = importlib.import_module("megatron.rl.sequence_packing_utils")
        self._get_args: Callable[[], Namespace] = rl_utils.get_args
        self._cuts_sequences = hasattr(rl_utils, "_scatter_for_context_parallel")
        patches = [
            Patch(rl_utils, "get_logprobs", self._get_logprobs, requires=("model", "tokens", "no_grad")),
            Patch(rl_utils, "selective_log_softmax", _selective_log_softmax, requires=("logits", "index")),
            Patch(
                rl_utils,
                "compute_logprobs_batch",
                self._compute_logprobs_batch,
                requires=("model", "dtype", "pp_group"),
            ),
            Patch(packing, "load_packed_data_by_index", _load_packed_data, requires=("bin_idx", "packing_context")),
        ]
        if self._cuts_sequences:  # versions without it have no context parallelism in get_logprobs
            needed = ("tokens", "packed_seq_params", "cp_group")
            patches.append(Patch(rl_utils, "_scatter_for_context_parallel", _scatter, requires=needed))
        self.patches = PatchSet(*patches)

    def refused(self) -> list[Refusal]:
        """Why models of this process keep the gathered path, of those that have had a pass."""
        return sorted(self._logged, key=lambda refusal: refusal.reason)

    def compacts(self) -> bool:
        """Whether a model of this process takes the compact path, of those that have had a pass."""
        return not all(self._decisions.values())

    def decide(self, model: Any) -> tuple[Refusal, ...]:
        """Why this rank keeps the gathered path for `model`; empty where it takes the compact path.

        Raises `InputError` where a model that was compacted before cannot be now: the two paths' log-probs, of
        different dtypes, must not meet in one ratio.
        """
        inner = inner_gpt(model)
        before = None if inner is None else self._decisions.get(inner)
        if before:
            return before
        args = self._get_args()
        found = [*refusals(model, args), *self._of_layout(inner)]
        if before is not None and found:
            raise InputError(
                f"earlier log-probs of this model are of the compact path, which is refused now: {found[0].reason}; "
                f"{found[0].remedy}, since log-probs of two paths must not meet in one ratio"
            )
        if inner is not None:
            self._decisions[inner] = tuple(found)
        return tuple(found)

    def _of_layout(self, inner: Any) -> list[Refusal]:
        cp_group = None if inner is None else inner.pg_collection.cp
        if self._cuts_sequences or cp_group is None or cp_group.size() == 1:
            return []
        return [Refusal("this version's get_logprobs does not know context parallelism", "use Megatron-LM main")]

    def _settle(self, found: tuple[Refusal, ...]) -> bool:
        """Whether to take the compact path. Logs each reason against it once, and raises it in strict mode."""
        for refusal in found:
            if refusal not in self._logged:
                self._logged.add(refusal)
                logger.warning("gathered path: %s; %s", refusal.reason, refusal.remedy)
        if found and self.config.mode == "strict":
            reasons = "; ".join(f"{refusal.reason} ({refusal.remedy})" for refusal in found)
            raise RefusedError(f"COMPACT_LOGITS=strict: {reasons}")
        return not found

    def _get_logprobs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def get_logprobs(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            model, tokens = given["model"], given["tokens"]
            if not self._settle(self.decide(model)):
                if mark_of(tokens).temperature != 1.0:
                    raise InputError(
                        f"the tokens are marked with temperature {mark_of(tokens).temperature}, and the gathered path, "
                        f"which this model keeps, knows none; see the log for what keeps it there"
                    )
                return original(*args, **kwargs)
            inner = inner_gpt(model)
            assert inner is not None
            if not inner.post_process:
                return original(*args, **kwargs)
            with LogProbsCall(tokens, self.config).running(inner):
                return original(*args, **kwargs)

        return get_logprobs

    def _compute_logprobs_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def compute_logprobs_batch(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            found = _of_last_stage(self.decide(bound.arguments["model"]), bound.arguments)
            if self._settle(found):
                bound.arguments["dtype"] = torch.float32
            return original(*bound.args, **bound.kwargs)

        return compute_logprobs_batch


def _of_last_stage(found: tuple[Refusal, ...], arguments: dict[str, Any]) -> tuple[Refusal, ...]:
    """The refusals as on the last pipeline stage: it alone has the output layer, and the others expect its dtype.

    One broadcast of one number over the pipeline group, if it has more than one rank.
    """
    group = arguments["pp_group"]
    if group is None or group.size() == 1:
        return found
    device = next(arguments["model"].parameters()).device
    refused = torch.tensor([len(found)], device=device)
    dist.broadcast(refused, src=dist.get_global_rank(group, group.size() - 1), group=group)
    if bool(refused) == bool(found):
        return found
    if found:
        return ()
    return (Refusal("the last pipeline stage refuses its output layer", "see that rank's log"),)


def _selective_log_softmax(original: Callable[..., Any]) -> Callable[..., Any]:
    def selective_log_softmax(logits: Any, index: Any) -> Any:
        call = current_call()
        return original(logits, index) if call is None else call.answer(logits, index)

    return selective_log_softmax


def _scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    def scatter_for_context_parallel(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        call = current_call()
        if call is not None:
            *_, local_labels, cut = result
            call.cut(local_labels, cut.partition_index)
        return result

    return scatter_for_context_parallel


def _load_packed_data(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def load_packed_data_by_index(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        result = original(*args, **kwargs)
        # The same bin is marked the same for old, reference and current log-probs: its loss mask is made once.
        mark_tokens(result[0], loss_mask=given["packing_context"].packed_loss_mask[given["bin_idx"], None, 1:])
        return result

    return load_packed_data_by_index
