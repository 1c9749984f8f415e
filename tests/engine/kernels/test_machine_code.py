"""The Triton kernels compiled ahead of time for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.7", reason="Triton 3.7 or newer is not installed")

from compact_logits.engine.kernels import new_stats
from tests.support.cubin import Compiled, Launch, launches_of

pytestmark = pytest.mark.slow

CAPABILITIES = (80, 90, 100)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = 6554


def row_stats(moment: bool, squares: bool) -> Callable[[Any, Tensor], None]:
    def call(kernels: Any, logits: Tensor) -> None:
        stats = new_stats(logits, moment=moment, squares=squares)
        kernels.row_stats_(stats, logits, of_rows(), moment, squares)

    return call


def softmax_grad(slope: bool) -> Callable[[Any, Tensor], None]:
    def call(kernels: Any, logits: Tensor) -> None:
        kernels.softmax_grad_(logits, of_rows(), of_rows(), of_rows(), of_rows() if slope else None)

    return call


def write_at(kernels: Any, logits: Tensor) -> None:
    ids = torch.zeros(ROWS, 1, dtype=torch.int64, device="meta")
    kernels.write_at_(logits, ids, torch.zeros(ROWS, 1, device="meta"), 62080)


def of_rows() -> Tensor:
    return torch.ones(ROWS, device="meta")


VARIANTS = {
    "row_stats": row_stats(False, False),
    "row_stats with moment": row_stats(True, False),
    "row_stats with squares": row_stats(False, True),
    "row_stats with both": row_stats(True, True),
    "softmax_grad": softmax_grad(False),
    "softmax_grad with slope": softmax_grad(True),
    "write_at": write_at,
}


@pytest.fixture(autouse=True)
def compiled_once(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cache of the checkout's, by the source: another run compiles only what has changed."""
    cache = getattr(pytestconfig, "cache", None)
    if cache is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(cache.mkdir("triton")))


def launch_of(variant: str, dtype: torch.dtype, columns: int, stride: int) -> Launch:
    logits = torch.empty(ROWS, stride, dtype=dtype, device="meta")[:, :columns]
    (launch,) = launches_of(lambda kernels: VARIANTS[variant](kernels, logits))
    return launch


def test_all_kernels_and_their_variants_are_here() -> None:
    from compact_logits.engine.kernels import triton_kernels

    here = {launch_of(variant, torch.bfloat16, 62080, 62080).kernel for variant in VARIANTS}
    assert here == {value for name, value in vars(triton_kernels).items() if name.endswith("_kernel")}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_kernel_stays_in_registers_and_loads_128_bits(capability: int, variant: str, dtype: torch.dtype) -> None:
    compiled = launch_of(variant, dtype, columns=62080, stride=62080).compiled(capability)
    assert_in_registers(compiled)
    if variant != "write_at":  # which has one element a thread
        assert "ld.v4.b32" in compiled.global_accesses
        assert "ld.b16" not in compiled.global_accesses
    if "softmax_grad" in variant:
        assert {each for each in compiled.global_accesses if each.startswith("st")} == {"st.v4.b32"}


@pytest.mark.parametrize("variant", ["row_stats with both", "softmax_grad with slope"])
def test_the_machine_code_has_these_loads_and_no_others_of_a_thread_s_own_memory(variant: str) -> None:
    compiled = launch_of(variant, torch.bfloat16, columns=62080, stride=62080).compiled(90)
    assert "LDG.E.128" in compiled.instructions
    assert not [each for each in compiled.instructions if each.startswith(("LDL", "STL", "LDG.E.U16"))]


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "write_at"])
@pytest.mark.parametrize(("columns", "stride", "wide"), [(62075, 62080, True), (62075, 62075, False), (65, 65, False)])
def test_whole_blocks_are_loaded_128_bits_wide_where_rows_are_aligned(
    variant: str, columns: int, stride: int, wide: bool
) -> None:
    compiled = launch_of(variant, torch.bfloat16, columns, stride).compiled(90)
    assert ("ld.v4.b32" in compiled.global_accesses) == wide
    assert_in_registers(compiled)


def test_registers_that_are_spilled_are_seen() -> None:
    launch = launch_of("row_stats with both", torch.bfloat16, columns=62080, stride=62080)
    few = replace(launch, options=launch.options | {"maxnreg": 24}).compiled(90)
    assert few.usage["STACK"] + few.usage["LOCAL"] > 0
    with pytest.raises(AssertionError):
        assert_in_registers(few)


def assert_in_registers(compiled: Compiled) -> None:
    usage = compiled.usage
    assert (usage["STACK"], usage["LOCAL"]) == (0, 0)
    assert usage["REG"] <= 128
