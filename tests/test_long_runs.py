"""Thousands of micro-batches leave nothing behind, nor do hundreds of installations."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from compact_logits import VocabShard, linear_log_probs, log_probs
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.integrations import megatron_rl, slime, torchforge
from compact_logits.megatron import Request, attach, detach, mark
from compact_logits.megatron.output_layer import compact_output_layer
from compact_logits.rows import RowSelection, packed
from tests.support.gpt_paths import VOCAB, Cut, micro_batch
from tests.support.marked_gpt import call, objective
from tests.support.megatron_rl_stand_in import stand_in
from tests.support.ranks import RankPool, run_ranks
from tests.support.slime_stand_in import run_arguments, slime_stand_in
from tests.support.torchforge_tree import forge_modules

pytestmark = pytest.mark.slow

MICRO_BATCHES = 2000
HIDDEN, WIDE = 64, 1024
CHUNK_BYTES = 2**18
# The kept rows alone of all micro-batches are 20 MiB, their logits 300 MiB; an allocator that is shared keeps a few.
FLAT = 8 * 2**20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def live_tensors() -> int:
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


def growth(run: Callable[[int], None], count: int, warm_up: int = 300) -> tuple[int, int]:
    """Bytes and tensors that `count` runs have added to what the first ones needed, with nothing collected."""
    for index in range(warm_up):
        run(index)
    gc.collect()
    gc.disable()
    try:
        before = resident(), live_tensors()
        for index in range(warm_up, count):
            run(index)
        return resident() - before[0], live_tensors() - before[1]
    finally:
        gc.enable()


def random_layout(index: int, multiple: int = 1) -> tuple[RowSelection, int]:
    """Between none and 200 kept rows, of another number of rows each time."""
    random = torch.Generator().manual_seed(index)
    totals = torch.randint(1, 90, (3,), generator=random).tolist()
    layout = packed(totals, [total - 1 for total in totals], sum(totals) + -sum(totals) % multiple)
    density = [0.0, 0.05, 0.5, 0.9][index % 4]
    keep = layout.predicts & (torch.rand(layout.num_rows, generator=random) < density)
    tokens = torch.randint(WIDE, (sum(totals),), generator=random)
    return RowSelection.build(keep, layout.label_source, tokens), layout.num_rows


def step_of_the_function() -> Callable[[int], None]:
    weight = torch.randn(WIDE, HIDDEN).requires_grad_()

    def step(index: int) -> None:
        selection, rows = random_layout(index)
        hidden = torch.randn(rows, HIDDEN, requires_grad=True)
        picked = hidden.index_select(0, selection.indices)
        stats = linear_log_probs(picked, weight, selection.targets, entropy="loss", chunk_bytes=CHUNK_BYTES)
        assert stats.entropy is not None
        (stats.log_probs.sum() + stats.entropy.sum()).backward()
        weight.grad = None

    return step


def flat(rank: int, world: int) -> tuple[int, int]:
    return growth(step_of_the_function(), MICRO_BATCHES)


def leaking(rank: int, world: int) -> tuple[int, int]:
    kept, step = [], step_of_the_function()

    def leaking_step(index: int) -> None:
        step(index)
        if index % 100 == 0:
            kept.append(torch.ones(FLAT // 4))

    return growth(leaking_step, 900)


# In processes of their own: what a suite has freed before would take in a leak unseen.


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_micro_batches_leave_memory_flat() -> None:
    ((size, tensors),) = run_ranks(1, flat, timeout=300)
    assert size < FLAT and tensors == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_leak_of_one_micro_batch_in_a_hundred_would_be_seen() -> None:
    ((size, tensors),) = run_ranks(1, leaking, timeout=300)
    assert size > FLAT and tensors == 6


def heads_in_ranks(rank: int, world: int, count: int) -> tuple[int, int]:
    """The output layer of a GPTModel with sequence parallelism, overridden anew for each micro-batch."""
    with cpu_megatron(rank, world, tp=world):
        head = build_gpt(tp=world, vocab=WIDE, hidden=HIDDEN, layers=1, sequence_parallel=True).output_layer

        def step(index: int) -> None:
            selection, rows = random_layout(index, multiple=world)
            hidden = torch.randn(rows // world, 1, HIDDEN, requires_grad=True)
            with compact_output_layer(head, Request(selection, entropy="loss", chunk_bytes=CHUNK_BYTES)):
                answer, _ = head(hidden)
            answer.sum().backward()
            head.weight.grad = None

        return growth(step, count)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_micro_batches_leave_the_memory_of_ranks_flat(rank_pool: RankPool) -> None:
    for size, tensors in rank_pool.run(2, heads_in_ranks, MICRO_BATCHES, timeout=300):
        assert size < FLAT and tensors == 0


# What stands in a module: each name with its very object, and of a function all that can be written to.


def state_of(holders: list[Any]) -> list[Any]:
    return [(name, value, _inside(value)) for holder in holders for name, value in sorted(vars(holder).items())]


def _inside(value: Any) -> Any:
    if type(value) is not FunctionType:
        return None
    return value.__code__, value.__defaults__, value.__kwdefaults__, dict(vars(value))


def same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(
        one[0] == two[0] and one[1] is two[1] and one[2] == two[2] for one, two in zip(before, after, strict=True)
    )


@contextmanager
def slime_modules() -> Iterator[tuple[list[ModuleType], Any]]:
    run = run_arguments()
    with slime_stand_in(run) as modules:
        yield list(modules.values()), run


@contextmanager
def rl_modules() -> Iterator[tuple[list[ModuleType], Any]]:
    with stand_in() as rl_utils:
        yield [rl_utils, sys.modules["train_rl_stand_in"]], None


@contextmanager
def torchforge_modules() -> Iterator[tuple[list[ModuleType], Any]]:
    with forge_modules(None):
        __import__("forge.actors.reference_model"), __import__("forge.losses.reinforce_loss")
        yield [module for name, module in sorted(sys.modules.items()) if name.split(".")[0] == "forge"], None


@pytest.mark.parametrize(
    ("integration", "modules"),
    [(slime, slime_modules), (megatron_rl, rl_modules), (torchforge, torchforge_modules)],
    ids=["slime", "megatron_rl", "torchforge"],
)
def test_a_hundred_installations_leave_every_module_as_it_was(
    integration: Any, modules: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    with modules() as (holders, args):
        holders = [*holders, GPTModel, torch.Tensor, torch.nn.Module, dist]
        before = state_of(holders)
        for index in range(100):
            integration.install(args)
            if index % 20 == 0:
                assert not same(before, state_of(holders)), "nothing was replaced"
            integration.uninstall()
            if index % 20 == 19:
                assert same(before, state_of(holders))


def attached_and_detached(rank: int, world: int) -> bool:
    with cpu_megatron(rank, world, tp=1):
        model = build_gpt(tp=1, vocab=VOCAB, layers=1)
        micro = micro_batch(0, Cut(1), "holes")
        before = state_of([model, model.output_layer, type(model), type(model.output_layer)])
        for index in range(100):
            attach(model)
            if index % 10 == 0:
                request = Request(micro.selection)
                call(model, micro, mark(micro.loss_mask.clone(), request))
                assert request.compact
            detach(model)
        return same(before, state_of([model, model.output_layer, type(model), type(model.output_layer)]))


def test_attaching_a_hundred_times_leaves_the_model_as_it_was(rank_pool: RankPool) -> None:
    assert rank_pool.run(1, attached_and_detached) == [True]


# What belongs to a micro-batch dies with it, by reference counts alone.


def of_a_micro_batch(rank: int, world: int) -> list[str]:
    """What is still alive once the caller has let go: of a trained, of a forgotten, of a failed micro-batch."""
    with cpu_megatron(rank, world, tp=1):
        model = build_gpt(tp=1, vocab=VOCAB, layers=1)
        attach(model)

        def run(end: str) -> dict[str, weakref.ref[Any]]:
            micro = micro_batch(0, Cut(1), "holes")
            request = Request(micro.selection, entropy="loss", temperature=torch.full((micro.selection.kept,), 0.7))
            loss_mask = mark(micro.loss_mask.clone(), request)
            watched = {"request": request, "selection": micro.selection, "loss mask": loss_mask}
            watched |= {"rows": micro.selection.indices, "targets": micro.selection.targets}
            hidden: list[Tensor] = []
            with model.output_layer.register_forward_pre_hook(lambda _, given: hidden.append(given[0])):
                if end == "failed":
                    stumble = model.output_layer.register_forward_pre_hook(lambda *_: 1 / 0)
                    with stumble, pytest.raises(ZeroDivisionError):
                        call(model, micro, loss_mask)
                else:
                    output = call(model, micro, loss_mask)
                    watched["answer"] = output
                    if end == "trained":
                        objective(output, micro, request).backward()
            watched["hidden states"] = hidden[0]
            return {name: weakref.ref(each) for name, each in watched.items()}

        alive = []
        for end in ("trained", "forgotten", "failed"):
            run(end)  # what is made once is left
            gc.collect()
            gc.disable()
            try:
                alive += [f"{end}: {name}" for name, each in run(end).items() if each() is not None]
            finally:
                gc.enable()
        return alive


def test_nothing_keeps_a_micro_batch_alive(rank_pool: RankPool) -> None:
    assert rank_pool.run(1, of_a_micro_batch) == [[]]


def test_nothing_keeps_given_logits_alive() -> None:
    def run(backward: bool) -> list[weakref.ref[Any]]:
        logits = torch.randn(7, 30, requires_grad=True)
        targets = torch.arange(7)
        stats = log_probs(logits * 1, targets, shard=VocabShard(0, 30), entropy="loss")
        if backward:
            stats.log_probs.sum().backward()
        return [weakref.ref(each) for each in (logits, targets, stats.log_probs)]

    gc.disable()
    try:
        assert [each() for backward in (True, False) for each in run(backward)] == [None] * 6
    finally:
        gc.enable()
