"""What every test file may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import pytest
import torch

from tests.support.ranks import RankPool

torch.set_num_threads(1)

_TORCHFORGE_NEEDS = (2, 9)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """torchforge does not run with an older torch, whose DTensors replicate the gradient of an uneven leaf and whose
    FSDP2 has no CPU, so nothing about it can be told there."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= _TORCHFORGE_NEEDS:
        return
    skip = pytest.mark.skip(reason=f"torchforge needs torch 2.9, here is {torch.__version__}")
    for item in items:
        if "torchforge" in str(item.path):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed_of_the_test(request: pytest.FixtureRequest) -> None:
    """Each test has random numbers of its own, the same in every run: a bound that one draw in thousands would pass
    holds or fails for good."""
    torch.manual_seed(crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Ranks that live as long as the suite: for functions that leave the process as they found it."""
    pool = RankPool()
    yield pool
    pool.close()
