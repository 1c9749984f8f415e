"""Ranks in which slime is imported, apart from all others, since its tree comes first on their path for good."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import RankPool


@pytest.fixture(scope="package")
def slime_ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
