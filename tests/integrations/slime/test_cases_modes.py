"""Cases of the field where precision or a mode of the whole run decides which path is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compact_logits import linear_log_probs
from compact_logits.cli.cpu_model import cpu_megatron
from tests.megatron.test_refusals import run_case
from tests.support.linear_head import Head, assert_as_good_as_plain
from tests.support.marked_gpt import Came, differences
from tests.support.ranks import RankPool
from tests.support.refused_setups import CASES
from tests.support.source_tree import ROOT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
def test_case_11_2_other_rows_beside_a_row_change_it_by_rounding_at_most(dtype: torch.dtype, density: float) -> None:
    """The full path projects all rows, ours the kept ones: another shape of the same product."""
    head = Head.random(700, 96, 1500, dtype)
    kept = torch.rand(700).lt(density).index_fill(0, torch.tensor([5]), True)
    logits = torch.nn.functional.linear(head.hidden, head.weight)
    full = torch.log_softmax(logits.float(), dim=-1).gather(1, head.targets[:, None])[kept, 0]
    truth = torch.log_softmax(head.hidden.double() @ head.weight.double().t(), dim=-1)
    truth = truth.gather(1, head.targets[:, None])[kept, 0]
    ours = linear_log_probs(head.hidden[kept], head.weight, head.targets[kept]).log_probs
    bound = 1.1 * (full - truth).abs().max() + 1e-6
    assert (ours - truth).abs().max() <= bound
    # Of one ratio: both paths lie within the rounding of a logit of each other.
    assert (ours - full).abs().max() <= 2 * logits.abs().max() * torch.finfo(dtype).eps + 1e-5


def test_case_11_2_it_is_said() -> None:
    assert "Compaction changes the number of rows of the head's GEMM" in (ROOT / "README.md").read_text()


def kept_as_without_us(rank: int, world: int, names: tuple[str, ...]) -> list[tuple[str | None, bool]]:
    found = []
    with cpu_megatron(rank, world, tp=1):
        for name in names:
            plain, _ = run_case(CASES[name], asks=False)
            ours, reason = run_case(CASES[name], asks=True)
            if isinstance(plain, Came) and isinstance(ours, Came):
                found.append((reason, differences(plain, ours) == []))
            else:
                found.append((reason, plain == ours))
    return found


def test_case_11_3_batch_invariant_runs_keep_the_full_path_to_the_bit(rank_pool: RankPool) -> None:
    ((found,),) = rank_pool.run(1, kept_as_without_us, ("batch invariant",))
    assert found[0] is not None and "batch-invariant mode" in found[0] and found[1]


def test_case_11_6_an_fp8_head_keeps_the_full_path_to_the_bit(rank_pool: RankPool) -> None:
    names = ("fp8, older TE", "fp8, newer TE")
    (every,) = rank_pool.run(1, kept_as_without_us, names)
    assert every == [("an fp8 autocast of Transformer Engine is on", True)] * 2


@pytest.mark.parametrize("chunk_bytes", [None, 2**18])
def test_case_11_6_a_number_of_rows_that_nothing_divides(chunk_bytes: int | None) -> None:
    head = Head.random(5743, 8, 64, torch.bfloat16)
    fixed: dict[str, Any] = {"factor": 1.1, "floor": 1e-5}
    assert_as_good_as_plain(
        head.compact("metric", chunk_bytes=chunk_bytes), head.plain("metric"), head.truth("metric"), **fixed
    )
