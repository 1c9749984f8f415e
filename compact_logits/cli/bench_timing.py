"""Time and peak memory of one run, forward and backward apart."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch

__all__ = ["Clock", "Measured", "measure_peak", "measure_time"]

_MIB = 2**20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's `mallopt`

Clock = Callable[[], float]  # seconds


@dataclass
class Measured:
    """`failure`: why there are no numbers. Errors are against fp64. Peaks are beyond the inputs, gradients included."""

    name: str
    view: str
    failure: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    forward_times: list[float] = field(default_factory=list)
    backward_times: list[float] = field(default_factory=list)
    forward_peak_mib: float | None = None
    backward_peak_mib: float | None = None

    @property
    def forward_ms(self) -> float:
        return median(self.forward_times)

    @property
    def backward_ms(self) -> float:
        return median(self.backward_times)

    @property
    def total_ms(self) -> float:
        return median(f + b for f, b in zip(self.forward_times, self.backward_times, strict=True))

    @property
    def peak_mib(self) -> float | None:
        peaks = [peak for peak in (self.forward_peak_mib, self.backward_peak_mib) if peak is not None]
        return max(peaks, default=None)


def measure_time(
    forward: Callable[[], Callable[[], None]], device: torch.device, clock: Clock = time.perf_counter
) -> tuple[float, float]:
    """Milliseconds of `forward()` and of what it returns, called; by events where the device is a GPU."""
    gc.collect()
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize(device)
        marks[0].record()
        backward = forward()
        marks[1].record()
        backward()
        marks[2].record()
        torch.cuda.synchronize(device)
        return marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])
    start = clock()
    backward = forward()
    between = clock()
    backward()
    return (between - start) * 1e3, (clock() - between) * 1e3


def measure_peak(
    forward: Callable[[], Callable[[], None]], device: torch.device
) -> tuple[float, float] | tuple[None, None]:
    """MiB that forward, and then backward, hold at most beyond the level before forward. None where the kernel does not
    say: it counts resident memory, so what libraries allocate past torch is seen too."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        level = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        backward = forward()
        of_forward = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        backward()
        return (of_forward - level) / _MIB, (torch.cuda.max_memory_allocated(device) - level) / _MIB
    try:
        with _freed_at_once():
            before = _restart_high_water()
            backward = forward()
            first = _status_mib("VmHWM")
            _restart_high_water()
            backward()
            return first - before, _status_mib("VmHWM") - before
    except (OSError, AttributeError, StopIteration):
        return None, None


@contextmanager
def _freed_at_once() -> Iterator[None]:
    """What is freed is no longer resident. By itself glibc keeps up to 32 MiB of it, more the longer a process runs, so
    that a peak would depend on the order of measurement. Its threshold ends there, where it would have got to."""
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.mallopt(_MMAP_THRESHOLD, 128 * 1024)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, 32 * _MIB)
        libc.mallopt(_TRIM_THRESHOLD, 64 * _MIB)


def _restart_high_water() -> float:
    """Forget the most that was resident, and say how much is."""
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    return _status_mib("VmRSS")


def _status_mib(key: str) -> float:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(key + ":"))
    return int(line.split()[1]) / 1024
