"""Megatron's DDP, with its overlapping collectives and sharded optimizer, over several iterations of both paths."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.megatron import attach
from tests.support.ddp import head_bucket, late_gathers, optimizer_of, wrapped
from tests.support.gpt_paths import VOCAB, Cut, micro_batch
from tests.support.marked_gpt import call, kept_scalars, marked, objective
from tests.support.ranks import RankPool

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}
DDP = {
    "plain": {},
    "sharded": {"use_distributed_optimizer": True},
    "overlapping reduction": {"overlap_grad_reduce": True},
    "overlapping everything": OVERLAP,
}
# Two micro-batches an iteration, for either data-parallel rank; some rank has no rows in every iteration but the first.
MASKS = [
    [("holes", "one row"), ("everything", "holes")],
    [("nothing", "nothing"), ("holes", "everything")],
    [("everything", "one row"), ("nothing", "nothing")],
    [("nothing", "holes"), ("nothing", "nothing")],
]


@dataclass
class Trained:
    scalars: list[Tensor]
    weights: dict[str, Tensor]
    hooks: int  # calls of a pre-hook on the output layer
    ready: list[int]  # how often the head's weight was ready for reduction, at the end of each iteration


def train(rank: int, world: int, cut: Cut, ddp_settings: dict[str, Any], asks: bool, **model: Any) -> Trained:
    with cpu_megatron(rank, world, tp=cut.tp), late_gathers():
        gpt = build_gpt(**{"tp": cut.tp, "vocab": VOCAB, "layers": 1, **model})
        head = gpt.output_layer
        ddp = wrapped(gpt, **ddp_settings)
        optimizer = optimizer_of(ddp)
        if asks:
            attach(ddp)
        came = Trained([], {}, 0, [])

        def count(*_: Any) -> None:
            came.hooks += 1

        head.register_forward_pre_hook(count)
        for masks in MASKS:
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            mine = masks[rank // cut.tp]
            for number, mask in enumerate(mine):
                micro = micro_batch(rank % cut.tp, cut, mask)
                loss_mask, request = marked(micro, entropy="loss", chunk_bytes=3000) if asks else (None, None)
                if number + 1 == len(mine):
                    run(ddp, micro, loss_mask, request, came)
                else:
                    with ddp.no_sync():
                        run(ddp, micro, loss_mask, request, came)
            weight = gpt.shared_embedding_or_output_weight()
            counted = head_bucket(ddp, weight).per_param_grad_ready_counts
            came.ready.append(counted.get(weight, 0))
            ddp.finish_grad_sync()
            optimizer.step()
        if ddp_settings.get("overlap_param_gather"):
            ddp.disable_forward_pre_hook()  # waits for the weights
        came.weights = {name: parameter.detach().clone() for name, parameter in gpt.named_parameters()}
        return came


def run(ddp: Any, micro: Any, loss_mask: Tensor | None, request: Any, came: Trained) -> None:
    output = call(ddp, micro, loss_mask)
    assert request is None or request.compact, request.outcome
    came.scalars.append(kept_scalars(output, micro, request).detach())
    objective(output, micro, request).backward()


def compared(rank: int, world: int, cut: Cut, settings: dict[str, Any], tied: bool) -> tuple[Trained, Trained]:
    return train(rank, world, cut, settings, False, tied=tied), train(rank, world, cut, settings, True, tied=tied)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", DDP)
def test_training_is_the_same(rank_pool: RankPool, kind: str, tied: bool) -> None:
    for full, compact in rank_pool.run(2, compared, Cut(1), DDP[kind], tied):
        check(full, compact, overlaps="overlap_grad_reduce" in DDP[kind])


def test_training_is_the_same_over_tensor_parallelism(rank_pool: RankPool) -> None:
    for full, compact in rank_pool.run(4, compared, Cut(2), OVERLAP, False):
        check(full, compact, overlaps=True)


def check(full: Trained, compact: Trained, *, overlaps: bool) -> None:
    for ours, theirs in zip(compact.scalars, full.scalars, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    for name, theirs in full.weights.items():
        torch.testing.assert_close(compact.weights[name], theirs, atol=1e-5, rtol=1e-4, msg=f"weight {name}")
    assert compact.hooks == full.hooks == 2 * len(MASKS)
    assert compact.ready == full.ready == [int(overlaps)] * len(MASKS)


def test_the_weights_move(rank_pool: RankPool) -> None:
    """What the comparison above would see: an update is larger than its tolerance by far."""
    rank_pool.run(2, moved)


def moved(rank: int, world: int) -> None:
    trained = train(rank, world, Cut(1), OVERLAP, True)
    with cpu_megatron(rank, world, tp=1):
        for name, before in build_gpt(tp=1, vocab=VOCAB, layers=1).named_parameters():
            assert (trained.weights[name] - before).abs().max() > 1e-3, name


def test_a_product_beside_the_module_reads_old_weights(rank_pool: RankPool) -> None:
    rank_pool.run(2, reads_old_weights)


def reads_old_weights(rank: int, world: int) -> None:
    """After a step of the sharded optimizer, a rank has its own part of the head alone until the module is called."""
    with cpu_megatron(rank, world, tp=1), late_gathers():
        micro = micro_batch(0, Cut(1), "holes")
        gpt = build_gpt(tp=1, vocab=VOCAB, layers=1)
        ddp = wrapped(gpt, **OVERLAP)
        optimizer = optimizer_of(ddp)
        call(ddp, micro).square().mean().backward()
        ddp.finish_grad_sync()
        optimizer.step()

        def beside(self: Any, hidden_states: Tensor, **_: Any) -> Tensor:
            return F.linear(hidden_states, self.output_layer.weight).transpose(0, 1)

        gpt._postprocess = MethodType(beside, gpt)
        with torch.no_grad():
            naive = call(ddp, micro)
        del gpt._postprocess
        assert head_bucket(ddp, gpt.output_layer.weight).param_gather_handle is not None, "nobody has waited"
        attach(gpt)
        loss_mask, request = marked(micro, entropy="metric")
        with torch.no_grad():
            ours = kept_scalars(call(ddp, micro, loss_mask), micro, request)
            right = kept_scalars(call(ddp, micro), micro, None)
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)
        assert (kept_scalars(naive, micro, None) - right).abs().max() > 1e-2


def test_no_rows_and_any_number_of_chunks(rank_pool: RankPool) -> None:
    rank_pool.run(1, rows_come_and_go)


def iterations(gpt: Any, ask: Any) -> list[int]:
    """Three iterations under overlapping reduction; how often the head's weight was ready in each."""
    ddp = wrapped(gpt, overlap_grad_reduce=True)
    weight, ready = gpt.output_layer.weight, []
    for number in range(3):
        ddp.zero_grad_buffer()
        ask(ddp, number)
        ready.append(head_bucket(ddp, weight).per_param_grad_ready_counts.get(weight, 0))
        ddp.finish_grad_sync()
    return ready


def rows_come_and_go(rank: int, world: int) -> None:
    micros = [micro_batch(0, Cut(1), mask) for mask in ("everything", "nothing", "one row")]
    with cpu_megatron(rank, world, tp=1), late_gathers():
        gpt = build_gpt(tp=1, vocab=VOCAB, layers=1)
        attach(gpt)

        def compact(ddp: Any, number: int) -> None:
            loss_mask, request = marked(micros[number], entropy="loss", chunk_bytes=1500)
            objective(call(ddp, micros[number], loss_mask), micros[number], request).backward()
            assert bool(gpt.output_layer.weight.main_grad.any()) == bool(micros[number].selection.kept)

        assert iterations(gpt, compact) == [1, 1, 1]

        def cut(self: Any, hidden_states: Tensor, **_: Any) -> Tensor:
            """No rows, so no head."""
            return hidden_states.new_zeros(1, 56, 2) + 0 * hidden_states.sum()

        def cuts(ddp: Any, number: int) -> None:
            if number == 1:
                gpt._postprocess = MethodType(cut, gpt)
            call(ddp, micros[0]).sum().backward()

        gpt = build_gpt(tp=1, vocab=VOCAB, layers=1)
        with pytest.raises(AssertionError, match=r"Communication call has not been issued for this bucket \(0/1"):
            iterations(gpt, cuts)

        def chunked(self: Any, hidden_states: Tensor, **_: Any) -> Tensor:
            """A reentrant checkpoint a chunk: each has a backward pass of its own."""
            weight = self.output_layer.weight
            chunks = hidden_states.chunk(chunk_counts.pop(0))
            return torch.cat(
                [checkpoint(lambda rows: F.linear(rows, weight), each, use_reentrant=True) for each in chunks]
            )

        chunk_counts, gpt = [3, 2, 1], build_gpt(tp=1, vocab=VOCAB, layers=1)
        gpt._postprocess = MethodType(chunked, gpt)
        with pytest.raises(AssertionError, match=r"Communication call has not been issued for this bucket \(1/1"):
            iterations(gpt, lambda ddp, number: call(ddp, micros[0]).sum().backward())
