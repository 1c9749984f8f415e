"""Cases of the field about process groups, what is averaged, and who reads whose rows."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from compact_logits import VocabShard, linear_log_probs, scatter, topk_kl
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.engine.logits import score_logits
from compact_logits.megatron import Request, attach, mark
from compact_logits.megatron.output_layer import compact_output_layer
from compact_logits.rows import RowSelection
from compact_logits.scorers.top_p import TopPMask, TopPScorer
from tests.support.gpt_paths import VOCAB, Cut, micro_batch
from tests.support.marked_gpt import call
from tests.support.ranks import RankPool
from tests.support.scorers import log_prob_scorer
from tests.support.sharded_head import shard_of
from tests.support.topk_case import assert_as_good_as_plain, topk_case

K, CUTS = 12, [0, 5, 20]


def more_ids_than_a_slice_has(rank: int, world: int) -> tuple[dict[str, Tensor], Tensor]:
    case = topk_case(6, vocab=CUTS[-1], k=K)
    shard = shard_of(rank, CUTS)
    logits = case.logits.detach()[:, shard.start : shard.stop].clone().requires_grad_()
    result = topk_kl(logits, case.log_probs, case.ids, shard=shard)
    result.loss.sum().backward()
    assert logits.grad is not None
    return {name: each.detach() for name, each in result._asdict().items() if each is not None}, logits.grad


def test_case_13_4_more_ids_than_a_slice_has_columns(rank_pool: RankPool) -> None:
    assert CUTS[1] < K
    case = topk_case(6, vocab=CUTS[-1], k=K)
    (values, first), (_, second) = rank_pool.run(2, more_ids_than_a_slice_has)
    from compact_logits import TopKKL

    ours = TopKKL(**values)
    assert_as_good_as_plain(ours, torch.cat([first, second], dim=1), case, torch.ones(6))


def renormalised(rank: int, world: int, logits: Tensor, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    shard = shard_of(rank, CUTS)
    mine = logits[:, shard.start : shard.stop].clone().requires_grad_()
    rows, k = ids.shape
    mask = TopPMask.build(ids.flatten(), torch.arange(rows) * k, torch.arange(rows) * k + k, torch.ones(rows) > 0)
    (log_probs,) = score_logits(mine, TopPScorer(log_prob_scorer(targets, shard, 1.0, "none", mine.dtype), mask))
    log_probs.sum().backward()
    assert mine.grad is not None
    return log_probs.detach(), mine.grad


def test_case_13_4_renormalised_over_k_columns_is_gathered_then_normalised(rank_pool: RankPool) -> None:
    logits = torch.randn(9, CUTS[-1], dtype=torch.float64, requires_grad=True)
    ids = torch.stack([torch.randperm(CUTS[-1])[:K] for _ in range(9)])
    targets = ids[:, 3].contiguous()
    expected = torch.log_softmax(logits.gather(1, ids), dim=1)[:, 3]
    expected.sum().backward()
    results = rank_pool.run(2, renormalised, logits.detach(), ids, targets)
    for log_probs, _ in results:
        torch.testing.assert_close(log_probs, expected.detach())
    torch.testing.assert_close(torch.cat([gradient for _, gradient in results], dim=1), logits.grad)


def in_an_explicit_group(rank: int, world: int) -> list[Tensor]:
    """World 4, the groups {0, 2} and {1, 3}; Megatron's own tensor-parallel groups are others."""
    with cpu_megatron(rank, world, tp=2):
        config = build_gpt(tp=2, vocab=VOCAB, layers=1).config
        config.sequence_parallel = False
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = groups[rank % 2]
        whole = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(rank % 2))
        head = ColumnParallelLinear(
            32, VOCAB, config=config, init_method=lambda w: None, bias=False, gather_output=False, tp_group=group
        )
        with torch.no_grad():
            head.weight.copy_(whole.chunk(2)[group.rank()])
        hidden = torch.randn(8, 1, 32, generator=torch.Generator().manual_seed(7), requires_grad=True)
        selection = RowSelection.build(torch.arange(8) % 2 == 0, torch.arange(8), torch.arange(8) * 11)
        asked = AssertionError("Megatron's global group was asked for")
        with mock.patch.object(parallel_state, "get_tensor_model_parallel_group", side_effect=asked):
            with compact_output_layer(head, Request(selection, entropy="loss")):
                answer, _ = head(hidden)
            answer.sum().backward()
        logits = hidden.detach()[selection.indices, 0] @ whole.t()
        expected = torch.log_softmax(logits, dim=1).gather(1, selection.targets[:, None])[:, 0]
        assert hidden.grad is not None
        for each in groups:
            if dist.get_rank(each) >= 0:
                dist.destroy_process_group(each)
        return [answer[selection.indices, 0, 0].detach(), expected, hidden.grad]


def test_case_14_1_the_model_s_own_group_is_used(rank_pool: RankPool) -> None:
    results = rank_pool.run(4, in_an_explicit_group)
    for ours, expected, _ in results:
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    for one, other in ((0, 2), (1, 3)):
        assert torch.equal(results[one][2], results[other][2]) and results[one][2].any()
    assert not torch.equal(results[0][0], results[1][0])


def test_case_14_1_without_a_group_nothing_distributed_is_needed() -> None:
    assert not dist.is_initialized()
    z0 = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    stats = linear_log_probs(torch.eye(1), z0.t().contiguous(), torch.tensor([3]), shard=VocabShard(0, 4))
    assert stats.log_probs.item() == pytest.approx(-0.4401897, abs=1e-6)


def test_case_14_3_the_mean_entropy_is_that_of_the_rows_that_count() -> None:
    z = torch.tensor([[0.0, 1.0, 2.0, 3.0], [9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    kept = torch.tensor([0, 2])
    stats = linear_log_probs(torch.eye(4)[kept], z.t().contiguous(), torch.tensor([0, 0]), entropy="metric")
    assert stats.entropy is not None
    in_layout = scatter(stats.entropy, kept, 4)
    expected = (0.9475370 + torch.tensor(4.0).log().item()) / 2
    assert in_layout.sum().item() / len(kept) == pytest.approx(expected, abs=1e-6)
    assert in_layout[[1, 3]].tolist() == [0.0, 0.0]


def critic_of_the_same_class(rank: int, world: int) -> None:
    with cpu_megatron(rank, world, tp=1):
        actor, critic = (build_gpt(tp=1, vocab=VOCAB, layers=1, seed=seed) for seed in (0, 1))
        micro = micro_batch(0, Cut(1), "holes")
        values = call(critic, micro)
        attach(actor)
        request = Request(micro.selection)
        loss_mask = mark(micro.loss_mask.clone(), request)
        answer = call(actor, micro, loss_mask)
        seen: Any = call(critic, micro, loss_mask)
        assert request.answered_by(answer) and not request.answered_by(seen)
        assert torch.equal(seen, values) and seen.shape == (1, micro.layout.num_rows, VOCAB)


def test_case_14_4_a_critic_does_not_read_the_actor_s_rows(rank_pool: RankPool) -> None:
    rank_pool.run(1, critic_of_the_same_class)
