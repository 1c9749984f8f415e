"""The definition itself, against numbers worked out by hand in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compact_logits import reference


def scores(logits: list[float], target: int, temperature: float = 1.0) -> tuple[float, float]:
    row = torch.tensor([logits], dtype=torch.float64)
    log_prob, entropy = reference.log_probs(row, torch.tensor([target]), temperature=temperature)
    return log_prob.item(), entropy.item()


def gradient(of_log_prob: float, of_entropy: float, target: int) -> Tensor:
    logits = torch.tensor([[0.0, 1, 2, 3]], dtype=torch.float64, requires_grad=True)
    log_prob, entropy = reference.log_probs(logits, torch.tensor([target]))
    (of_log_prob * log_prob + of_entropy * entropy).sum().backward()
    return logits.grad[0]


def test_values() -> None:
    expected = [-3.4401897, -2.4401897, -1.4401897, -0.4401897]
    for target, log_prob in enumerate(expected):
        assert scores([0, 1, 2, 3], target) == pytest.approx((log_prob, 0.9475370), abs=1e-7)
    assert sum(2.718281828459045**log_prob for log_prob in expected) == pytest.approx(1.0, abs=1e-7)


@pytest.mark.parametrize(
    ("of_log_prob", "of_entropy", "target", "expected"),
    [
        (1, 0, 3, [-0.0320586, -0.0871443, -0.2368828, 0.3560857]),
        (1, 0, 0, [0.9679414, -0.0871443, -0.2368828, -0.6439143]),
        (0, 1, 3, [0.0799110, 0.1300762, 0.1167010, -0.3266881]),
        (2, -0.5, 3, [-0.1040727, -0.2393267, -0.5321161, 0.8755155]),
    ],
)
def test_gradients(of_log_prob: float, of_entropy: float, target: int, expected: list[float]) -> None:
    assert gradient(of_log_prob, of_entropy, target).tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("temperature", "log_prob", "entropy"),
    [(0.5, -0.0205811, 0.1069208), (1.0, -0.1698460, 0.5242666), (1.5, -0.3357094, 0.7804295)],
)
def test_temperature_divides_both(temperature: float, log_prob: float, entropy: float) -> None:
    assert scores([2, 0, -1], 0, temperature) == pytest.approx((log_prob, entropy), abs=1e-7)


def test_a_temperature_a_row() -> None:
    logits = torch.tensor([[2.0, 0, -1]], dtype=torch.float64).expand(3, 3)
    temperature = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64)
    log_prob, entropy = reference.log_probs(logits, torch.zeros(3, dtype=torch.int64), temperature=temperature)
    assert log_prob.tolist() == pytest.approx([-0.0205811, -0.1698460, -0.3357094], abs=1e-7)
    assert entropy.tolist() == pytest.approx([0.1069208, 0.5242666, 0.7804295], abs=1e-7)


def test_a_uniform_row_over_a_real_vocabulary() -> None:
    logits = torch.zeros(1, 248320, dtype=torch.float64)
    for target in (0, 124160, 248319):
        log_prob, entropy = reference.log_probs(logits, torch.tensor([target]))
        assert log_prob.item() == pytest.approx(-12.4224735, abs=1e-7)
        assert entropy.item() == pytest.approx(12.4224735, abs=1e-7)


def test_large_logits_and_a_pad_column() -> None:
    assert scores([10000, 9999, 9998], 1) == pytest.approx((-1.4076060, 0.8323956), abs=1e-7)
    assert scores([1, 2, 3], 2) == pytest.approx((-0.4076060, 0.8323956), abs=1e-7)
    assert scores([1, 2, 3, 5], 2) == pytest.approx((-2.1851825, 0.5950867), abs=1e-7)
    assert scores([1, 2, 3, float("-inf")], 2) == pytest.approx((-0.4076060, 0.8323956), abs=1e-7)


@pytest.mark.parametrize(
    ("given", "result"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
    ids=str,
)
def test_results_are_at_least_fp32(given: torch.dtype, result: torch.dtype) -> None:
    log_prob, entropy = reference.log_probs(torch.zeros(1, 4, dtype=given), torch.tensor([0]))
    assert log_prob.dtype == entropy.dtype == result
