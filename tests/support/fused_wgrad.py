"""Apex's kernels for fused weight gradients, as Megatron's linear layers call them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from torch import Tensor

__all__ = ["fused_kernels"]


def _accumulate(
    input_: Tensor,  # (rows, in)
    grad_output: Tensor,  # (rows, out)
    main_grad: Tensor,  # (out, in)
) -> None:
    """The product and the sum in fp32, rounded once."""
    assert input_.dtype == grad_output.dtype and input_.is_contiguous() and grad_output.is_contiguous()
    assert len(input_), "how the kernels take no rows at all is not known"
    main_grad.copy_(main_grad.float().addmm_(grad_output.t().float(), input_.float()))


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Let Megatron find the kernels. A second implementation, in plain torch; which main_grad it takes is checked."""
    from megatron.core.tensor_parallel import layers

    def wide(input_: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        assert main_grad.dtype.itemsize == 4
        _accumulate(input_, grad_output, main_grad)

    def narrow(input_: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        assert main_grad.dtype == input_.dtype and main_grad.dtype.itemsize == 2
        _accumulate(input_, grad_output, main_grad)

    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=wide, wgrad_gemm_accum_fp16=narrow)
    with (
        patch.object(layers, "fused_weight_gradient_mlp_cuda", kernels, create=True),
        patch.object(layers, "_grad_accum_fusion_available", True),
    ):
        yield
