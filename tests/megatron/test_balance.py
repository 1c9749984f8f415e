"""Context-parallel ranks of a real GPTModel that project equal shares of their rows: the full path's numbers still."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from compact_logits.cli.cpu_model import cpu_megatron
from compact_logits.engine.slices import vocab_slices
from compact_logits.errors import InputError
from compact_logits.megatron import Request, output_layer
from compact_logits.megatron.kept_rows import ContextShare, ProjectedRows, project_rows
from compact_logits.megatron.request import Outcome
from compact_logits.rows import RowSelection
from compact_logits.scorers.top_p import TopPMask
from tests.support.gpt_paths import MASKS, VOCAB, Cut, compact_pass, full_pass, micro_batch
from tests.support.parity import assert_close_to_truth, assert_gradient_close_to_truth
from tests.support.ranks import RankPool

CUTS = [Cut(1, 2), Cut(2, 2), Cut(1, 2, all_gather_cp=True), Cut(2, 2, all_gather_cp=True), Cut(1, 4)]


def share_of(cut: Cut, mask: str) -> ContextShare:
    from megatron.core import parallel_state

    selections = [micro_batch(cp * cut.tp, cut, mask).selection for cp in range(cut.cp)]
    return ContextShare(parallel_state.get_context_parallel_group(), tuple(selections))


def compare(rank: int, world: int, cut: Cut, dtype: torch.dtype) -> dict[str, tuple[int, int, bool]]:
    """Of each mask: rows kept, rows projected, and whether exchanging was worth it."""
    found = {}
    project, projected, outcomes = output_layer.project_rows, [], []

    def spy(*args: object, **kwargs: object) -> ProjectedRows:
        projected.append(project(*args, **kwargs))  # type: ignore[arg-type]
        return projected[-1]

    def told(*args: Any, **kwargs: Any) -> Outcome:
        outcomes.append(Outcome(*args, **kwargs))
        return outcomes[-1]

    spies = patch.multiple(output_layer, project_rows=spy, Outcome=told)
    with cpu_megatron(rank, world, tp=cut.tp, cp=cut.cp), spies:
        for mask in MASKS:
            micro, share = micro_batch(rank, cut, mask), share_of(cut, mask)
            truth = full_pass(cut, micro, temperature=0.7, dtype=torch.float64)
            plain = full_pass(cut, micro, temperature=0.7, dtype=dtype)
            ours = compact_pass(cut, micro, temperature=0.7, chunk_bytes=3000, dtype=dtype, share=share)
            for name in ("log_probs", "entropy"):
                assert_close_to_truth(*(getattr(each, name) for each in (ours, plain, truth)), name=f"{mask}: {name}")
            assert ours.gradients.keys() == truth.gradients.keys()
            # Which rows add up on which rank is not the full path's, whose bf16 sums over ranks round otherwise.
            factor = 1.1 if dtype == torch.float32 else 1.5
            for name, gradient in ours.gradients.items():
                trio = gradient, plain.gradients[name], truth.gradients[name]
                assert_gradient_close_to_truth(*trio, factor=factor, name=f"{mask}: gradient of {name}")
            found[mask] = (micro.selection.kept, projected[-1].targets.shape[0], share.pays)
            assert outcomes[-1].projected_rows == found[mask][1]
            hidden = 32
            slices = vocab_slices(found[mask][1], VOCAB // cut.tp, hidden, dtype, torch.device("cpu"), 3000)
            taken = slices.peak_logits(keep=True) * dtype.itemsize
            spared = 4 * VOCAB // cut.tp * micro.selection.num_rows - taken
            assert outcomes[-1].bytes_not_allocated == max(spared, 0)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_values_and_every_gradient_are_the_full_path_s(rank_pool: RankPool, cut: Cut, dtype: torch.dtype) -> None:
    of_ranks = rank_pool.run(cut.world, compare, cut, dtype, timeout=300)[:: cut.tp]
    exchanged = 0
    for mask in MASKS:
        kept, shares, paid = zip(*(found[mask] for found in of_ranks), strict=True)
        assert len(set(paid)) == 1 and sum(kept) == sum(shares)
        if paid[0]:
            exchanged += 1
            assert max(shares) - min(shares) <= cut.tp and max(shares) < max(kept)
        else:
            assert shares == kept
    assert 1 <= exchanged < len(MASKS)


def selection(kept: int) -> RowSelection:
    keep = torch.arange(8) < kept
    return RowSelection.build(keep, torch.arange(8), torch.arange(8))


def test_where_all_rows_are_kept_none_is_copied() -> None:
    hidden = torch.randn(7, 4, requires_grad=True)
    keep = torch.ones(7, dtype=torch.bool)
    every = RowSelection.build(keep, torch.arange(7), torch.arange(7))
    assert project_rows(hidden, every, None, None, sequence_parallel=False).rows is hidden
    keep[3] = False
    some = RowSelection.build(keep, torch.arange(7), torch.arange(7))
    rows = project_rows(hidden, some, None, None, sequence_parallel=False).rows
    assert torch.equal(rows, hidden[keep])


class Group:
    def size(self) -> int:
        return 2


def test_one_selection_for_each_rank() -> None:
    with pytest.raises(InputError, match="row selection of each of the 2 context-parallel ranks, got 3"):
        ContextShare(Group(), (selection(1),) * 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": torch.ones(3)},
        {"top_p": TopPMask(torch.arange(0), torch.arange(0), torch.zeros(3, dtype=torch.bool))},
    ],
    ids=["temperature", "top-p"],
)
def test_what_does_not_travel_with_the_rows_is_refused(asked: dict[str, Tensor]) -> None:
    share = ContextShare(Group(), (selection(3), selection(1)))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="without a top-p mask or a temperature of their own; leave share None"):
        Request(selection(3), share=share, **asked)  # type: ignore[arg-type]
