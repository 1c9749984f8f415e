"""Whether the Triton kernels compute here what the torch kernels define: they prove themselves before they are used."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from compact_logits.engine.kernels.compare import compare_kernels
from compact_logits.errors import RefusedError

__all__ = ["Verdict", "prove_on_all_ranks", "use_torch_kernels", "verdict"]

logger = logging.getLogger("compact_logits")

_verdicts: dict[int, Verdict] = {}  # by CUDA device


@dataclass(frozen=True)
class Verdict:
    """`proven`: the Triton kernels run on this device. `reason`: why, with the errors, or why the torch kernels do."""

    proven: bool
    reason: str


def verdict(device: torch.device) -> Verdict:
    """Whether the Triton kernels are used on `device`. Compiled and compared once a process; the result is logged.

    Takes the seconds that Triton needs to compile where its cache on disk does not have the kernels, else less than
    one. No collective.
    """
    if device.type != "cuda":
        return Verdict(False, f"Triton runs on CUDA, not on {device.type}")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _verdicts:
        found = _prove(torch.device("cuda", index))
        if found.proven:
            _verdicts[index] = found
            logger.info("the Triton kernels are proven: %s", found.reason)
        else:
            use_torch_kernels(torch.device("cuda", index), found.reason)
    return _verdicts[index]


def use_torch_kernels(device: torch.device, reason: str) -> None:
    """Run the torch kernels on this CUDA device from now on, whether or not the Triton ones are proven."""
    index = torch.cuda.current_device() if device.index is None else device.index
    _verdicts[index] = Verdict(False, reason)
    logger.warning("the torch kernels run in place of the Triton ones: %s", reason)


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
            use_torch_kernels(device, f"rank {failed[0]}: {of_ranks[failed[0]].reason}")
            mine = verdict(device)
    if strict and not mine.proven:
        raise RefusedError(
            f"COMPACT_LOGITS=strict: the Triton kernels are not proven here: {mine.reason}; set COMPACT_LOGITS=1 to "
            f"run the torch kernels, which are slower"
        )
    return mine


def _prove(device: torch.device) -> Verdict:
    if torch.version.hip is not None:
        return Verdict(False, "ROCm is not proven")
    try:
        from compact_logits.engine.kernels import triton_kernels

        begun = time.perf_counter()
        errors = compare_kernels(triton_kernels, device)
        seconds = time.perf_counter() - begun
        name = torch.cuda.get_device_name(device)
    except Exception as error:  # whatever Triton or its compiler raises
        return Verdict(False, f"{type(error).__name__}: {str(error).strip()[:300]}")
    every = ", ".join(f"{kernel} {error:.2g}" for kernel, error in errors.items())
    proven = all(error <= 1.0 for error in errors.values())
    return Verdict(proven, f"error over its bound on {name}: {every} ({seconds:.1f} s)")
