"""The bytes that a simulation names are those that an allocation tracker sees in a real run of the same size."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from compact_logits import chunks, linear_log_probs
from compact_logits.errors import InputError
from compact_logits.memory import HeadSize, largest_fitting, simulate
from compact_logits.memory.heads import full_head
from tests.support.allocation import AllocationTracker

SIZE = HeadSize(rows=512, kept=208, vocab=6007, hidden=48, dtype=torch.float32, chunk_bytes=2**20)


def measured(size: HeadSize, path: str) -> tuple[int, int, int]:
    """Forward peak, saved and backward peak of a real run, beyond its inputs."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.rows, size.hidden, generator=random).to(size.dtype).requires_grad_()
    weight = torch.randn(size.vocab, size.hidden, generator=random).to(size.dtype).requires_grad_(not size.frozen)
    targets = torch.randint(size.vocab, (size.rows,), generator=random)
    with AllocationTracker() as seen:
        if path == "full":
            outputs = full_head(
                hidden, weight, targets, temperature=size.temperature, entropy_gradient=size.entropy == "loss"
            )
        else:
            rows = hidden.index_select(0, torch.arange(size.kept))
            stats = linear_log_probs(
                rows,
                weight,
                targets[: size.kept],
                temperature=size.temperature,
                entropy=size.entropy,
                chunk_bytes=size.chunk_bytes,
            )
            outputs = tuple(each for each in stats if each is not None)
            del rows, stats
        forward, saved = seen.peak_bytes, seen.live_bytes
        seen.peak_bytes = seen.live_bytes
        torch.autograd.backward([each.sum() for each in outputs if each.requires_grad])
        return forward, saved, seen.peak_bytes


@pytest.mark.parametrize("path", ["full", "compact"])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"entropy": "metric", "temperature": 0.7},
        {"entropy": "none", "frozen": True},
        {"dtype": torch.bfloat16},
        {"kept": 9},  # one chunk
        {"kept": 512, "chunk_bytes": 300_000},  # many
    ],
    ids=str,
)
def test_within_a_tenth_of_a_real_run(path: str, changed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    # The simulation cuts as for a GPU, and so must the CPU then.
    for name in ("_LEAST_WIDTH", "_WIDENED_PART"):
        monkeypatch.setattr(chunks, name, {})
    size = replace(SIZE, **changed)
    guess = simulate(size, path)  # type: ignore[arg-type]
    for name, real in zip(("forward", "saved", "backward"), measured(size, path), strict=True):
        assert abs(getattr(guess, name) - real) <= 0.1 * real, (name, getattr(guess, name), real)


def test_the_simulation_sees_the_chunks() -> None:
    """It would not be the real code if the budget did not show."""
    kept_at_once = simulate(replace(SIZE, chunk_bytes=2**30), "compact")
    chunked = simulate(SIZE, "compact")
    assert kept_at_once.forward > 3 * chunked.forward
    assert simulate(SIZE, "full").forward > 10 * chunked.forward


def test_tensor_parallelism_halves_the_full_path_and_leaves_no_group_behind() -> None:
    size = replace(SIZE, vocab=6016, hidden=16)
    one, two = (simulate(replace(size, tp=tp), "full") for tp in (1, 2))
    assert two.peak < 0.55 * one.peak
    for sequence_parallel in (True, False):
        compact = simulate(replace(size, tp=2, sequence_parallel=sequence_parallel), "compact")
        assert 0 < compact.peak < two.peak / 5
    assert not dist.is_initialized()


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_torch_without_collectives_of_meta_tensors_counts_the_same(sequence_parallel: bool) -> None:
    size = replace(SIZE, vocab=6016, hidden=16, tp=2, sequence_parallel=sequence_parallel)
    paths = ("full", "compact")
    expected = [simulate(size, path) for path in paths]  # type: ignore[arg-type]
    with mock.patch.object(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: False):
        assert [simulate(size, path) for path in paths] == expected  # type: ignore[arg-type]
    assert [simulate(size, path) for path in paths] == expected, "torch's own are back"  # type: ignore[arg-type]


def test_a_fused_weight_gradient_takes_no_buffer_of_its_own() -> None:
    weight_bytes = SIZE.vocab * SIZE.hidden * 4
    plain, fused = (simulate(replace(SIZE, fused=fused), "compact") for fused in (False, True))
    assert plain.backward - fused.backward >= 0.9 * weight_bytes


def test_the_largest_micro_batch_that_fits() -> None:
    size = replace(SIZE, tp=2, vocab=6016)
    for path in ("full", "compact"):
        budget = simulate(replace(size, rows=1200, kept=round(1200 * 208 / 512)), path).peak  # type: ignore[arg-type]
        most = largest_fitting(size, path, budget)  # type: ignore[arg-type]
        # Somewhat more rows may be cut into chunks that are somewhat smaller.
        assert 1200 - 12 <= most <= 1.1 * 1200, (path, most)
    assert largest_fitting(size, "full", 1000) == 0


def test_sizes_that_do_not_fit_together() -> None:
    with pytest.raises(InputError, match="needed positive sizes and 0 <= kept <= rows"):
        replace(SIZE, kept=513)
    with pytest.raises(InputError, match=r"tensor parallelism over 4 ranks needs vocabulary \(6007\)"):
        replace(SIZE, tp=4)
