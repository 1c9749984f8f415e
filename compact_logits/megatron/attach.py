"""Attach a compact head to one model, or detach it."""

from __future__ import annotations

from types import MethodType
from typing import Any

from megatron.core.models.gpt import GPTModel

from compact_logits.errors import PatchError
from compact_logits.megatron.metrics import HeadMetrics
from compact_logits.megatron.postprocess import postprocess_wrapper
from compact_logits.megatron.rank_check import forget_head
from compact_logits.patching import MARKER

__all__ = ["attach", "attached", "detach", "gpt_model_of", "metrics_of"]


def gpt_model_of(model: Any) -> GPTModel:
    """The GPTModel inside wrappers (DDP, mixed precision, a vision-language model's `language_model`).

    Raises `PatchError` where there is none.
    """
    inner = model
    while not isinstance(inner, GPTModel):
        following = getattr(inner, "module", None) or getattr(inner, "language_model", None)
        if following is None:
            raise PatchError(
                f"needed a megatron-core GPTModel or a wrapper of one, got {type(model).__name__} "
                f"around {type(inner).__name__}; such a model keeps the full path"
            )
        inner = following
    return inner


def attached(model: Any) -> bool:
    """Whether `attach` has wrapped this model instance."""
    return hasattr(vars(gpt_model_of(model)).get("_postprocess"), MARKER)


def attach(model: Any) -> None:
    """Let the head of this model, and of no other, compute the requests that loss masks carry (`mark`).

    A forward whose loss mask is marked then returns one fp32 `(batch, rows, 2)` tensor, log-prob and entropy of every
    row of this context-parallel rank, the same on every tensor-parallel rank (a third scalar, `sum_p2`, if requested);
    every other forward is as before.
    A second `attach` does nothing, and neither does one after an integration has wrapped the class. Raises
    `PatchError` for a model that is no GPTModel, for a version of Megatron whose signatures are not the proven ones,
    and where somebody else has replaced the model's `_postprocess`.
    """
    inner = gpt_model_of(model)
    if attached(inner) or hasattr(type(inner)._postprocess, MARKER):
        return
    foreign = vars(inner).get("_postprocess")
    if foreign is not None:
        name = getattr(foreign, "__qualname__", type(foreign).__name__)
        raise PatchError(
            f"the _postprocess of this {type(inner).__name__} is replaced already, by {name}; undo that first"
        )
    wrapper = postprocess_wrapper(type(inner)._postprocess)
    setattr(wrapper, MARKER, True)
    # The instance's own attribute, so that a critic of the same class stays untouched.
    object.__setattr__(inner, "_postprocess", MethodType(wrapper, inner))


def detach(model: Any) -> None:
    """Undo `attach`; does nothing for a model that is not attached. Attached again, its ranks compare its head anew."""
    if attached(model):
        inner = gpt_model_of(model)
        del vars(inner)["_postprocess"]
        forget_head(getattr(inner, "output_layer", None))


def metrics_of(model: Any) -> HeadMetrics:
    """The metrics of this model's head; of all models of the class where an integration wrapped the class.

    `metrics_of(model).take()` after each step gives that step's metrics. Raises `PatchError` for a model that is not
    attached.
    """
    inner = gpt_model_of(model)
    counted = getattr(inner._postprocess, "metrics", None)
    if not isinstance(counted, HeadMetrics):
        raise PatchError(f"this {type(inner).__name__} has no metrics: its head is not attached; call attach first")
    return counted
