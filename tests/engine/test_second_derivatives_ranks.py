"""Over ranks, meshes and Megatron's head: a gradient of ours is not differentiated again, the first is as ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from compact_logits.engine.balance import Transfers, return_rows
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.engine.row_gather import SequenceSharded
from compact_logits.integrations.torchforge import compute_logprobs, compute_logprobs_from_hidden
from compact_logits.megatron import Request
from compact_logits.megatron.output_layer import armed
from compact_logits.engine.linear import score_hidden
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from tests.support.collectives import count_collectives
from tests.support.differentiated_again import COLUMNS, HIDDEN, IDS, ROWS, given, refused
from tests.support.gpt_paths import VOCAB, Cut, micro_batch
from tests.support.meshes import cut, mesh_of
from tests.support.ranks import RankPool
from tests.support.sharded_head import shard_of


def over_ranks(rank: int, world: int) -> dict[str, Any]:
    """Collectives of a first derivative, without and with a graph, and what a second one says."""
    cuts = [0, 3, COLUMNS]
    shard = shard_of(rank, cuts)
    weight = given(COLUMNS, HIDDEN).detach()[cuts[rank] : cuts[rank + 1]]  # frozen: nothing but the rows leads on
    counts = (2, 3)
    rows = given(ROWS, HIDDEN).detach().split(counts)[rank].clone().requires_grad_()
    scorer = LogProbScorer(IDS[:, 0], shard, 1.0, "none")
    told: dict[str, Any] = {}

    def scored() -> Tensor:
        exchange = SequenceSharded(dist.group.WORLD, counts)
        return score_hidden(rows, weight, None, scorer, exchange=exchange, group=shard.group)[0].sum()

    for graph in (False, True):
        values = scored()
        with count_collectives() as counted:
            (d_rows,) = torch.autograd.grad(values, rows, create_graph=graph)
        told[f"calls {graph}"] = dict(counted)
        told[f"gradient {graph}"] = d_rows.detach()
    refused(lambda: torch.autograd.grad(d_rows.sum(), rows, allow_unused=True))
    transfers = [Transfers.even(counts)]
    held = sum(transfers[0].received(rank))
    mine = given(held).detach().requires_grad_()
    back = return_rows(mine, dist.group.WORLD, transfers)
    (d_mine,) = torch.autograd.grad(back.exp().sum(), mine, create_graph=True)
    torch.testing.assert_close(d_mine.detach(), mine.detach().exp())
    refused(lambda: torch.autograd.grad(d_mine.sum(), mine))
    return told


def test_ranks_make_the_same_calls_with_and_without_a_graph(rank_pool: RankPool) -> None:
    for told in rank_pool.run(2, over_ranks):
        assert told["calls False"] == told["calls True"] == {"reduce_scatter_tensor": 1}
        assert torch.equal(told["gradient False"], told["gradient True"])


def on_a_mesh(rank: int, world: int) -> bool:
    mesh = mesh_of(2)
    ids = IDS[None, : ROWS - 1, 0]
    logits = cut(given(1, ROWS, COLUMNS).detach(), mesh, [Shard(2)], grad=True)
    (torchs_own,) = torch.autograd.grad(logits.to_local().exp().sum(), logits, create_graph=True)
    if torchs_own.grad_fn is None:
        return False
    plain = torch.autograd.grad(compute_logprobs(logits, ids).sum(), logits)[0]
    (d_logits,) = torch.autograd.grad(compute_logprobs(logits, ids).sum(), logits, create_graph=True)
    assert torch.equal(d_logits.detach().full_tensor(), plain.full_tensor())
    refused(lambda: d_logits.to_local().sum().backward())
    hidden = cut(given(1, ROWS, HIDDEN).detach(), mesh, [Replicate()], grad=True)
    weight = cut(given(COLUMNS, HIDDEN).detach(), mesh, [Shard(0)], grad=True)
    gradients = torch.autograd.grad(
        compute_logprobs_from_hidden(hidden, weight, ids).sum(), (hidden, weight), create_graph=True
    )
    refused(lambda: gradients[0].to_local().sum().backward())
    refused(lambda: gradients[1].to_local().sum().backward())
    head = nn.Linear(HIDDEN, COLUMNS)
    local = given(1, ROWS, HIDDEN)
    (of_module,) = torch.autograd.grad(
        compute_logprobs_from_hidden(local, head, ids).sum(), head.weight, create_graph=True
    )
    refused(lambda: of_module.sum().backward())
    return True


def test_gradients_of_dtensors_are_refused_too(rank_pool: RankPool) -> None:
    if rank_pool.run(2, on_a_mesh) == [False, False]:
        pytest.skip("this torch cuts the graph of every DTensor's gradient at to_local")


def through_megatron(rank: int, world: int, sequence_parallel: bool) -> None:
    with cpu_megatron(rank, world, tp=2):
        model = build_gpt(tp=2, vocab=VOCAB, layers=1, sequence_parallel=sequence_parallel)
        micro = micro_batch(rank, Cut(2), "holes")
        shape = (micro.layout.num_rows // (2 if sequence_parallel else 1), 1, 32)
        for frozen in (True, False):
            model.output_layer.weight.requires_grad_(not frozen)
            hidden = given(*shape)
            gradients = []
            for graph in (False, True):
                with armed(model.output_layer, Request(micro.selection, entropy="loss", chunk_bytes=1)):
                    answer, _ = model.output_layer(hidden)
                gradients.append(torch.autograd.grad(answer.sum(), hidden, create_graph=graph)[0])
            assert torch.equal(gradients[0], gradients[1].detach())
            refused(lambda got=gradients[1], by=hidden: torch.autograd.grad(got.sum(), by, allow_unused=True))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatrons_head_refuses_it_too(rank_pool: RankPool, sequence_parallel: bool) -> None:
    rank_pool.run(2, through_megatron, sequence_parallel)
