"""Tensor-parallel ranks that were given different requests, or whose heads differ: one error on all, and no hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.engine import rank_check as ranks_of_any_call
from compact_logits.engine.kernels.verify import Verdict
from compact_logits.errors import CompactLogitsError, DisagreementError, InputError
from compact_logits.megatron import Request, attach, detach, mark, rank_check
from compact_logits.rows import RowSelection
from compact_logits.scorers.top_p import TopPMask
from tests.support.collectives import count_collectives
from tests.support.gpt_paths import VOCAB, Cut, Micro, micro_batch
from tests.support.marked_gpt import call, marked, objective
from tests.support.ranks import RankPool

CUT = Cut(2)


def selection(kept: tuple[int, ...] = (3, 8), rows: int = 56, ids: tuple[int, int] = (5, 7)) -> RowSelection:
    keep = torch.zeros(rows, dtype=torch.bool)
    keep[list(kept)] = True
    tokens = torch.zeros(rows, dtype=torch.int64)
    tokens[list(kept)] = torch.tensor(ids[: len(kept)])
    return RowSelection.build(keep, torch.arange(rows), tokens)


def top_p(listed: int) -> TopPMask:
    return TopPMask(torch.tensor([listed]), torch.tensor([0]), torch.tensor([True, False]))


# What rank 0 and rank 1 ask, and what the error says.
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rows": ({}, {"selection": selection(rows=64)}, "the number of rows is 56 on rank 0, 64 on rank 1"),
    "kept rows": (
        {},
        {"selection": selection((3,), ids=(5, 0))},
        "the number of kept rows is 2 on rank 0, 1 on rank 1",
    ),
    "place": ({}, {"selection": selection((3, 9))}, "the place of the kept rows of rank 1 is not that of rank 0"),
    "targets": ({}, {"selection": selection(ids=(5, 6))}, "the target ids of rank 1"),
    "temperature": ({}, {"temperature": 0.7}, "the temperature of rank 1"),
    "temperature by row": ({}, {"temperature": torch.tensor([1.0, 0.7])}, "the temperature of rank 1"),
    "entropy": ({}, {"entropy": "loss"}, "the entropy, batch size"),
    "batch": ({}, {"batch": 2}, "the entropy, batch size"),
    "sum_p2": ({}, {"sum_p2": True}, "the entropy, batch size"),
    "vocab_size": ({"vocab_size": 96}, {"vocab_size": 95}, "or vocabulary size of rank 1"),
    "top-p sets": ({"top_p": top_p(3)}, {"top_p": top_p(4)}, "the recorded top-p sets of rank 1"),
    "one without top-p sets": ({"top_p": top_p(3)}, {}, "the recorded top-p sets of rank 1"),
}


def raised(call_: Callable[[], object]) -> CompactLogitsError | None:
    try:
        call_()
    except CompactLogitsError as error:
        return error
    return None


def requests_differ(rank: int, world: int) -> dict[str, str]:
    found = {}
    with cpu_megatron(rank, world, tp=2):
        for name, (*asks, _) in REQUESTS.items():
            request = Request(**{"selection": selection(), **asks[rank]})
            error = raised(partial(mark, torch.zeros(1, request.selection.num_rows), request))
            assert type(error) is DisagreementError, (name, error)
            found[name] = str(error)
        with torch.set_grad_enabled(rank == 0):
            error = raised(lambda: mark(torch.zeros(1, 56), Request(selection())))
        found["gradients"] = str(error)
        error = raised(lambda: mark(torch.zeros(1, 56), Request(selection(ids=(5, -1)))))
        assert type(error) is InputError
        found["negative id"] = str(error)
        # Alike on both, or not compared: no error.
        mark(torch.zeros(1, 56), Request(selection()))
        mark(torch.zeros(1, 56), Request(selection(), temperature=1.0 + rank, check_ranks=False))
    return found


def test_requests_that_differ_are_one_error_on_every_rank_before_the_model(rank_pool: RankPool) -> None:
    of_ranks = rank_pool.run(2, requests_differ)
    assert of_ranks[0] == of_ranks[1]
    texts = {name: text for name, (*_, text) in REQUESTS.items()}
    texts["gradients"] = "whether gradients are on is 1 on rank 0, 0 on rank 1"
    texts["negative id"] = "got -1"
    for name, text in texts.items():
        assert text in of_ranks[0][name], of_ranks[0][name]


def different_hooks(model: Any, rank: int) -> None:
    if rank == 1:
        model.output_layer.register_forward_hook(lambda *_: None)


def different_weights(model: Any, rank: int) -> None:
    model.output_layer.weight.requires_grad_(rank == 0)


def different_hidden(model: Any, rank: int) -> None:
    if rank == 1:
        for parameter in (*model.embedding.parameters(), *model.decoder.parameters()):
            parameter.requires_grad_(False)


def different_main_grad(model: Any, rank: int) -> None:
    if rank == 1:
        model.output_layer.weight.main_grad = torch.zeros_like(model.output_layer.weight)


def different_dtype(model: Any, rank: int) -> None:
    if rank == 1:  # the rows of this rank would be refused, since its weight is in another dtype
        model.output_layer.weight.data = model.output_layer.weight.data.double()


HEADS = {
    "a refusal of the head": (different_hooks, "whether the full path is kept of rank 1"),
    "a refusal of the rows": (different_dtype, "whether the full path is kept of rank 1"),
    "gradient of the weight": (different_weights, "whether the weight needs a gradient of rank 1"),
    "gradient of the hidden states": (different_hidden, "whether the hidden states need a gradient of rank 1"),
    "main_grad": (different_main_grad, "whether the weight has a main_grad of rank 1"),
}


def asks(model: Any, micro: Micro, **more: Any) -> tuple[Tensor, Request]:
    loss_mask, request = marked(micro, **more)
    return call(model, micro, loss_mask), request


def heads_differ(rank: int, world: int) -> dict[str, str]:
    found = {}
    micro = micro_batch(rank, CUT, "holes")
    with cpu_megatron(rank, world, tp=2):
        for name, (differ, _) in HEADS.items():
            model: Any = build_gpt(tp=2, vocab=VOCAB, layers=1)
            attach(model)
            differ(model, rank)
            error = raised(partial(asks, model, micro))
            assert type(error) is DisagreementError, (name, error)
            found[name] = str(error)
    return found


def test_heads_that_differ_are_one_error_on_every_rank_at_the_first_compact_call(rank_pool: RankPool) -> None:
    of_ranks = rank_pool.run(2, heads_differ)
    assert of_ranks[0] == of_ranks[1]
    for name, (_, text) in HEADS.items():
        assert text in of_ranks[0][name], of_ranks[0][name]


def labels_on_one_rank(rank: int, world: int) -> str:
    micro = micro_batch(rank, CUT, "holes")
    with cpu_megatron(rank, world, tp=2):
        model: Any = build_gpt(tp=2, vocab=VOCAB, layers=1)
        attach(model)
        loss_mask, _ = marked(micro)
        given = {"labels": micro.tokens} if rank else {}
        error = raised(partial(call, model, micro, loss_mask, **given))
        assert type(error) is DisagreementError, error
        return str(error)


def test_a_refusal_of_the_call_on_one_rank_is_an_error_on_every_rank(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, labels_on_one_rank)
    assert first == second and "whether the full path is kept of rank 1" in first


class OtherHead(ColumnParallelLinear):
    """A head of another type, with a group and without a size of that name, as Transformer Engine's linear layers."""


def other_head(rank: int, world: int) -> str:
    micro = micro_batch(rank, CUT, "holes")
    with cpu_megatron(rank, world, tp=2):
        model: Any = build_gpt(tp=2, vocab=VOCAB, layers=1)
        model.output_layer.__class__ = OtherHead
        del model.output_layer.output_size
        attach(model)
        return asks(model, micro)[1].reason


def test_a_head_of_another_type_keeps_the_full_path_on_every_rank(rank_pool: RankPool) -> None:
    for reason in rank_pool.run(2, other_head):
        assert reason.startswith("the output layer is a OtherHead")


def heads_change(rank: int, world: int) -> None:
    micro = micro_batch(rank, CUT, "holes")
    with cpu_megatron(rank, world, tp=2):
        for name, (differ, _) in HEADS.items():
            model: Any = build_gpt(tp=2, vocab=VOCAB, layers=1)
            attach(model)
            with torch.no_grad():  # a state of its own: a reference pass comes before the first step
                assert asks(model, micro)[1].compact
            for _ in range(2):
                assert asks(model, micro)[1].compact
            differ(model, 0 if name == "gradient of the weight" else 1)
            if name == "gradient of the weight":
                model.output_layer.weight.requires_grad_(False)
            error = raised(partial(asks, model, micro))
            assert type(error) is InputError and "since this head's first compact call" in str(error), (name, error)
            if name != "a refusal of the head" and name != "a refusal of the rows":
                detach(model)
                attach(model)
                assert asks(model, micro)[1].compact, name


def test_a_head_that_changes_later_raises_and_never_takes_the_full_path(rank_pool: RankPool) -> None:
    rank_pool.run(2, heads_change)


def unknown_id(rank: int, world: int) -> list[str]:
    micro = micro_batch(rank, CUT, "holes")
    found = []
    with cpu_megatron(rank, world, tp=2):
        model: Any = build_gpt(tp=2, vocab=VOCAB, layers=1)
        attach(model)
        for size in (None, 50):
            targets = micro.selection.targets.clone()
            targets[2] = VOCAB if size is None else 50
            asked = Request(replace(micro.selection, targets=targets.clamp(max=VOCAB if size is None else 50)))
            asked.vocab_size = size
            error = raised(partial(call, model, micro, mark(micro.loss_mask.clone(), asked)))
            assert type(error) is InputError
            found.append(str(error))
    return found


def test_an_id_that_no_rank_has_is_an_error_on_every_rank(rank_pool: RankPool) -> None:
    of_ranks = rank_pool.run(2, unknown_id)
    assert of_ranks[0] == of_ranks[1]
    assert f"from 0 to {VOCAB - 1}" in of_ranks[0][0] and f"got {VOCAB}" in of_ranks[0][0]
    assert "from 0 to 49" in of_ranks[0][1] and "got 50" in of_ranks[0][1]


def unproven_kernels(rank: int, world: int) -> list[str]:
    micro, warned = micro_batch(rank, CUT, "holes"), []
    verdict = Verdict(rank == 0, "on purpose")
    with (
        cpu_megatron(rank, world, tp=2),
        mock.patch.object(rank_check, "verdict", lambda device: verdict),
        mock.patch.object(ranks_of_any_call, "verdict", lambda device: verdict),
        mock.patch.object(ranks_of_any_call, "use_torch_kernels", lambda device, reason: warned.append(reason)),
    ):
        model: Any = build_gpt(tp=2, vocab=VOCAB, layers=1)
        attach(model)
        for _ in range(2):
            assert asks(model, micro)[1].compact
    return warned


def test_ranks_of_one_head_run_the_same_kernels(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, unproven_kernels) == [["those of rank 1 are not proven"], []]


def counted(rank: int, world: int) -> dict[str, list[dict[str, Any]]]:
    """Collectives of marking, of the head's forward and of its backward, in three micro-batches."""
    found: dict[str, list[dict[str, Any]]] = {}
    micro = micro_batch(rank, CUT, "holes")
    with cpu_megatron(rank, world, tp=2):
        for name, check_ranks in (("default", None), ("off", False)):
            model: Any = build_gpt(tp=2, vocab=VOCAB, layers=1)
            attach(model)
            hidden = torch.randn(28, 1, 32, requires_grad=True)  # this rank's shard of the sequence
            given = dict.fromkeys(
                ("input_ids", "position_ids", "labels", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
            )
            found[name] = []
            for _ in range(3):
                with count_collectives() as of_mark:
                    loss_mask, request = marked(micro, check_ranks=check_ranks)
                with count_collectives() as of_forward:
                    output = model._postprocess(hidden_states=hidden, loss_mask=loss_mask, **given)
                assert request.compact, request.outcome
                with count_collectives() as of_backward:
                    objective(output, micro, request).backward()
                found[name].append({"mark": dict(of_mark), "forward": dict(of_forward), "backward": dict(of_backward)})
        dist.barrier()
    return found


def test_collectives_of_a_micro_batch(rank_pool: RankPool) -> None:
    """Comparisons, the gather of the kept rows under sequence parallelism, that of their statistics; one reduction."""
    gathers = "all_gather_into_tensor"
    later = {"mark": {gathers: 1}, "forward": {gathers: 2}, "backward": {"reduce_scatter_tensor": 1}}
    first, unchecked = later | {"forward": {gathers: 3}}, later | {"mark": {}}
    for found in rank_pool.run(2, counted):
        assert found == {"default": [first, later, later], "off": [unchecked] * 3}
