"""The truncated top-k KL equals its definition, in value and gradient, whatever the teacher lists."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compact_logits import TopKKL, VocabShard, linear_topk_kl, topk_kl
from compact_logits.errors import InputError
from tests.support.topk_case import assert_as_good_as_plain, plain, topk_case


def weights(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(9)) + 0.5


def backward(out: TopKKL, by: Tensor) -> None:
    (out.loss * by.to(out.loss.dtype)).sum().backward()


@pytest.mark.parametrize("clamp", [None, -10.0])
@pytest.mark.parametrize("rows_at_once", [7, 64, 4096])
def test_case_1_12_the_published_agreement_with_the_dense_formula(clamp: float | None, rows_at_once: int) -> None:
    case = topk_case(2, 96, vocab=2048, k=32, student_scale=0.7, likeness=0.0)
    out = topk_kl(*case, log_prob_min_clamp=clamp, chunk_bytes=rows_at_once * 2048 * 4 * 16)
    backward(out, torch.ones(2, 96))
    truth, d_truth = plain(case, torch.ones(2, 96), torch.float64, log_prob_min_clamp=clamp)
    assert (out.loss - truth["loss"]).abs().max() <= 1.2e-7
    assert case.logits.grad is not None
    assert (case.logits.grad - d_truth).abs().max() <= 1.3e-9


@pytest.mark.parametrize("settings", [{}, {"log_prob_min_clamp": -2.6}, {"temperature": 0.7}])
def test_case_13_2_gradcheck_with_a_clamp_and_an_id_listed_twice(settings: dict[str, float]) -> None:
    case = topk_case(4, vocab=13, k=5, dtype=torch.float64)
    ids = case.ids.clone()
    ids[0, 1] = ids[0, 0]  # the same id twice
    if "log_prob_min_clamp" in settings:
        log_p = torch.log_softmax(case.logits, -1).gather(-1, ids)
        assert bool((log_p < -2.6).any()) and bool((log_p > -2.6).any())
    assert torch.autograd.gradcheck(lambda z: topk_kl(z, case.log_probs, ids, **settings).loss, case.logits)


def test_masses_are_counted_after_the_clamp() -> None:
    logits = torch.tensor([[0.0, -40.0, -40.0]])
    teacher = torch.tensor([[0.9, 1e-9, 1e-9]]).log()
    out = topk_kl(logits, teacher, torch.arange(3)[None], log_prob_min_clamp=-2.0)
    kept = torch.tensor(-2.0).exp().item()
    assert out.teacher_mass.item() == pytest.approx(0.9 + 2 * kept) and out.teacher_mass.item() > 1
    assert out.student_mass.item() == pytest.approx(1.0 + 2 * kept)
    assert topk_kl(logits, teacher, torch.arange(3)[None]).teacher_mass.item() == pytest.approx(0.9)


def test_case_13_6_the_teacher_is_taken_as_given_and_only_the_student_is_tempered() -> None:
    case = topk_case(5, vocab=50, k=4)
    warm = topk_kl(*case, temperature=2.0)
    by_hand = topk_kl(case.logits / 2.0, case.log_probs, case.ids)
    assert torch.equal(warm.loss, by_hand.loss)
    assert torch.equal(warm.teacher_mass, topk_kl(*case).teacher_mass)


def test_case_13_3_normalised_once_whether_logits_or_log_probs_are_given() -> None:
    case = topk_case(6, vocab=300, k=9, dtype=torch.float64)
    from_log_probs = topk_kl(torch.log_softmax(case.logits, -1), case.log_probs, case.ids)
    torch.testing.assert_close(topk_kl(*case).loss, from_log_probs.loss, rtol=0, atol=1e-12)


def test_case_13_2_an_id_listed_twice_counts_twice() -> None:
    case = topk_case(2, 8, vocab=64, k=6)
    ids = case.ids.clone()
    ids[..., 3] = ids[..., 0]
    ids[0, 0] = ids[0, 0, 0]  # one id, six times
    case = case._replace(ids=ids)
    out = topk_kl(*case)
    backward(out, weights(2, 8))
    assert_as_good_as_plain(out, case.logits.grad, case, weights(2, 8))


def test_an_entry_that_the_teacher_did_not_give_adds_nothing() -> None:
    case = topk_case(4, vocab=64, k=6, dtype=torch.float64)
    log_probs = case.log_probs.clone()
    log_probs[:, 4:] = -torch.inf
    out = topk_kl(case.logits, log_probs, case.ids)
    shorter = topk_kl(case.logits, case.log_probs[:, :4], case.ids[:, :4])
    torch.testing.assert_close(out.loss, shorter.loss, rtol=0, atol=1e-14)
    torch.testing.assert_close(out.teacher_mass, shorter.teacher_mass, rtol=0, atol=1e-14)
    out.loss.sum().backward()
    assert bool(case.logits.grad.isfinite().all())


def test_the_overlap_of_two_known_rows() -> None:
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0], [9.0, 8.0, 7.0, 0.0]])
    q = torch.tensor([[0.7, 0.2], [0.5, 0.4]])
    out = topk_kl(logits, q.log(), torch.tensor([[1, 3], [2, 3]]))
    assert out.overlap_count.tolist() == [1, 0]
    log_p = torch.log_softmax(logits.double(), -1)[0, 1]
    assert out.overlap_token_advantage[0].item() == pytest.approx(0.7 * (log_p.item() - torch.tensor(0.7).log().item()))
    assert out.overlap_token_advantage[1].item() == 0.0
    assert out.overlap_count.dtype == torch.int64


def test_a_masked_id_is_among_the_most_likely_where_all_ids_are() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 2.0, -torch.inf]])
    teacher = torch.full((1, 4), 0.25).log()
    ids = torch.arange(4)[None]
    assert topk_kl(logits, teacher, ids).overlap_count.item() == 4
    assert topk_kl(logits, teacher[:, :2], ids[:, [0, 1]]).overlap_count.item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_where_both_sides_are_below_the_clamp_nothing_is_left(dtype: torch.dtype) -> None:
    """A clamp that fp32 does not hold is the same number for teacher and student."""
    logits = torch.tensor([[30.0, 0.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    loss = topk_kl(logits, torch.full((1, 3), -20.0), torch.tensor([[1, 2, 3]]), log_prob_min_clamp=-1e-3).loss
    loss.sum().backward()
    assert loss.item() == 0.0 and not logits.grad.any()


def test_case_13_5_no_entry_is_clipped_before_the_sum() -> None:
    # q_2 log(q_2 / p_2) is negative and is left so; clipped at zero, the sum would be positive.
    p, q = torch.tensor([[0.5, 0.4, 0.1]]), torch.tensor([[0.4, 0.3]])
    assert topk_kl(p.log(), q.log(), torch.tensor([[0, 1]])).loss.item() == pytest.approx(-0.1755620, abs=1e-6)


def test_more_ids_than_the_vocabulary_has() -> None:
    case = topk_case(3, vocab=5, k=5)
    ids = torch.cat([case.ids, case.ids[:, :2]], dim=1)
    log_probs = torch.cat([case.log_probs, case.log_probs[:, :2]], dim=1)
    out = topk_kl(case.logits, log_probs, ids)
    assert out.overlap_count.tolist() == [7, 7, 7]


def test_only_the_loss_has_a_graph() -> None:
    for tail in (False, True):
        out = topk_kl(*topk_case(3, vocab=20, k=4), tail=tail)
        assert out.loss.requires_grad
        assert not any(value.requires_grad for value in out[1:] if value is not None)
        assert all((value is None) is not tail for value in out[5:])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("tail", [False, True])
def test_rows_outside_the_loss_mask_are_exactly_zero_whatever_stands_there(tail: bool, inplace: bool) -> None:
    case = topk_case(3, 8, vocab=40, k=4)
    mask = torch.rand(3, 8, generator=torch.Generator().manual_seed(1)) > 0.6
    all_rows = topk_kl(*case, tail=tail)
    backward(all_rows, weights(3, 8))
    dirty = torch.where(mask[..., None], case.logits.detach(), torch.nan).requires_grad_()
    out = topk_kl(
        dirty.clone(), case.log_probs, case.ids, tail=tail, loss_mask=mask, inplace_backward=inplace, chunk_bytes=1024
    )
    backward(out, weights(3, 8))
    for value, every in zip(out, all_rows, strict=True):
        assert (value is None) is (every is None)
        assert value is None or torch.equal(value, torch.where(mask, every, 0))
    assert torch.equal(dirty.grad, torch.where(mask[..., None], case.logits.grad, 0.0))


def test_a_mask_without_a_row_stays_on_the_graph() -> None:
    case = topk_case(3, vocab=20, k=4)
    out = topk_kl(*case, loss_mask=torch.zeros(3, dtype=torch.bool))
    backward(out, weights(3))
    assert out.loss.tolist() == [0.0] * 3
    assert torch.equal(case.logits.grad, torch.zeros(3, 20))


@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (1, 2, 3)])
def test_any_leading_dimensions(leading: tuple[int, ...]) -> None:
    case = topk_case(*leading, vocab=30, k=4)
    rows = topk_kl(case.logits.reshape(-1, 30), case.log_probs.reshape(-1, 4), case.ids.reshape(-1, 4))
    out = topk_kl(*case)
    assert all(value is None or value.shape == leading for value in out)
    assert torch.equal(out.loss.reshape(-1), rows.loss)
    hidden = torch.randn(*leading, 8)
    assert linear_topk_kl(hidden, torch.randn(30, 8), *case[1:]).loss.shape == leading


def test_logits_that_are_no_block_of_memory() -> None:
    case = topk_case(5, vocab=30, k=4)
    strided = case.logits.detach().t().contiguous().t().requires_grad_()
    assert not strided.is_contiguous()
    backward(topk_kl(*case), weights(5))
    backward(topk_kl(strided, case.log_probs, case.ids), weights(5))
    assert torch.equal(strided.grad, case.logits.grad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"teacher_ids": torch.zeros(2, 3, dtype=torch.int32)},
            r"needed int64 teacher_ids \(2, 3\), got .* torch.int32",
        ),
        ({"teacher_ids": torch.zeros(2, 4, dtype=torch.int64)}, r"needed int64 teacher_ids \(2, 3\), got \(2, 4\)"),
        ({"teacher_ids": torch.full((2, 3), -1)}, r"teacher_ids must be vocabulary ids, got -1"),
        ({"teacher_ids": torch.full((2, 3), 9)}, r"teacher_ids must be below the vocabulary size 9, got 9"),
        ({"teacher_log_probs": torch.zeros(3, 3)}, r"needed floating teacher_log_probs \(2, 'k'\), got \(3, 3\)"),
        ({"teacher_log_probs": torch.zeros(2, 3, dtype=torch.int64)}, r"needed floating teacher_log_probs"),
        ({"teacher_log_probs": torch.zeros(2, 3, requires_grad=True)}, r"pass teacher_log_probs.detach\(\)"),
        ({"teacher_log_probs": torch.zeros(2, 0), "teacher_ids": torch.zeros(2, 0, dtype=torch.int64)}, r"got k = 0"),
        ({"log_prob_min_clamp": 1.0}, r"log_prob_min_clamp bounds log-probs, which are at most 0, got 1.0"),
        ({"log_prob_min_clamp": "x"}, r"log_prob_min_clamp bounds log-probs, which are at most 0, got 'x'"),
        ({"teacher_log_probs": None}, r"needed a tensor as teacher_log_probs, got None"),
        ({"loss_mask": torch.ones(3, dtype=torch.bool, device="meta")}, r"needed all tensors on one device"),
        ({"log_prob_min_clamp": float("nan")}, r"got nan"),
        ({"tail": True, "log_prob_min_clamp": -10.0}, r"takes no log_prob_min_clamp, got -10.0: .* pass None"),
        ({"tail": True, "tail_mass_eps": 0.0}, r"tail_mass_eps must lie strictly between 0 and 1, got 0.0"),
        ({"tail_mass_eps": 1.0}, r"tail_mass_eps must lie strictly between 0 and 1, got 1.0"),
        ({"tail_mass_eps": float("nan")}, r"tail_mass_eps must lie strictly between 0 and 1, got nan"),
        ({"temperature": 0.0}, r"temperature must be positive"),
        ({"chunk_bytes": 0}, r"chunk_bytes must be a positive whole number"),
        ({"shard": VocabShard(0, 8)}, r"holds 8 ids but logits has 9"),
        ({"loss_mask": torch.ones(2)}, r"needed a bool loss_mask \(2,\), got \(2,\) of torch.float32"),
        ({"loss_mask": torch.ones(3, dtype=torch.bool)}, r"needed a bool loss_mask \(2,\), got \(3,\)"),
        ({"logits": torch.zeros(9, 2).t(), "inplace_backward": True}, r"needs contiguous logits"),
    ],
)
def test_what_cannot_be_computed_is_refused(change: dict[str, object], message: str) -> None:
    good = {
        "logits": torch.zeros(2, 9),
        "teacher_log_probs": torch.full((2, 3), -2.0),
        "teacher_ids": torch.zeros(2, 3, dtype=torch.int64),
    }
    topk_kl(**good)
    with pytest.raises(InputError, match=message):
        topk_kl(**good | change)
