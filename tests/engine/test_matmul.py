"""The products, by what a version of torch offers on a device."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from compact_logits.engine import matmul
from compact_logits.errors import InputError

has_out_dtype = hasattr(torch.ops.aten.addmm, "dtype_out")
needs_out_dtype = pytest.mark.skipif(
    not has_out_dtype, reason=f"torch {torch.__version__} has no product with out_dtype"
)


class Products(TorchDispatchMode):
    """Names the products that are asked for. Those with `out_dtype` are not run: not all are known to fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.")
        if "mm" in name:
            self.asked.append(name)
        return kwargs["out"] if name.endswith("dtype_out") else func(*args, **kwargs)


@pytest.fixture
def products() -> Iterator[Products]:
    """Tensors made in the test may be on "cuda"."""
    if not torch.backends.cuda.is_built():
        pytest.skip("needs a CUDA build of torch")
    matmul._warn_of_widening.cache_clear()
    with FakeTensorMode(), Products() as mode:
        yield mode
    matmul._warn_of_widening.cache_clear()


def factors(
    dtype: torch.dtype = torch.bfloat16, device: str = "cuda"
) -> tuple[Tensor, Tensor, Tensor]:  # fp32 (5, 7); (5, 3); (3, 7)
    total = torch.ones(5, 7, device=device)
    return total, torch.ones(5, 3, dtype=dtype, device=device), torch.ones(3, 7, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("version", "asked"),
    [
        ("2.6.0", ["addmm_.default"]),
        ("2.7.1+cu126", ["addmm_.default"]),
        pytest.param("2.8.0", ["baddbmm.dtype_out"], marks=needs_out_dtype),
        pytest.param("2.9.1+cu128", ["baddbmm.dtype_out"], marks=needs_out_dtype),
        pytest.param("2.10.0a0+git", ["addmm.dtype_out"], marks=needs_out_dtype),
        pytest.param("3.0.0", ["addmm.dtype_out"], marks=needs_out_dtype),
    ],
)
def test_a_sum_in_fp32_on_a_gpu(
    version: str,
    asked: list[str],
    dtype: torch.dtype,
    products: Products,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with caplog.at_level(logging.WARNING, logger="compact_logits"):
        for _ in range(2):
            matmul.add_product_(*factors(dtype))
    assert products.asked == asked * 2
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (1 if asked == ["addmm_.default"] else 0)
    assert all(f"torch {version} has no product of 16-bit factors with an fp32 result" in each for each in warned)


def test_a_cpu_has_none_and_nothing_is_logged(
    products: Products, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    matmul.add_product_(*factors(device="cpu"))
    assert products.asked == ["addmm_.default"]
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_factors_that_are_wide_already_need_no_other_product(dtype: torch.dtype, products: Products) -> None:
    total, left, right = factors(dtype)
    matmul.add_product_(total.to(dtype), left, right)
    assert products.asked == ["addmm_.default"]


def test_fp32_logits_need_torch_2_8_and_a_gpu(products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu, on_cpu = factors()[1], factors(device="cpu")[1]
    for version, rows in (("2.7.1", on_gpu), ("2.13.0", on_cpu)):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(
            InputError, match=f"got a tensor on {rows.device.type} and torch {version}; leave fp32_logits"
        ):
            matmul.unrounded_dtype(rows)
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    assert matmul.unrounded_dtype(on_gpu) == torch.float32


@needs_out_dtype
@pytest.mark.parametrize("with_bias", [False, True])
def test_logits_that_are_not_rounded(with_bias: bool, products: Products) -> None:
    _, rows, weight = factors()
    bias = torch.ones(7, dtype=torch.bfloat16, device="cuda") if with_bias else None
    logits = matmul.project(rows, weight.t(), bias, torch.float32)
    assert (logits.dtype, tuple(logits.shape)) == (torch.float32, (5, 7))
    assert products.asked == ["mm.dtype_out"]


@pytest.mark.parametrize(("with_bias", "asked"), [(False, ["mm.out"]), (True, ["addmm.out"])])
def test_logits_are_rounded_once_by_one_product(with_bias: bool, asked: list[str], products: Products) -> None:
    _, rows, weight = factors()
    bias = torch.ones(7, dtype=torch.bfloat16, device="cuda") if with_bias else None
    assert matmul.project(rows, weight.t(), bias, torch.bfloat16).dtype == torch.bfloat16
    assert products.asked == asked


# m, k, n, and how many numbers of a factor are widened at a time: from more than it has to fewer than one row of it.
SHAPES = [(5, 3, 7, 10**6), (33, 17, 9, 64), (33, 17, 9, 9), (7, 40, 30, 1), (1, 1, 1, 4), (0, 3, 7, 8), (5, 0, 7, 8)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("m", "k", "n", "widened"), SHAPES)
def test_widened_factors_give_the_fp32_product_whatever_the_blocks(
    m: int, k: int, n: int, widened: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "_WIDENED_BYTES", 4 * widened)
    largest: list[int] = []
    right_to = Tensor.to

    def counted(self: Tensor, *given: Any) -> Tensor:
        largest.append(self.numel())
        return right_to(self, *given)

    total, left, right = torch.randn(m, n), torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    truth = total.double() + left.double() @ right.double()
    monkeypatch.setattr(Tensor, "to", counted)
    matmul.add_product_(total, left, right)
    monkeypatch.undo()
    torch.testing.assert_close(total.double(), truth, rtol=1e-5, atol=1e-5)
    assert max(largest, default=0) <= max(widened, n)
