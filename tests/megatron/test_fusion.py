"""Weight gradients that Megatron adds to `main_grad` in the kernel: both paths in one iteration, and empty ones."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.engine.weight_grad import ReturnedWeightGrad
from compact_logits.megatron import attach, output_layer
from compact_logits.megatron.attach import gpt_model_of
from tests.support.ddp import late_gathers, wrapped
from tests.support.fused_wgrad import fused_kernels
from tests.support.gpt_paths import VOCAB, Cut, micro_batch
from tests.support.marked_gpt import call, marked, objective
from tests.support.parity import assert_gradient_close_to_truth
from tests.support.ranks import RankPool

# The micro-batches of an iteration, and the bytes of logits for those that ask; None for those that do not.
ITERATION = [("holes", 2000), ("nothing", 2000), ("one row", None), ("everything", 10**6), ("first sequence", 4000)]
SETTINGS = {
    "fp32": (torch.float32, True),
    "bf16, main_grad fp32": (torch.bfloat16, True),
    "bf16, main_grad bf16": (torch.bfloat16, False),
}
HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


def main_grads(
    dtype: torch.dtype,
    *,
    asks: bool,
    fused: bool = True,
    wide: bool = True,
    frozen: bool = False,
    overlap: bool = False,
    tied: bool = False,
) -> dict[str, Tensor]:
    """`main_grad` of every parameter after one iteration; without kernels, the ordinary gradients' sum."""
    with fused_kernels() if fused else nullcontext(), late_gathers():
        model = build_gpt(tp=1, vocab=VOCAB, layers=1, dtype=dtype, tied=tied, gradient_accumulation_fusion=fused)
        inner = gpt_model_of(model)
        if frozen:
            inner.output_layer.weight.requires_grad_(False)
        runs: Any = wrapped(model, grad_reduce_in_fp32=wide, overlap_grad_reduce=overlap) if fused else model
        if asks:
            attach(runs)
        for mask, chunk_bytes in ITERATION:
            micro = micro_batch(0, Cut(1), mask)
            loss_mask, request = None, None
            if asks and chunk_bytes is not None:
                loss_mask, request = marked(micro, entropy="loss", chunk_bytes=chunk_bytes)
            objective(call(runs, micro, loss_mask), micro, request).backward()
            assert request is None or request.compact, request.outcome
        if fused:
            runs.finish_grad_sync()
        return {
            name: (parameter.main_grad if fused else parameter.grad).detach().clone()
            for name, parameter in inner.named_parameters()
            if parameter.requires_grad
        }


def compared(rank: int, world: int, kind: str, tied: bool) -> None:
    dtype, wide = SETTINGS[kind]
    with cpu_megatron(rank, world, tp=1):
        truth = main_grads(torch.float64, asks=False, fused=False, tied=tied)
        plain = main_grads(dtype, asks=False, wide=wide, tied=tied)
        ours = main_grads(dtype, asks=True, wide=wide, tied=tied, overlap=tied)
    assert ours.keys() == plain.keys() == truth.keys() and (HEAD in ours) != tied
    for name, gradient in ours.items():
        assert gradient.dtype == (torch.float32 if wide else torch.bfloat16)
        assert_gradient_close_to_truth(gradient, plain[name], truth[name], name=name)
        off = (gradient.double() - plain[name].double()).norm() / plain[name].double().norm()
        assert off <= (1e-5 if dtype == torch.float32 else 2e-2), (name, off)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_case_3_10_and_9_3_the_sum_of_all_micro_batches(rank_pool: RankPool, kind: str, tied: bool) -> None:
    rank_pool.run(1, compared, kind, tied)


def test_a_returned_gradient_is_lost_beside_a_fused_one(rank_pool: RankPool) -> None:
    rank_pool.run(1, loses)


def loses(rank: int, world: int) -> None:
    """The naive way: DDP drops what is returned, once any micro-batch of the iteration has used the kernel."""
    with cpu_megatron(rank, world, tp=1):
        plain = main_grads(torch.float32, asks=False)
        with patch.object(output_layer, "MainGrad", lambda parameter, main_grad, weight: ReturnedWeightGrad(weight)):
            naive = main_grads(torch.float32, asks=True)
    assert (naive[HEAD] - plain[HEAD]).norm() > 0.3 * plain[HEAD].norm()
    assert torch.allclose(naive[EMBEDDING], plain[EMBEDDING], rtol=1e-4, atol=1e-5), "all else is as it should be"


def test_case_9_3_a_frozen_head_needs_no_main_grad(rank_pool: RankPool) -> None:
    rank_pool.run(1, frozen_head)


def frozen_head(rank: int, world: int) -> None:
    with cpu_megatron(rank, world, tp=1):
        plain, ours = (main_grads(torch.float32, asks=asks, frozen=True) for asks in (False, True))
    assert HEAD not in ours and ours.keys() == plain.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-5, msg=name)


def test_what_autograd_is_given_is_never_read(rank_pool: RankPool) -> None:
    rank_pool.run(1, dummies)


def dummies(rank: int, world: int) -> None:
    """Uninitialised where DDP passes it by, zeros where DDP adds it: with Transformer Engine, its one shared buffer."""
    from megatron.core.tensor_parallel import layers

    made: list[tuple[list[int], torch.dtype, bool]] = []

    def shared(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
        made.append((shape, dtype, zero))
        return torch.full(shape, 0.0 if zero else torch.nan, dtype=dtype)

    with cpu_megatron(rank, world, tp=1), patch.object(layers, "HAVE_TE", True):
        for tied in (False, True):
            with patch.object(layers, "get_dummy_wgrad", shared, create=True):
                plain = main_grads(torch.float32, asks=False, tied=tied)
                expected, made[:] = sorted(map(str, made)), []
                ours = main_grads(torch.float32, asks=True, tied=tied)
            assert sorted(map(str, made)) == expected and str(([VOCAB, 32], torch.float32, tied)) in expected
            made.clear()
            for name, gradient in ours.items():
                torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-5, msg=name)
