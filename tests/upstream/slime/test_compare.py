"""The comparison must fail where two runs differ, whatever they differ in."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch

from tests.upstream.slime.compare import EQUAL, Tolerance, differences, verdict
from tests.upstream.slime.harness import Result

FP32 = Tolerance.of(torch.float32)


def a_run(*, compact: bool) -> Result:
    random = torch.Generator().manual_seed(0)
    masks = [torch.tensor([1, 0, 1]), torch.tensor([0, 1])]
    values = {
        name: [torch.randn(len(mask), generator=random) for mask in masks] for name in ("log_probs", "probe_entropy")
    }
    if compact:
        values = {name: [v * mask for v, mask in zip(each, masks, strict=True)] for name, each in values.items()}
    gradients = [{"head": torch.randn(4, 3, generator=random), "idle": torch.zeros(2)} for _ in range(2)]
    return Result(values, masks, {"1 train/loss": 0.25, "0 rollout/kl": 0.5}, gradients, [])


def nudged(change: Callable[[Result], object]) -> Result:
    run = deepcopy(a_run(compact=True))
    change(run)
    return run


def test_an_equal_compact_run_passes() -> None:
    assert differences(a_run(compact=False), a_run(compact=True), FP32) == []
    assert verdict([a_run(compact=False)] * 2, [a_run(compact=True)] * 2, FP32) == EQUAL


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda run: run.gradients[1]["head"].mul_(1.0003), "step 1: gradient of head is off by 0.0003 of its norm"),
        (lambda run: run.gradients[0]["idle"].add_(1e-9), "step 0: gradient of idle is off by 1.41e-09, from zero"),
        (lambda run: run.gradients[0]["head"].fill_(float("nan")), "gradient of head is off by nan"),
        (lambda run: run.gradients[0].pop("head"), "gradients of ['head'] are in one run alone"),
        (lambda run: run.gradients.pop(), "2 steps became 1"),
        (
            lambda run: run.values["log_probs"][0].add_(torch.tensor([0, 0, 2e-5])),
            "log_probs of sample 0 is off by 2e-05",
        ),
        (lambda run: run.values["probe_entropy"][1].fill_(float("nan")), "probe_entropy of sample 1 is off by nan"),
        (lambda run: run.values.pop("probe_entropy"), "became those of ['log_probs']"),
        (lambda run: run.values["log_probs"].reverse(), "torch.float32 (3,) became torch.float32 (2,)"),
        (lambda run: run.metrics.update({"1 train/loss": 0.2501}), "metric 1 train/loss: 0.25 became 0.2501"),
        (lambda run: run.metrics.update({"1 train/loss": float("nan")}), "metric 1 train/loss: 0.25 became nan"),
        (lambda run: run.metrics.pop("1 train/loss"), "metrics ['1 train/loss'] are in one run alone"),
        (lambda run: run.values["log_probs"][0].add_(torch.tensor([0, 1e-9, 0])), "nothing was compacted"),
    ],
)
def test_whatever_differs_is_told(change: Callable[[Result], object], told: str) -> None:
    found = verdict([a_run(compact=False)] * 2, [a_run(compact=True), nudged(change)], FP32)
    assert found.startswith("DIFFERS") and told in found


def test_a_metric_over_masked_rows_may_be_named_as_an_exception() -> None:
    ours = nudged(lambda run: run.metrics.update({"0 rollout/kl": 0.1}))
    assert differences(a_run(compact=False), ours, FP32) == ["metric 0 rollout/kl: 0.5 became 0.1"]
    assert differences(a_run(compact=False), ours, FP32, ("rollout/kl",)) == []


def test_a_full_path_with_a_reason_must_be_the_same_to_the_bit() -> None:
    full, ours = a_run(compact=False), a_run(compact=False)
    ours.warnings.append("full path for the whole run: a reason")
    assert verdict([full], [ours], FP32) == "full path for the whole run: a reason"
    ours.values["log_probs"][0][1] += 1e-6  # of a masked row
    assert verdict([full], [ours], FP32).startswith("DIFFERS in 1: rank 0: log_probs of sample 0 is off by")
    assert verdict([full], [a_run(compact=False)], FP32) == "DIFFERS: nothing was compacted, and no reason given"
