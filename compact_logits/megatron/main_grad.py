"""Megatron's fused weight-gradient contract, for a head that is projected in chunks."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from compact_logits.engine.matmul import add_product_
from compact_logits.engine.slices import ChunkPlan

__all__ = ["MainGrad", "MainGradSum"]


class MainGrad:
    """Adds every chunk's product to `weight.main_grad` and gives autograd the stand-in that DDP's hook expects.

    The contract is that of Megatron's own linear layer under `gradient_accumulation_fusion`: `main_grad` is the buffer
    seen in forward; `grad_added_to_main_grad` is set where DDP has defined it, and then a gradient must be returned,
    zeros if `zero_out_wgrad` says that DDP will add it, uninitialised memory otherwise. All micro-batches of an
    iteration must follow it, since DDP resets the flag once an iteration. A 16-bit `main_grad` is added to once: by the
    kernel where each row is one product, else from an fp32 sum, so that its rounding does not grow with their number.
    """

    lends = False  # its memory stands already, and has the other micro-batches' sum in it

    def __init__(
        self,
        weight: Tensor,  # (vocab_local, hidden), with `main_grad`
    ) -> None:
        self._parameter = weight
        self._main_grad: Tensor = weight.main_grad  # type: ignore[attr-defined]

    @property
    def sums_in_place(self) -> bool:
        return self._main_grad.dtype == torch.float32

    def begin(self, weight: Tensor, plan: ChunkPlan, memory: Tensor | None = None) -> MainGradSum:
        self._parameter.main_grad = self._main_grad  # type: ignore[attr-defined]
        return MainGradSum(self._parameter, self._main_grad, weight.dtype, plan)


class MainGradSum:
    """What one backward pass adds."""

    def __init__(
        self,
        parameter: Tensor,  # (vocab_local, hidden)
        main_grad: Tensor,  # (vocab_local, hidden)
        dtype: torch.dtype,  # of the weight that was used
        plan: ChunkPlan,
    ) -> None:
        self._parameter, self._main_grad, self._dtype, self._widened = parameter, main_grad, dtype, plan.widened
        self._kernels = getattr(layers, "fused_weight_gradient_mlp_cuda", None)
        once = main_grad.dtype == torch.float32 or (len(plan.groups()) < 2 and self._kernels is not None)
        self._total = None if once else torch.zeros_like(main_grad, dtype=torch.float32)

    def add(
        self,
        d_logits: Tensor,  # (rows, columns)
        hidden: Tensor,  # (rows, hidden)
        columns: slice,  # which of the weight's rows
    ) -> None:
        if self._total is None and self._kernels is not None:
            wide = self._main_grad.dtype == torch.float32
            accumulate = self._kernels.wgrad_gemm_accum_fp32 if wide else self._kernels.wgrad_gemm_accum_fp16
            accumulate(hidden, d_logits, self._main_grad[columns])
        else:
            total = self._main_grad if self._total is None else self._total
            add_product_(total[columns], d_logits.t(), hidden, widened=self._widened)

    def finish(self) -> Tensor | None:
        if self._total is not None:
            self._main_grad.add_(self._total)
            self._total = None
        if not hasattr(self._parameter, "grad_added_to_main_grad"):
            return None
        self._parameter.grad_added_to_main_grad = True
        zero = bool(getattr(self._parameter, "zero_out_wgrad", False))
        shared_dummy = getattr(layers, "get_dummy_wgrad", None)  # Transformer Engine's, one buffer for all uses
        if shared_dummy is not None:
            return shared_dummy(list(self._main_grad.shape), self._dtype, zero=zero)
        make = torch.zeros if zero else torch.empty
        return make(self._main_grad.shape, dtype=self._dtype, device=self._main_grad.device)
