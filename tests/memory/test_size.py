"""What makes a head: how its kept rows lie on the shards, and settings that no head has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compact_logits.errors import InputError
from compact_logits.memory import HeadSize

SIZE = HeadSize(rows=512, kept=208, vocab=6007, hidden=48, dtype=torch.float32)


def test_kept_rows_of_each_shard() -> None:
    size = replace(SIZE, tp=4, vocab=6016, kept=96)
    assert size.shard_counts == (24, 24, 24, 24)
    assert replace(size, most_on_shard=90).shard_counts == (90, 6, 0, 0)
    assert replace(size, most_on_shard=90).of_rows(1024).shard_counts == (180, 12, 0, 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kept": 513}, "needed positive sizes and 0 <= kept <= rows"),
        ({"tp": 4}, r"tensor parallelism over 4 ranks needs vocabulary \(6007\)"),
        ({"nucleus_ids": 6008}, "needed 0 <= nucleus_ids <= vocab"),
        ({"top_k": -1}, "needed 0 <= nucleus_ids <= vocab and 0 <= top_k"),
        ({"top_k": 3, "nucleus_ids": 3}, "or scores a teacher's top-k, got both; set one of them to 0"),
        ({"most_on_shard": 207}, "the fullest has from 208 to 512, got most_on_shard 207"),
    ],
    ids=str,
)
def test_settings_that_no_head_has(changed: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        replace(SIZE, **changed)
