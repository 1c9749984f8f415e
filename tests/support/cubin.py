"""Compile what the Triton wrappers launch for GPUs that are not here, and read the machine code.

Needs Triton, and no GPU: it brings `ptxas` and `cuobjdump` along.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compact_logits.engine.kernels import triton_kernels

__all__ = ["Compiled", "Launch", "launches_of"]

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_DTYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Compiled:
    """One kernel for one kind of GPU."""

    ptx: str
    cubin: bytes

    @property
    def global_accesses(self) -> set[str]:
        """The kinds of loads from global memory and of stores to it: `ld.v4.b32` are 128 bits."""
        return {f"{kind}.{width}" for kind, width in re.findall(r"\b(ld|st)\.global\.([a-z0-9.]+)", self.ptx)}

    @cached_property
    def usage(self) -> dict[str, int]:
        """`REG`, registers of a thread, and bytes: of a thread `STACK` and `LOCAL`, where spilled registers are too."""
        found = re.search(r"\bREG:.*", self._cuobjdump("--dump-resource-usage"))
        assert found is not None
        return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", found[0])}

    @cached_property
    def instructions(self) -> list[str]:
        """Those that touch memory, as `LDG.E.128`. Takes nearly a second."""
        return re.findall(r"\b(?:LD|ST)[A-Z]*(?:\.[A-Z0-9]+)*\b", self._cuobjdump("--dump-sass"))

    def _cuobjdump(self, flag: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [_TOOLS / "cuobjdump", flag, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Launch:
    """One kernel with the arguments that a wrapper gave it."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def compiled(self, capability: int) -> Compiled:
        """For GPUs of a compute capability, 90 for 9.0. Tensors are aligned, as torch allocates them."""
        signature, constants, attributes = {}, {}, {}
        for place, (parameter, value) in enumerate(zip(self.kernel.params, self.arguments, strict=True)):
            specialized = not parameter.do_not_specialize
            if isinstance(value, Tensor):
                signature[parameter.name] = _DTYPES[value.dtype]
                attributes[(place,)] = [["tt.divisibility", 16]]
            elif parameter.is_constexpr or (specialized and value == 1):
                signature[parameter.name], constants[(place,)] = "constexpr", value
            else:
                signature[parameter.name] = "i32" if value < 2**31 else "i64"
                if specialized and value % 16 == 0:
                    attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        asm = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options).asm
        return Compiled(asm["ptx"], asm["cubin"])


def launches_of(call: Callable[[Any], None]) -> list[Launch]:
    """What `call` launches when it is given the module of the Triton wrappers; its tensors may be meta tensors."""
    launches: list[Launch] = []

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **options: launches.append(Launch(self._kernel, arguments, options))

    names = [name for name in vars(triton_kernels) if name.endswith("_kernel")]
    recorded = {name: Recorded(getattr(triton_kernels, name)) for name in names}
    with mock.patch.multiple(triton_kernels, **recorded):
        call(triton_kernels)
    return launches
