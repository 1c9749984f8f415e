"""Megatron's fused weight-gradient contract, for a head that is projected slice by slice."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from compact_logits.engine.matmul import add_product_

__all__ = ["MainGrad"]


class MainGrad:
    """Adds every slice's product to `weight.main_grad` and gives autograd the stand-in that DDP's hook expects.

    The contract is that of Megatron's own linear layer under `gradient_accumulation_fusion`: `main_grad` is the buffer
    seen in forward; `grad_added_to_main_grad` is set where DDP has defined it, and then a gradient must be returned,
    zeros if `zero_out_wgrad` says that DDP will add it, uninitialised memory otherwise. All micro-batches of an
    iteration must follow it, since DDP resets the flag once an iteration. Each row of `main_grad` gets one product a
    micro-batch, accumulated in fp32, and is rounded once where it is 16 bits wide.
    """

    def __init__(
        self,
        parameter: Tensor,  # (vocab_local, hidden)
        main_grad: Tensor,  # (vocab_local, hidden), the parameter's as forward saw it
        weight: Tensor,  # (vocab_local, hidden), the parameter as forward used it
    ) -> None:
        self._parameter, self._main_grad, self._dtype = parameter, main_grad, weight.dtype
        self._kernels = getattr(layers, "fused_weight_gradient_mlp_cuda", None)
        parameter.main_grad = main_grad  # type: ignore[attr-defined]

    def add(
        self,
        columns: slice,  # which rows of the weight
        d_logits: Tensor,  # (rows, columns)
        rows: Tensor,  # (rows, hidden)
    ) -> None:
        main_grad = self._main_grad[columns]
        if self._kernels is None:
            add_product_(main_grad, d_logits.t(), rows)
        elif main_grad.dtype == torch.float32:
            self._kernels.wgrad_gemm_accum_fp32(rows, d_logits, main_grad)
        else:
            self._kernels.wgrad_gemm_accum_fp16(rows, d_logits, main_grad)

    def finish(self) -> Tensor | None:
        if not hasattr(self._parameter, "grad_added_to_main_grad"):
            return None
        self._parameter.grad_added_to_main_grad = True
        zero = bool(getattr(self._parameter, "zero_out_wgrad", False))
        shared_dummy = getattr(layers, "get_dummy_wgrad", None)  # Transformer Engine's, one buffer for all uses
        if shared_dummy is not None:
            return shared_dummy(list(self._main_grad.shape), self._dtype, zero=zero)
        make = torch.zeros if zero else torch.empty
        return make(self._main_grad.shape, dtype=self._dtype, device=self._main_grad.device)
