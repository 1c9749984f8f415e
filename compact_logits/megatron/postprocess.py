"""The wrapper of `GPTModel._postprocess`, which the model's forward, schedule plans and model wrappers all call."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from compact_logits.errors import PatchError, RefusedError
from compact_logits.megatron.metrics import HeadMetrics
from compact_logits.megatron.output_layer import compact_output_layer
from compact_logits.megatron.output_processor import PROCESSOR_PARAMETERS, output_processor
from compact_logits.megatron.rank_check import check_head
from compact_logits.megatron.refusals import refuse_call, refuse_head, refuse_model
from compact_logits.megatron.request import Outcome, Request, request_of

__all__ = ["NEEDED_PARAMETERS", "postprocess_wrapper"]

NEEDED_PARAMETERS = ("hidden_states", "labels", "loss_mask", "runtime_gather_output", "inference_context")

logger = logging.getLogger("compact_logits")


def postprocess_wrapper(original: Callable[..., Any], metrics: HeadMetrics | None = None) -> Callable[..., Any]:
    """Wrap a GPTModel's `_postprocess` (as a function of `self` and the rest).

    A call whose loss mask carries no request goes through untouched, object for object. Where the version has the
    official output-processor contract, the wrapper only adds an output processor to the call; where it has not, the
    output layer's forward is overridden for the time of the call. A refused call runs `original` unchanged; the reason
    is in the request's outcome and is logged once, or raised as `RefusedError` if the request is strict. If the call
    raises, the request's outcome is restored. Every call with a request is counted in `metrics`, which is also an
    attribute of the wrapper.
    Raises `PatchError` where `original` lacks a parameter that this relies on.
    """
    signature = inspect.signature(original)
    missing = [name for name in NEEDED_PARAMETERS if name not in signature.parameters]
    if missing:
        raise PatchError(
            f"{original.__qualname__} has no parameter {missing[0]!r}: this version of it is not one "
            f"compact_logits is proven with; unset COMPACT_LOGITS or use a supported version"
        )
    counted = HeadMetrics() if metrics is None else metrics
    native = all(name in signature.parameters for name in PROCESSOR_PARAMETERS)
    warned: set[str] = set()

    def warn_once(message: str) -> None:
        kind = re.sub(r"\d+", "#", message)  # once, whatever the row counts in it
        if kind not in warned:
            warned.add(kind)
            logger.warning(message)

    def run(self: Any, request: Request, bound: inspect.BoundArguments) -> Tensor | None:
        """What the model returns, with the request's outcome set; `None` where `original` has not run."""
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        reason = refuse_call(self, bound.arguments, native=native)
        reason = reason or refuse_model(self) or refuse_head(self.output_layer, tied)
        if reason is not None:
            weight = self.output_layer.weight if tied is None else tied
            check_head(self.output_layer, bound.arguments["hidden_states"], weight, request, reason)
            request.outcome = Outcome("full", reason)
            return None
        result: Tensor
        if native:
            bound.arguments.update(output_processor=output_processor, output_processor_context=(self, request))
            result = original(*bound.args, **bound.kwargs)
        else:
            ordinary = _mtp_calls(self, bound.arguments)
            with compact_output_layer(self.output_layer, request, ordinary_calls=ordinary):
                result = original(*bound.args, **bound.kwargs)
        if request.outcome is None:
            seam = "output processor was accepted" if native else "output layer's forward was overridden"
            request.outcome = Outcome("full", f"the {seam} but never called")
        return result

    def _postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        request = request_of(bound.arguments.get("loss_mask"))
        if request is None or not self.post_process:
            return original(self, *args, **kwargs)
        bound.apply_defaults()
        before = request.outcome
        request.outcome = None
        try:
            result = run(self, request, bound)
        except BaseException:
            # Activation checkpointing also stops a recomputed forward by an exception, once it has what backward needs.
            request.outcome = before
            raise
        counted.record(request)
        if request.compact and result is not None:
            if self.config.mtp_num_layers:
                warn_once("multi-token prediction still builds logits of every row for its own heads")
            # The result may be a view, and pipeline schedules can free only tensors that are not views.
            return request.set_output(result if result._base is None else result.clone())
        reason = request.reason
        if request.strict:
            raise RefusedError(f"COMPACT_LOGITS=strict: {reason}; set COMPACT_LOGITS=1 to let the full path run")
        warn_once(f"full path: {reason}")
        return original(self, *args, **kwargs) if result is None else result

    _postprocess.__wrapped__ = original  # type: ignore[attr-defined]
    _postprocess.metrics = counted  # type: ignore[attr-defined]
    return _postprocess


def _mtp_calls(model: Any, arguments: dict[str, Any]) -> int:
    """How often multi-token prediction calls the output layer before the main head does."""
    predicts = (arguments.get("mtp_kwargs") or {}).get("mtp_labels") is not None
    return (model.config.mtp_num_layers or 0) if predicts else 0
