"""The distributed helpers: they return what ranks return, and every way to fail ends soon and says what happened."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, RankPool, run_ranks


def sum_of_ranks(rank: int, world: int, offset: float) -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(rank), offset])
    dist.all_reduce(total)
    return rank, total


def process_facts(rank: int, world: int) -> tuple[int, int, str | None]:
    return os.getpid(), torch.get_num_threads(), os.environ.get("RANKS_TEST")


def leave_groups(rank: int, world: int, count: int) -> None:
    for _ in range(count):
        dist.new_group(list(range(world)))


def raise_on(rank: int, world: int, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def hang_on(rank: int, world: int, bad: int) -> None:
    while rank == bad:
        time.sleep(0.01)


def die_on(rank: int, world: int, bad: int) -> None:
    if rank == bad:
        os._exit(7)
    dist.barrier()


def return_a_lambda(rank: int, world: int) -> object:
    return lambda: rank


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fresh_ranks_share_a_group_and_answer_in_order(world: int) -> None:
    results = run_ranks(world, sum_of_ranks, 1.0)
    assert [rank for rank, _ in results] == list(range(world))
    for _, total in results:
        torch.testing.assert_close(total, torch.tensor([world * (world - 1) / 2, float(world)]))


def test_ranks_have_one_thread_and_todays_environment(rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_pool.run(2, process_facts)
    monkeypatch.setenv("RANKS_TEST", "now")
    for facts in (rank_pool.run(2, process_facts), run_ranks(2, process_facts)):
        assert [(threads, value) for _, threads, value in facts] == [(1, "now"), (1, "now")]


def test_pool_keeps_its_processes_and_fresh_ranks_do_not(rank_pool: RankPool) -> None:
    pids = [[facts[0] for facts in rank_pool.run(2, process_facts)] for _ in range(2)]
    assert pids[0] == pids[1]
    assert not {facts[0] for facts in run_ranks(2, process_facts)} & set(pids[0])


def test_pool_drops_processes_that_gathered_many_groups(rank_pool: RankPool) -> None:
    rank_pool.run(2, leave_groups, 20)  # whatever earlier tests have left goes with these
    before = [facts[0] for facts in rank_pool.run(2, process_facts)]
    rank_pool.run(2, leave_groups, 3)
    assert before == [facts[0] for facts in rank_pool.run(2, process_facts)]
    rank_pool.run(2, leave_groups, 20)
    assert not set(before) & {facts[0] for facts in rank_pool.run(2, process_facts)}


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_raises_fails_the_call_with_its_traceback(bad: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=f"rank {bad} of 2 raised:\n(.|\n)*ValueError: rank {bad} has had enough"):
        run_ranks(2, raise_on, bad)
    assert time.monotonic() - start < 60, "the rank in the barrier was waited for"


def test_a_rank_that_hangs_fails_the_call_in_bounded_time(rank_pool: RankPool) -> None:
    rank_pool.run(2, process_facts)  # so that the limit is not spent on starting
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 had not answered \(limit 5 s\)(.|\n)*in hang_on") as failure:
        rank_pool.run(2, hang_on, 1, timeout=5)
    assert "rank 0 of 2" not in str(failure.value)
    assert time.monotonic() - start < 40


def test_a_rank_that_dies_fails_the_call() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 died with exit code 7"):
        run_ranks(2, die_on, 1)


def test_a_result_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(RankError, match="raised:(.|\n)*lambda"):
        run_ranks(1, return_a_lambda)


@pytest.mark.parametrize(("fn", "limit"), [(raise_on, 60.0), (hang_on, 3.0), (die_on, 60.0)])
def test_pool_is_rebuilt_after_a_failure(fn: object, limit: float, rank_pool: RankPool) -> None:
    before = {facts[0] for facts in rank_pool.run(2, process_facts)}
    with pytest.raises(RankError):
        rank_pool.run(2, fn, 0, timeout=limit)
    after = {facts[0] for facts in rank_pool.run(2, process_facts)}
    assert not before & after
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
