"""Whether the Triton kernels compute here what the torch kernels define: they prove themselves before they are used."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits.engine.kernels import torch_kernels
from compact_logits.engine.kernels.row_stats import new_stats
from compact_logits.errors import RefusedError

__all__ = ["Verdict", "compare_kernels", "prove_on_all_ranks", "verdict"]

logger = logging.getLogger("compact_logits")

# Of the largest value that the torch kernels give. What is rounded to 16 bits may be rounded the other way.
_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}

_verdicts: dict[int, Verdict] = {}  # by CUDA device


@dataclass(frozen=True)
class Verdict:
    """`proven`: the Triton kernels run on this device. `reason`: why, with the figures, or why the torch kernels do."""

    proven: bool
    reason: str


def verdict(device: torch.device) -> Verdict:
    """Whether the Triton kernels are used on `device`. Compiled and compared once a process; logged where they fail.

    Takes the seconds that Triton needs to compile six kernels where its cache has them not, else less than one.
    """
    if device.type != "cuda":
        return Verdict(False, f"Triton runs on CUDA, not on {device.type}")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _verdicts:
        _verdicts[index] = _prove(torch.device("cuda", index))
        if not _verdicts[index].proven:
            logger.warning("the torch kernels run in place of the Triton ones: %s", _verdicts[index].reason)
    return _verdicts[index]


def prove_on_all_ranks(*, strict: bool = False) -> Verdict:
    """Let every rank prove its kernels, and use the torch kernels on all where one fails. For `install`.

    Collectives: one all-gather of objects over the default group, if there is one and CUDA is there. Raises
    `RefusedError` on every rank if `strict` and a rank with CUDA is not proven.
    """
    if not torch.cuda.is_available():
        return verdict(torch.device("cpu"))
    device = torch.device("cuda", torch.cuda.current_device())
    mine = verdict(device)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        of_ranks: list[Verdict] = [mine] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        failed = [rank for rank, each in enumerate(of_ranks) if not each.proven]
        if failed and mine.proven:
            mine = _verdicts[device.index] = Verdict(False, f"rank {failed[0]}: {of_ranks[failed[0]].reason}")
            logger.warning("the torch kernels run in place of the Triton ones: %s", mine.reason)
    if strict and not mine.proven:
        raise RefusedError(
            f"COMPACT_LOGITS=strict: the Triton kernels are not proven here: {mine.reason}; set COMPACT_LOGITS=1 to "
            f"run the torch kernels, which are slower and give the same numbers"
        )
    return mine


def compare_kernels(kernels: ModuleType, device: torch.device) -> dict[str, float]:
    """How far `kernels` are off the torch kernels on small hard slices: error over its bound, by kernel and dtype.

    Rows of an odd width with padding behind them, masked columns (-inf) and rows of nothing else, a temperature of
    each row's own, one column that has nearly all probability, in fp32 and in 16 bits. NaN where one alone has NaN.
    """
    worst: dict[str, float] = {}
    for dtype in _BOUNDS:
        for width in (5008 - 9, 131, 1):
            for name, error in _errors(kernels, _hard_slice(width, dtype, device)).items():
                key = f"{name} {str(dtype).removeprefix('torch.')}"
                worst[key] = max(worst.get(key, 0.0), error) if error == error else error
    return worst


def _prove(device: torch.device) -> Verdict:
    if torch.version.hip is not None:
        return Verdict(False, "ROCm is not proven")
    try:
        from compact_logits.engine.kernels import triton_kernels

        begun = time.perf_counter()
        errors = compare_kernels(triton_kernels, device)
        seconds = time.perf_counter() - begun
    except Exception as error:  # whatever Triton or its compiler raises
        return Verdict(False, f"{type(error).__name__}: {str(error).strip()[:300]}")
    told = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
    proven = all(error <= 1.0 for error in errors.values())
    return Verdict(proven, f"error over its bound on {torch.cuda.get_device_name(device)}: {told} ({seconds:.1f} s)")


def _hard_slice(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:  # (rows, width), padding behind rows
    generator = torch.Generator().manual_seed(0)
    padded = torch.randn(7, width + 9, generator=generator) * 4
    padded[:, width:] = torch.nan
    logits = padded[:, :width]
    logits[0, ::3] = -torch.inf
    logits[1, width // 2] = 60.0
    logits[2] = -torch.inf
    logits[3, width // 3] = torch.nan
    return padded.to(device, dtype)[:, :width]


def _errors(kernels: ModuleType, logits: Tensor) -> dict[str, float]:
    bound, (rows, width) = _BOUNDS[logits.dtype], logits.shape
    inverse, scale, slope = torch.tensor([[1.0, 0.7, 2.0]], device=logits.device).repeat(rows, 1).unbind(1)
    inverse = inverse + torch.arange(rows, device=logits.device) / rows
    truth, got = (new_stats(logits, moment=True, squares=True) for _ in range(2))
    for _ in range(2):  # the second time, merged with what is there
        torch_kernels.row_stats_(truth, logits, inverse, True, True)
        kernels.row_stats_(got, logits, inverse, True, True)
    # Where a row has NaN, its sums say so; the maximum need not.
    errors = {"row_stats": _error(got[:, 1:], truth[:, 1:], 1e-5)}
    shift = truth[:, 0].float().masked_fill(truth[:, 0].isinf(), 0.0)
    for name, slope_ in (("softmax_grad", None), ("softmax_grad slope", slope)):
        expected, padded = logits.clone(), torch.zeros(rows, width + 9, dtype=logits.dtype, device=logits.device)
        computed = padded[:, :width].copy_(logits)
        torch_kernels.softmax_grad_(expected, inverse, shift, scale, slope_)
        kernels.softmax_grad_(computed, inverse, shift, scale, slope_)
        errors[name] = _error(computed, expected, bound) + float((padded[:, width:] != 0).any())
    ids = torch.tensor([[100, 99 + width, 101 + width // 2, 5, -1]], device=logits.device).repeat(rows, 1)
    values = torch.arange(ids.numel(), device=logits.device, dtype=torch.float32).view_as(ids)
    expected, computed = logits.clone(), logits.clone()
    torch_kernels.write_at_(expected, ids, values, 100)
    kernels.write_at_(computed, ids, values, 100)
    errors["write_at"] = _error(computed, expected, bound)
    return errors


def _error(
    got: Tensor,  # (rows, ...)
    truth: Tensor,  # (rows, ...)
    bound: float,
) -> float:
    """The largest difference over the bound and the row's largest value; NaN where one alone has NaN or infinity."""
    if not torch.equal(got.isfinite(), truth.isfinite()) or not torch.equal(got.isnan(), truth.isnan()):
        return float("nan")
    got, truth = (each.double().nan_to_num(0.0, 0.0, 0.0) for each in (got, truth))
    largest = truth.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    return float(((got - truth).abs() / (bound * largest)).max())
