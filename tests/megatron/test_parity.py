"""The compact path through a real GPTModel: the full path's numbers, by the fp64 model's truth, however it is cut."""

from __future__ import annotations

import pytest
import torch

from compact_logits.cli.cpu_model import cpu_megatron
from tests.support.gpt_paths import MASKS, Cut, compact_pass, full_pass, micro_batch
from tests.support.parity import assert_close_to_truth, assert_gradient_close_to_truth
from tests.support.ranks import RankPool

CUTS = [Cut(1), Cut(2), Cut(2, 2), Cut(2, 2, all_gather_cp=True)]
LIMITS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (0.5, 2e-2)}


def compare(rank: int, world: int, cut: Cut, dtype: torch.dtype, tied: bool) -> list[str]:
    """Every mask at once, since starting Megatron costs more than running it. Returns what was compared."""
    compared = []
    with cpu_megatron(rank, world, tp=cut.tp, cp=cut.cp):
        for mask in MASKS:
            micro = micro_batch(rank, cut, mask)
            truth = full_pass(cut, micro, temperature=0.7, dtype=torch.float64, tied=tied)
            plain = full_pass(cut, micro, temperature=0.7, dtype=dtype, tied=tied)
            ours = compact_pass(cut, micro, temperature=0.7, chunk_bytes=3000, dtype=dtype, tied=tied)
            assert ours.output.dtype == torch.float32 and ours.output.shape == (1, micro.layout.num_rows, 2)
            off = torch.ones(micro.layout.num_rows, dtype=torch.bool)
            off[micro.selection.indices] = False
            assert (ours.output[0, off] == 0).all()
            value_limit, gradient_limit = LIMITS[dtype]
            for name in ("log_probs", "entropy"):
                trio = [getattr(each, name) for each in (ours, plain, truth)]
                assert_close_to_truth(*trio, name=f"{mask}: {name}")
                torch.testing.assert_close(trio[0], trio[1], atol=value_limit, rtol=0)
            assert ours.gradients.keys() == plain.gradients.keys() == truth.gradients.keys()
            for name, gradient in ours.gradients.items():
                where = f"{mask}: gradient of {name}"
                assert_gradient_close_to_truth(gradient, plain.gradients[name], truth.gradients[name], name=where)
                difference = (gradient.double() - plain.gradients[name].double()).norm()
                assert difference <= gradient_limit * plain.gradients[name].double().norm(), (where, difference)
                compared.append(where)
            compared += [f"{mask}: row {int(row)}" for row in micro.global_rows]
    return compared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_case_3_6_and_4_3_values_and_every_gradient_are_the_full_path_s(
    rank_pool: RankPool, cut: Cut, dtype: torch.dtype, tied: bool
) -> None:
    compared = rank_pool.run(cut.world, compare, cut, dtype, tied, timeout=300)
    # All context-parallel ranks together have compared each counted row once: 48 - 10 + 10 less the blind first token.
    rows = [row for rank in range(0, cut.world, cut.tp) for row in compared[rank] if row.startswith("everything: row")]
    assert len(rows) == len(set(rows)) == 41
    assert sum("gradient" in each for each in compared[0]) >= 5 * 10


def kept_rows(rank: int, world: int, cut: Cut) -> list[int]:
    micro = micro_batch(rank, cut, "everything")
    return micro.global_rows.tolist()


def test_the_last_prompt_row_predicts_the_first_response_token() -> None:
    rows = kept_rows(0, 1, Cut(1))
    assert 17 - 9 - 1 in rows  # the first sample's last prompt token
    assert 17 + 24 - 20 - 1 in rows
    assert 17 - 1 not in rows  # the last token of a sequence predicts nothing
