"""What every test file may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.ranks import RankPool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Ranks that live as long as the suite: for functions that leave the process as they found it."""
    pool = RankPool()
    yield pool
    pool.close()
