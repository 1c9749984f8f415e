"""The layouts against slime's own slicing, run from its source tree, and against Megatron's zigzag."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from compact_logits.rows import Layout, contiguous, packed, zigzag

mpu = pytest.importorskip("megatron.core").mpu
needs_slime = pytest.mark.skipif("SLIME_ROOT" not in os.environ, reason="SLIME_ROOT names no slime source tree")

TOTALS, RESPONSES = [9, 1, 16, 3, 30], [4, 0, 15, 2, 7]
LAYOUTS = [pytest.param(size, allgather, id=f"cp{size}{'-allgather' * allgather}") for size, allgather in
           [(1, False), (2, False), (4, False), (2, True), (4, True)]]  # fmt: skip


@pytest.fixture
def slime(monkeypatch):
    """slime's `data` and `loss` under a package of their own, since the real one patches Megatron when imported."""
    root = os.environ["SLIME_ROOT"]
    before = set(sys.modules)
    monkeypatch.syspath_prepend(root)
    # slime's client of its servers: imported beside what is used here, and with requirements of its own.
    client = ModuleType("slime.utils.http_utils")
    client.is_port_available = None
    monkeypatch.setitem(sys.modules, client.__name__, client)
    package = ModuleType("slime_slicing")
    package.__path__ = [os.path.join(root, "slime", "backends", "megatron_utils")]
    monkeypatch.setitem(sys.modules, "slime_slicing", package)
    data, loss = (importlib.import_module(f"slime_slicing.{name}") for name in ("data", "loss"))
    monkeypatch.setattr(data, "accelerator", SimpleNamespace(device=lambda: "cpu", current_device=lambda: "cpu"))
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_world_size", lambda: 1)
    yield SimpleNamespace(data=data, loss=loss, cp_utils=sys.modules["slime_slicing.cp_utils"])
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("slime", "slime_slicing"):
            del sys.modules[name]


def _be(monkeypatch, rank: int, size: int) -> None:
    monkeypatch.setattr(mpu, "get_context_parallel_rank", lambda: rank)
    monkeypatch.setattr(mpu, "get_context_parallel_world_size", lambda: size)


def _micro_batch(slime, totals: list[int], responses: list[int], allgather: bool):
    """Token ids that are their own index plus 1, masks with interior zeros, through slime's `get_batch`."""
    ids = torch.arange(1, sum(totals) + 1).split(totals)
    masks = [(torch.arange(n) % 3 != 1).int() for n in responses]
    rollout = {"tokens": list(ids), "loss_masks": masks, "total_lengths": totals, "response_lengths": responses}
    batches = slime.data.DataIterator(rollout, [list(range(len(totals)))])
    return slime.data.get_batch(batches, list(rollout), pad_multiplier=8, allgather_cp=allgather)


def _ours(totals: list[int], responses: list[int], rows: int, rank: int, size: int, allgather: bool) -> Layout:
    if size == 1:
        return packed(totals, responses, rows)
    return (contiguous if allgather else zigzag)(totals, responses, rows, rank, size)


@needs_slime
@pytest.mark.parametrize(("size", "allgather"), LAYOUTS)
def test_slime_reads_the_rows_that_the_layout_names(slime, monkeypatch, size, allgather):
    for rank in range(size):
        _be(monkeypatch, rank, size)
        batch = _micro_batch(slime, TOTALS, RESPONSES, allgather)
        rows = batch["tokens"].shape[1]
        layout = _ours(TOTALS, RESPONSES, rows, rank, size, allgather)
        joined = layout.join_tokens(batch["unconcat_tokens"])

        assert torch.equal(layout.source + 1, batch["tokens"][0]), "ids are their index plus 1, and slime pads with 0"
        assert torch.equal(layout.rows_of_masks(batch["loss_masks"]), batch["full_loss_masks"][0] != 0)

        shifted = slime.loss._build_shifted_tokens(
            rows, torch.device("cpu"), batch["unconcat_tokens"], TOTALS, RESPONSES, allgather
        )
        assert torch.equal(joined[layout.label_source[layout.predicts]], shifted[layout.predicts])

        values = torch.arange(1.0, rows + 1)
        theirs, entropy = slime.loss._extract_per_sample(values, values * 2, TOTALS, RESPONSES, allgather)
        for ours, log_prob, doubled in zip(layout.to_responses(values), theirs, entropy, strict=True):
            assert torch.equal(ours, log_prob) and torch.equal(ours * 2, doubled)


@needs_slime
@pytest.mark.parametrize("size", [1, 2, 4])
def test_slime_cuts_whole_responses_alike(slime, monkeypatch, size):
    responses = [torch.rand(n) for n in RESPONSES]
    for rank in range(size):
        _be(monkeypatch, rank, size)
        layout = _ours(TOTALS, RESPONSES, 96, rank, size, False)
        for ours, whole, total in zip(layout.slice_responses(responses), responses, TOTALS, strict=True):
            assert torch.equal(ours, slime.cp_utils.slice_log_prob_with_cp(whole, total, len(whole)))


@needs_slime
@pytest.mark.parametrize("size", [2, 4])
def test_slime_redistributes_contiguous_responses_with_all_response_samples(slime, monkeypatch, size):
    totals, responses = [5, 4, 6, 3], [2, 4, 6, 1]
    monkeypatch.setattr(slime.loss.dist.nn, "all_reduce", lambda tensor, group: tensor)
    monkeypatch.setattr(mpu, "get_context_parallel_group", lambda: None)
    # Left whole, so that the ranks' parts can be added up in place of the all-reduce.
    monkeypatch.setattr(slime.loss, "slice_log_prob_with_cp", lambda whole, total, response: whole)
    rows = 20 // size
    together = [torch.zeros(n) for n in responses]
    for rank in range(size):
        _be(monkeypatch, rank, size)
        layout = contiguous(totals, responses, rows, rank, size)
        local = layout.to_responses(layout.response_source.float() + 1)
        shape_of_slime, _ = slime.loss._extract_per_sample(torch.zeros(rows), None, totals, responses, True)
        assert [len(part) for part in local] == [len(part) for part in shape_of_slime]
        parts = {"log_probs": local}
        slime.loss._allgather_cp_redistribute(
            parts, logits_local_len=rows, total_lengths=totals, response_lengths=responses
        )
        together = [whole + part for whole, part in zip(together, parts["log_probs"], strict=True)]
    # Entry `i` of all responses has the value `i + 1`; the first tokens of samples 1 and 2 have no row, so stay 0.
    assert [whole.tolist() for whole in together] == [
        [1, 2],
        [0, 4, 5, 6],
        [0, 8, 9, 10, 11, 12],
        [13],
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_megatron_cuts_a_padded_sequence_into_the_same_zigzag(monkeypatch, size):
    from megatron.core import parallel_state, utils

    # Newer megatron-core asks for the kind of cut, and reads rank and size of the group it is given.
    parameters = inspect.signature(utils.get_batch_on_this_cp_rank).parameters
    plain = {"is_hybrid_cp": False} if "is_hybrid_cp" in parameters else {}
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: size)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: size)
    length = 6 * size
    for rank in range(size):
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None, rank=rank: rank)
        theirs = utils.get_batch_on_this_cp_rank({"tokens": torch.arange(length)[None]}, **plain)["tokens"][0]
        assert zigzag([length], [1], length // size, rank, size).source.tolist() == theirs.tolist()
