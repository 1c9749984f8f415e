"""Checks of a caller's arguments, made before any collective that depends on them.

They read shapes, dtypes and host values only, so that no rank waits for a device and all ranks raise alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.errors import InputError
from compact_logits.host_values import as_float, as_index, describe

__all__ = [
    "check_chunk_bytes",
    "check_flag",
    "check_head",
    "check_logits",
    "check_row_ids",
    "check_temperature",
    "check_tensor",
    "check_tensors",
    "check_vocab_size",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# An fp32 logit divided by less may become infinite, and its row NaN.
_LEAST_TEMPERATURE = 1e-30


def check_tensor(name: str, value: object) -> None:
    """Raise `InputError` unless `value` is a dense tensor, plain or a DTensor."""
    if not isinstance(value, Tensor):
        raise InputError(f"needed a tensor as {name}, got {describe(value)}")
    if value.layout != torch.strided or value.is_nested:
        form = "a nested tensor" if value.is_nested else f"one of {value.layout}"
        raise InputError(f"needed a dense tensor as {name}, got {form}; pass rows of one width, as {name}.to_dense()")


def check_tensors(*, bias: object = None, loss_mask: object = None, **needed: object) -> None:
    """Raise `InputError` unless each is a plain dense tensor, all on one device; `bias` and `loss_mask` may be None."""
    optional = {"bias": bias, "loss_mask": loss_mask}
    given = needed | {name: value for name, value in optional.items() if value is not None}
    devices = {}
    for name, value in given.items():
        check_tensor(name, value)
        assert isinstance(value, Tensor)
        if hasattr(value, "device_mesh"):
            raise InputError(
                f"{name} is a DTensor; pass its local tensor and the VocabShard of it, or call the functions of "
                f"compact_logits.integrations.torchforge, which take DTensors"
            )
        devices[name] = value.device
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise InputError(f"needed all tensors on one device, got {places}")


def check_head(
    hidden: Tensor,  # (rows, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    bias: Tensor | None,  # (vocab_local,)
    shard: VocabShard | None,
) -> VocabShard:
    """The weight's shard, the whole vocabulary where `shard` is `None`.

    Raises `InputError` unless the three fit a linear head, by shape and dtype, and the shard fits the weight.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise InputError(
            f"needed hidden (rows, hidden) and weight (vocab_local, hidden) with the same hidden size, got "
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}; pass the hidden states, not the logits"
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in _FLOATS:
        raise InputError(
            f"hidden and weight need one floating dtype, got {hidden.dtype} and {weight.dtype}; cast one of them"
        )
    if bias is not None and (tuple(bias.shape) != (weight.shape[0],) or bias.dtype != weight.dtype):
        raise InputError(
            f"needed a bias ({weight.shape[0]},) of {weight.dtype}, got {tuple(bias.shape)} of {bias.dtype}"
        )
    return _checked_shard(weight.shape[0], shard, "weight")


def check_logits(
    logits: Tensor,  # (..., vocab_local)
    shard: VocabShard | None,
) -> VocabShard:
    """The logits' shard, the whole vocabulary where `shard` is `None`.

    Raises `InputError` unless `logits` is floating and its last axis is as wide as the shard.
    """
    if logits.dim() < 1 or logits.dtype not in _FLOATS:
        raise InputError(f"needed floating logits (..., vocab_local), got {tuple(logits.shape)} of {logits.dtype}")
    return _checked_shard(logits.shape[-1], shard, "logits")


def _checked_shard(vocab_local: int, shard: VocabShard | None, name: str) -> VocabShard:
    if shard is not None and not isinstance(shard, VocabShard):
        raise InputError(f"needed a VocabShard or None as shard, got {describe(shard)}")
    if shard is not None and shard.size != vocab_local:
        raise InputError(
            f"the shard [{shard.start}, {shard.stop}) holds {shard.size} ids but {name} has {vocab_local}; "
            f"pass the VocabShard of this rank's own slice, or no shard where the whole vocabulary is here"
        )
    if shard is None and vocab_local == 0:
        raise InputError(f"{name} holds no vocabulary; an empty slice needs the VocabShard that says so")
    return VocabShard(0, vocab_local) if shard is None else shard


def check_row_ids(
    ids: Tensor,  # (..., ) int64, global vocabulary ids
    shape: torch.Size | tuple[int, ...],
    shard: VocabShard,
    name: str = "targets",
) -> None:
    """Raise `InputError` unless `ids` is int64, of `shape`, and its host values are legal.

    Values on a device are not read, since that would wait for it; an id that no shard owns then gives a NaN log-prob.
    """
    if ids.dtype != torch.int64 or tuple(ids.shape) != tuple(shape):
        raise InputError(f"needed int64 {name} {tuple(shape)}, got {tuple(ids.shape)} of {ids.dtype}")
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0:
        raise InputError(
            f"{name} must be vocabulary ids, got {low}; select the rows that count instead of marking rows"
        )
    if not shard.sharded and high >= shard.size:
        raise InputError(f"{name} must be below the vocabulary size {shard.size}, got {high}")


def check_vocab_size(
    vocab_size: object,  # how many ids are real; those from there on are padding
    targets: Tensor,  # (...) int64
    shard: VocabShard | None = None,  # None where it is not known yet
) -> int | None:
    """`vocab_size` as a plain int; `None` counts the whole vocabulary.

    Raises `InputError` unless it is positive and at most the vocabulary's size, and the targets' host values are below
    it.
    """
    if vocab_size is None:
        return None
    size = as_index(vocab_size)
    if size is None or size < 1:
        raise InputError(f"vocab_size must be a positive whole number of ids or None, got {describe(vocab_size)}")
    if shard is not None and not shard.sharded and size > shard.size:
        raise InputError(f"vocab_size is {size}, but there are only {shard.size} columns")
    if targets.device.type == "cpu" and targets.numel() and int(targets.max()) >= size:
        raise InputError(f"targets must be below vocab_size, {size}, got {int(targets.max())}: that id is padding")
    return size


def check_temperature(
    temperature: float | Tensor,  # scalar, or (rows,)
    shape: torch.Size | tuple[int, ...],
    device: torch.device | None = None,  # of the rows, where it is known
) -> None:
    """Raise `InputError` unless the temperature is a number from 1e-30 on, one for all or one a row, and a constant."""
    if isinstance(temperature, Tensor):
        if tuple(temperature.shape) != tuple(shape) or not temperature.is_floating_point():
            raise InputError(
                f"a temperature per row must be floating {tuple(shape)}, "
                f"got {tuple(temperature.shape)} of {temperature.dtype}"
            )
        if device is not None and temperature.device != device:
            raise InputError(f"a temperature per row must lie on {device}, as the rows do, got {temperature.device}")
        if temperature.requires_grad:
            raise InputError("the temperature gets no gradient here; pass temperature.detach()")
        if temperature.device.type != "cpu" or temperature.numel() == 0:
            return
        low, high = float(temperature.min()), float(temperature.max())
        got = str(high if low > 0 else low)
    else:
        number = as_float(temperature)
        if number is None:
            raise InputError(f"the temperature must be a number, or a tensor of one a row, got {describe(temperature)}")
        low, high, got = number, number, describe(temperature)
    if not (low > 0 and math.isfinite(high)):
        raise InputError(f"the temperature must be positive and finite, got {got}")
    if low < _LEAST_TEMPERATURE:
        raise InputError(
            f"the temperature must be at least {_LEAST_TEMPERATURE}, or logits are infinite when divided by it, got "
            f"{low:g}; pass a larger one"
        )


def check_chunk_bytes(chunk_bytes: object) -> int | None:
    """The chunk budget as a plain int. Raises `InputError` unless it is positive, or `None` for the default."""
    if chunk_bytes is None:
        return None
    budget = as_index(chunk_bytes)
    if budget is None or budget < 1:
        raise InputError(f"chunk_bytes must be a positive whole number of bytes or None, got {describe(chunk_bytes)}")
    return budget


def check_flag(name: str, value: object) -> None:
    """Raise `InputError` unless `value` is `True` or `False` itself: the string "0", say, counts as true in Python."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {describe(value)}; pass one of the two")
