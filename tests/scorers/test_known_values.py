"""Known values, and logits at the edges of what floats hold, through both entries."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compact_logits import TokenStats, linear_log_probs, log_probs, reference

NAN, INF = math.nan, math.inf

Score = Callable[..., TokenStats]


def through_logits(logits: Tensor, targets: Tensor, **options: object) -> TokenStats:
    return log_probs(logits, targets, **options)


def through_head(logits: Tensor, targets: Tensor, **options: object) -> TokenStats:
    """Row by row: the row is the bias of a head whose product is zero, so that any value survives it."""
    temperature = options.pop("temperature", 1.0)
    zeros = torch.zeros(1, 1, dtype=logits.dtype), torch.zeros(logits.shape[1], 1, dtype=logits.dtype)
    rows = []
    for i in range(logits.shape[0]):
        of_row = temperature[i : i + 1] if isinstance(temperature, Tensor) else temperature
        rows.append(linear_log_probs(*zeros, targets[i : i + 1], bias=logits[i], temperature=of_row, **options))
    entropies = [row.entropy for row in rows if row.entropy is not None]
    return TokenStats(torch.cat([row.log_probs for row in rows]), torch.cat(entropies) if entropies else None)


def by_definition(logits: Tensor, targets: Tensor, **options: object) -> TokenStats:
    options.pop("entropy")
    return TokenStats(*reference.log_probs(logits, targets, **options))


each_entry = pytest.mark.parametrize("score", [through_logits, through_head])
and_the_definition = pytest.mark.parametrize("score", [through_logits, through_head, by_definition])


def gradient(score: Score, row: list[float], target: int, weights: tuple[float, float], **options: object) -> Tensor:
    """Of `weights[0] * log_prob + weights[1] * entropy`, by the logits."""
    dtype = options.pop("dtype", torch.float32)
    logits = torch.tensor([row], dtype=dtype, requires_grad=True)
    result = score(logits, torch.tensor([target]), entropy="loss", **options)
    (weights[0] * result.log_probs + weights[1] * result.entropy).sum().backward()
    return logits.grad[0]


@and_the_definition
def test_values_and_gradients_of_a_known_row(score: Score) -> None:
    logits = torch.tensor([[0.0, 1, 2, 3]]).expand(4, 4)
    result = score(logits, torch.arange(4), entropy="metric")
    assert result.log_probs.tolist() == pytest.approx([-3.4401897, -2.4401897, -1.4401897, -0.4401897], abs=1e-6)
    assert result.entropy.tolist() == pytest.approx([0.9475370] * 4, abs=1e-6)
    for target, weights, expected in (
        (3, (1.0, 0.0), [-0.0320586, -0.0871443, -0.2368828, 0.3560857]),
        (0, (1.0, 0.0), [0.9679414, -0.0871443, -0.2368828, -0.6439143]),
        (3, (0.0, 1.0), [0.0799110, 0.1300762, 0.1167010, -0.3266881]),
        (3, (2.0, -0.5), [-0.1040727, -0.2393267, -0.5321161, 0.8755155]),
    ):
        assert gradient(score, [0, 1, 2, 3], target, weights).tolist() == pytest.approx(expected, abs=1e-6)


@and_the_definition
@pytest.mark.parametrize(
    ("temperature", "log_prob", "entropy"),
    [(0.5, -0.0205811, 0.1069208), (1.0, -0.1698460, 0.5242666), (1.5, -0.3357094, 0.7804295)],
)
def test_case_10_1_temperature_reaches_both_outputs(
    score: Score, temperature: float, log_prob: float, entropy: float
) -> None:
    logits = torch.tensor([[2.0, 0, -1]])
    for given in (temperature, torch.tensor([temperature])):
        result = score(logits, torch.tensor([0]), temperature=given, entropy="metric")
        assert (result.log_probs.item(), result.entropy.item()) == pytest.approx((log_prob, entropy), abs=1e-6)


@each_entry
def test_case_10_2_a_temperature_of_one_changes_no_bit_and_any_other_counts_once(score: Score) -> None:
    logits, targets = torch.randn(6, 11), torch.randint(0, 11, (6,))
    without = score(logits, targets, entropy="metric")
    for one in (1, 1.0, torch.ones(6), torch.ones(6, dtype=torch.float16)):
        same = score(logits, targets, temperature=one, entropy="metric")
        assert torch.equal(same.log_probs, without.log_probs) and torch.equal(same.entropy, without.entropy)
    once = score(logits / 0.7, targets, entropy="metric")
    tempered = score(logits, targets, temperature=0.7, entropy="metric")
    torch.testing.assert_close(tempered.log_probs, once.log_probs, rtol=0, atol=2e-6)
    torch.testing.assert_close(tempered.entropy, once.entropy, rtol=0, atol=2e-6)


@and_the_definition
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_case_11_1_sums_over_a_real_vocabulary_do_not_stall(score: Score, dtype: torch.dtype) -> None:
    result = score(torch.zeros(1, 248320, dtype=dtype), torch.tensor([248319]), entropy="metric")
    assert result.log_probs.dtype == result.entropy.dtype == torch.float32
    assert result.log_probs.item() == pytest.approx(-12.4224735, abs=1e-5)
    assert result.entropy.item() == pytest.approx(12.4224735, abs=1e-5)


def test_case_11_1_bf16_logits_score_as_the_numbers_they_hold() -> None:
    logits, targets = (torch.randn(64, 4096) * 4).bfloat16(), torch.randint(0, 4096, (64,))
    exact = torch.log_softmax(logits.double(), dim=1)
    result = log_probs(logits, targets, entropy="metric")
    expected = exact.gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(result.log_probs.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(result.entropy.double(), -(exact.exp() * exact).sum(1), rtol=0, atol=1e-5)


@and_the_definition
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_logits_lose_nothing(score: Score, dtype: torch.dtype) -> None:
    logits = torch.tensor([[10000.0, 9999, 9998]], dtype=dtype)
    result = score(logits, torch.tensor([1]), entropy="metric")
    assert (result.log_probs.item(), result.entropy.item()) == pytest.approx((-1.4076060, 0.8323956), abs=1e-6)
    got = gradient(score, [10000, 9999, 9998], 1, (1.0, 0.0), dtype=dtype)
    assert got.tolist() == pytest.approx([-0.6652410, 0.7552715, -0.0900306], abs=1e-6)


@each_entry
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_case_5_7_a_dominant_target_has_no_positive_log_prob(score: Score, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 1000, generator=generator) + 7.3
    logits[torch.arange(64), torch.arange(64)] += 40
    result = score(logits.to(dtype), torch.arange(64), entropy="metric")
    assert bool((result.log_probs <= 0).all()) and bool((result.log_probs > -1e-6).all())
    assert bool((result.entropy >= 0).all())


@each_entry
def test_case_5_8_a_huge_spread_in_fp16_is_finite(score: Score) -> None:
    row = [60000.0, -60000.0, 59968.0, 0.0]
    for target, log_prob in ((0, 0.0), (1, -120000.0), (2, -32.0)):
        result = score(torch.tensor([row]).half(), torch.tensor([target]), entropy="metric")
        assert result.log_probs.item() == pytest.approx(log_prob, rel=1e-6, abs=1e-6)
        assert result.entropy.item() == pytest.approx(0.0, abs=1e-6)
        got = gradient(score, row, target, (1.0, 1.0), dtype=torch.float16)
        expected = [float(target == j) - float(j == 0) for j in range(4)]
        assert got.tolist() == pytest.approx(expected, abs=1e-3)


@each_entry
@pytest.mark.parametrize("mask", [-INF, torch.finfo(torch.float32).min, -1e30, -1e4])
@pytest.mark.parametrize("scale", [1.0, 1e9])
def test_masked_columns_have_no_share_and_no_gradient(score: Score, mask: float, scale: float) -> None:
    result = score(torch.tensor([[1.0, 2, mask, 3, mask]]), torch.tensor([3]), entropy="metric")
    assert (result.log_probs.item(), result.entropy.item()) == pytest.approx((-0.4076060, 0.8323956), abs=1e-6)
    for temperature in (1.0, 1e-3):
        got = gradient(score, [1.0, 2, mask, 3, mask], 3, (scale, scale), temperature=temperature)
        assert bool(torch.isfinite(got).all())
        assert got[2].item() == got[4].item() == 0.0


@each_entry
def test_a_masked_target_is_minus_infinity(score: Score) -> None:
    result = score(torch.tensor([[1.0, 2, -INF, 3]]), torch.tensor([2]), entropy="metric")
    assert result.log_probs.item() == -INF
    assert result.entropy.item() == pytest.approx(0.8323956, abs=1e-6)
    got = gradient(score, [1.0, 2, -INF, 3], 2, (1.0, 0.0))
    assert got.tolist() == pytest.approx([-0.0900306, -0.2447285, 1.0, -0.6652410], abs=1e-6)


@each_entry
@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
@pytest.mark.parametrize("row", [[NAN, 1, 2], [0, NAN, 2], [INF, 1, 2], [0, INF, 2], [-INF] * 3, [INF, INF, -INF]])
def test_what_is_not_a_number_stays_not_a_number(score: Score, row: list[float], entropy: str) -> None:
    logits = torch.tensor([row, [1.0, 2, 3]], requires_grad=True)
    result = score(logits, torch.tensor([1, 2]), entropy=entropy)
    assert math.isnan(result.log_probs[0].item())
    assert result.log_probs[1].item() == pytest.approx(-0.4076060, abs=1e-6)
    if entropy != "none":
        assert math.isnan(result.entropy[0].item())
        assert result.entropy[1].item() == pytest.approx(0.8323956, abs=1e-6)
    result.log_probs.sum().backward()
    assert bool(logits.grad[0].isnan().any()) and bool(torch.isfinite(logits.grad[1]).all())


@each_entry
def test_a_uniform_row_of_the_lowest_numbers(score: Score) -> None:
    lowest = torch.finfo(torch.float32).min
    result = score(torch.full((1, 4), lowest), torch.tensor([0]), entropy="metric")
    assert result.log_probs.item() == pytest.approx(-math.log(4), abs=1e-6)
    assert result.entropy.item() == pytest.approx(math.log(4), abs=1e-6)


def test_case_6_2_a_padded_vocabulary_counts_unless_its_bias_masks_it() -> None:
    hidden, head = torch.tensor([[1.0, 2, 3, 5]]), torch.eye(4)
    counted = linear_log_probs(hidden, head, torch.tensor([2]), entropy="metric")
    assert (counted.log_probs.item(), counted.entropy.item()) == pytest.approx((-2.1851825, 0.5950867), abs=1e-6)
    weight, bias = head.clone().requires_grad_(), torch.tensor([0, 0, 0, -INF], requires_grad=True)
    masked = linear_log_probs(hidden, weight, torch.tensor([2]), bias=bias, entropy="loss")
    assert (masked.log_probs.item(), masked.entropy.item()) == pytest.approx((-0.4076060, 0.8323956), abs=1e-6)
    (masked.log_probs + masked.entropy).sum().backward()
    assert bool((weight.grad[3] == 0).all()) and bias.grad[3].item() == 0.0
    assert bool(torch.isfinite(weight.grad).all()) and bool(torch.isfinite(bias.grad).all())


def test_case_9_4_a_bias_and_its_gradient() -> None:
    # The identity as the head: its logits are the hidden states.
    bias = torch.tensor([0.0, 0, 0, 1], requires_grad=True)
    result = linear_log_probs(torch.tensor([[0.0, 1, 2, 3]]), torch.eye(4), torch.tensor([3]), bias=bias)
    result.log_probs.sum().backward()
    assert result.log_probs.item() == pytest.approx(-0.1851825, abs=1e-6)
    expected = torch.tensor([0.0, 0, 0, 1]).double() - torch.tensor([0.0, 1, 2, 4]).double().softmax(0)
    torch.testing.assert_close(bias.grad.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_case_2_2_entropy_is_the_same_before_and_after_log_prob(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 1, 2, 3]], dtype=dtype).requires_grad_()
    head, target = torch.eye(4, dtype=dtype), torch.tensor([3])
    for score in (
        lambda **options: log_probs(logits, target, **options),
        lambda **options: linear_log_probs(logits, head, target, **options),
    ):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                before, alone, after = score(entropy="loss").entropy, score().log_probs, score(entropy="loss").entropy
            assert alone.item() == pytest.approx(-0.4401897, abs=1e-6)
            assert before.item() == after.item() == pytest.approx(0.9475370, abs=1e-6)
