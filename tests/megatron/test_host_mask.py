"""The loss mask on its way to the host: what the tensor-parallel ranks were given is compared in the same wait."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from compact_logits.cli.cpu_model import cpu_megatron
from compact_logits.errors import DisagreementError
from compact_logits.megatron import rank_check
from tests.megatron.test_rank_check import raised
from tests.support.collectives import count_collectives
from tests.support.ranks import RankPool

KEEP, LABELS = torch.arange(12) % 3 == 0, torch.arange(12)
MASKS: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"keep": KEEP[:9], "labels": LABELS[:9]}, "the number of rows is 12 on rank 0, 9 on rank 1"),
    "place": ({"keep": KEEP.roll(1), "labels": LABELS.roll(1)}, "the place of the kept rows of rank 1"),
    "ids": ({"labels": LABELS * 2}, "the target ids of rank 1"),
    "settings": ({"settings": (0.7,)}, "the temperature, entropy, batch size or another setting of rank 1"),
    "top-p sets": ({"recorded": [[3, 4]]}, "the recorded top-p sets of rank 1"),
}


def masks_differ(rank: int, world: int) -> dict[str, str]:
    found = {}
    with cpu_megatron(rank, world, tp=2):
        group = rank_check.tensor_parallel_group()
        for name, (changed, _) in MASKS.items():
            given = {"keep": KEEP, "labels": LABELS, "settings": (1.0,), "recorded": [], **(changed if rank else {})}
            labels = given.pop("labels")
            with count_collectives() as counts:
                error = raised(partial(rank_check.host_mask, labels=lambda labels=labels: labels, group=group, **given))
            assert type(error) is DisagreementError and counts == {"all_gather_into_tensor": 1}, (name, error)
            found[name] = str(error)
        # Ids of rows that are not kept may be any: -200 stands for an image in some prompts.
        keep, largest = rank_check.host_mask(KEEP, lambda: torch.where(KEEP, LABELS, -200), (1.0,), group)
        assert torch.equal(keep, KEEP) and keep.dtype == torch.bool and largest == 9
        assert rank_check.host_mask(KEEP[:0], lambda: LABELS[:0], (), group)[0].shape == (0,)
    return found


def test_masks_that_differ_are_found_on_their_way_to_the_host(rank_pool: RankPool) -> None:
    of_ranks = rank_pool.run(2, masks_differ)
    assert of_ranks[0] == of_ranks[1]
    for name, (_, text) in MASKS.items():
        assert text in of_ranks[0][name], of_ranks[0][name]
