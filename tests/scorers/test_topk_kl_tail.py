"""The tail-aware form is the exact KL of k + 1 categories, with a tail that fp32 does not lose."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from compact_logits import reference, topk_kl
from tests.support.topk_case import topk_case


def known(p: list[float], q: list[float], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """A student with the probabilities `q`, and a teacher who lists `p` for the first ids."""
    logits = torch.tensor([q], dtype=torch.float64).log().to(dtype).requires_grad_()
    return logits, torch.tensor([p], dtype=torch.float64).log().to(dtype), torch.arange(len(p))[None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_case_13_1_golden_head_and_tail(dtype: torch.dtype) -> None:
    logits, log_probs, ids = known([0.4, 0.3], [0.5, 0.4, 0.06, 0.04], dtype)
    truncated = topk_kl(logits, log_probs, ids)
    assert truncated.loss.item() == pytest.approx(-0.1755620, abs=5e-7)
    truncated.loss.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.05, -0.02, 0.042, 0.028]], dtype=dtype))
    logits.grad = None
    out = topk_kl(logits, log_probs, ids, tail=True)
    assert out.loss.item() == pytest.approx(0.1540216, abs=5e-7)
    assert out.head_loss.item() == pytest.approx(-0.1755620, abs=5e-7)
    assert out.tail_loss.item() == pytest.approx(0.3295837, abs=5e-7)
    assert out.student_tail_mass.item() == pytest.approx(0.1, abs=1e-7)
    assert out.teacher_tail_mass.item() == pytest.approx(0.3, abs=1e-7)
    out.loss.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.1, 0.1, -0.12, -0.08]], dtype=dtype))


def test_case_13_1_a_teacher_without_a_tail() -> None:
    logits, log_probs, ids = known([0.6, 0.4], [0.3, 0.2, 0.5])
    out = topk_kl(logits, log_probs, ids, tail=True)
    assert out.loss.item() == pytest.approx(0.6931472, abs=1e-7)
    assert out.tail_loss.item() == pytest.approx(0.0, abs=1e-14)
    out.loss.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.3, -0.2, 0.5]], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_case_13_1_a_student_without_a_tail_is_bounded_by_the_guard(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 0.0, -200.0]], dtype=dtype, requires_grad=True)
    out = topk_kl(logits, torch.tensor([[0.4, 0.4]], dtype=dtype).log(), torch.tensor([[0, 1]]), tail=True)
    head = 0.8 * math.log(0.4 / 0.5)
    assert out.loss.item() == pytest.approx(head + 0.2 * math.log(0.2 / 1e-6), rel=1e-6)
    out.loss.sum().backward()
    # The guarded tail is a constant; what is left is the gradient of the head alone.
    torch.testing.assert_close(logits.grad, torch.tensor([[0.0, 0.0, 0.0]], dtype=dtype), rtol=0, atol=1e-7)


def test_case_13_1_equal_distributions_have_no_loss_and_no_gradient() -> None:
    for dtype, atol in ((torch.float64, 1e-15), (torch.float32, 1e-7)):
        logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        top = torch.log_softmax(logits.detach(), -1).topk(7)
        out = topk_kl(logits, top.values, top.indices, tail=True)
        out.loss.sum().backward()
        assert out.loss.min() >= 0.0 and out.loss.max() <= atol
        assert logits.grad.abs().max() <= atol


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"tail_mass_eps": 0.73}])
def test_case_2_5_gradcheck(settings: dict[str, float]) -> None:
    case = topk_case(6, vocab=13, k=3, dtype=torch.float64, likeness=0.2)
    ids = case.ids.clone()
    ids[0, 1] = ids[0, 0]  # the same id twice
    out = topk_kl(case.logits, case.log_probs, ids, tail=True, **settings)
    assert bool((out.loss > 1e-3).all()), "away from zero, where it may bend"
    if "tail_mass_eps" in settings:
        assert bool((out.student_tail_mass < 0.73).any()) and bool((out.student_tail_mass > 0.73).any())
    assert torch.autograd.gradcheck(lambda z: topk_kl(z, case.log_probs, ids, tail=True, **settings).loss, case.logits)


@pytest.mark.parametrize("k", [1, 2, 5, 30, 63, 64])
def test_between_zero_and_the_whole_kl_and_equal_to_it_with_every_id(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    log_q = torch.log_softmax(torch.randn(200, 64, generator=generator, dtype=torch.float64) * 3, -1)
    logits = 1.3 * log_q + torch.randn(200, 64, generator=generator, dtype=torch.float64)
    whole = (log_q.exp() * (log_q - torch.log_softmax(logits, -1))).sum(-1)
    top = log_q.topk(k)
    loss = topk_kl(logits, top.values, top.indices, tail=True, tail_mass_eps=1e-30).loss
    assert bool((loss >= 0).all())
    assert bool((loss <= whole + 1e-12).all())
    if k >= 63:  # with one id left, the tail is that id
        torch.testing.assert_close(loss, whole, rtol=0, atol=1e-12)
    if k == 5:
        assert bool((topk_kl(logits, top.values, top.indices).loss < 0).any()), "the truncated form is no such bound"


@pytest.mark.parametrize("k", [1, 8, 64])
def test_never_negative_in_fp32(k: int) -> None:
    case = topk_case(500, vocab=64, k=k, student_scale=4.0, likeness=1.0)
    near = case.logits.detach() + 1e-4 * torch.randn(500, 64)
    top = torch.log_softmax(near, -1).topk(k)
    assert bool((topk_kl(case.logits, top.values, top.indices, tail=True).loss >= 0).all())


@pytest.mark.parametrize("gap", [10.0, 18.0, 21.0, 30.0])
def test_case_13_1_a_tail_that_one_minus_the_head_would_lose(gap: float) -> None:
    logits = torch.zeros(1, 50)
    logits[:, :4] = gap
    case_ids = torch.arange(4)[None]
    # A teacher with a quarter of its mass elsewhere, whose pull on the tail is what the gradient is about.
    log_probs = torch.full((1, 4), 0.1875).log()
    logits.requires_grad_()
    out = topk_kl(logits, log_probs, case_ids, tail=True, tail_mass_eps=1e-20)
    out.loss.sum().backward()
    tail_mass = 46 / (46 + 4 * math.exp(gap))
    if gap > 20:
        assert 1.0 - torch.softmax(logits.detach(), -1)[0, :4].sum().item() == pytest.approx(0.0, abs=6e-8)
    assert out.student_tail_mass.item() == pytest.approx(tail_mass, rel=1e-6)
    truth_logits = logits.detach().double().requires_grad_()
    truth = reference.topk_kl(truth_logits, log_probs.double(), case_ids, tail=True, tail_mass_eps=1e-20)
    truth["loss"].sum().backward()
    assert out.loss.item() == pytest.approx(truth["loss"].item(), rel=1e-6)
    torch.testing.assert_close(logits.grad.double(), truth_logits.grad, rtol=1e-5, atol=1e-7)


def test_the_tail_pulls_every_id_that_is_not_listed() -> None:
    case = topk_case(5, vocab=30, k=3)
    out = topk_kl(*case, tail=True)
    out.loss.sum().backward()
    p = torch.softmax(case.logits.detach(), -1)
    student, teacher = out.student_mass, out.teacher_mass
    expected = p * ((teacher - student) / (1 - student))[:, None]
    outside = torch.ones_like(p, dtype=torch.bool).scatter(1, case.ids, False)
    torch.testing.assert_close(case.logits.grad[outside], expected[outside], rtol=1e-4, atol=1e-7)
    listed = p.gather(1, case.ids) - case.log_probs.exp()
    torch.testing.assert_close(case.logits.grad.gather(1, case.ids), listed, rtol=1e-4, atol=1e-7)


def test_an_id_listed_twice_is_one_category_and_an_entry_of_no_mass_is_none() -> None:
    generator = torch.Generator().manual_seed(0)
    log_q = torch.log_softmax(torch.randn(50, 9, generator=generator, dtype=torch.float64), -1)
    logits = torch.randn(50, 9, generator=generator, dtype=torch.float64)
    whole = (log_q.exp() * (log_q - torch.log_softmax(logits, -1))).sum(-1)
    top = log_q.topk(3)
    # The second id once more, filled up with entries that the teacher did not give: of a listed id, of another.
    missing = torch.full((50, 1), -torch.inf, dtype=torch.float64)
    ids = torch.cat([top.indices[:, :1], top.indices, top.indices[:, 1:2], log_q.argmin(-1, keepdim=True)], dim=1)
    log_probs = torch.cat([missing, top.values, top.values[:, 1:2], missing], dim=1)
    once, again = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected, found = topk_kl(once, *top, tail=True), topk_kl(again, log_probs, ids, tail=True)
    assert bool((found.loss <= whole + 1e-12).all())
    for name in ("loss", "head_loss", "tail_loss", "student_mass", "teacher_mass", "student_tail_mass"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-13, msg=name)
    expected.loss.sum().backward()
    found.loss.sum().backward()
    torch.testing.assert_close(again.grad, once.grad, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(
        found.loss, reference.topk_kl(logits, log_probs, ids, tail=True)["loss"], rtol=1e-12, atol=1e-13
    )


def test_ids_that_are_all_the_same() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    log_q = torch.log_softmax(torch.randn(3, 7, generator=torch.Generator().manual_seed(1)), -1)
    ids = torch.tensor([[0, 0], [1, 1], [2, 2]])
    found = topk_kl(logits, log_q.gather(1, ids), ids, tail=True)
    whole = (log_q.exp() * (log_q - torch.log_softmax(logits, -1))).sum(-1)
    assert bool((found.loss <= whole).all())
    assert bool((found.overlap_count <= 1).all())
    torch.testing.assert_close(found.teacher_mass + found.teacher_tail_mass, torch.ones(3))
    torch.testing.assert_close(found.student_mass + found.student_tail_mass, torch.ones(3))


@pytest.mark.parametrize("tail", [True, False])
def test_a_teacher_that_is_not_a_number_gives_no_number(tail: bool) -> None:
    case = topk_case(4, vocab=11, k=3)
    log_probs = case.log_probs.clone()
    log_probs[2, 1] = torch.nan
    out = topk_kl(case.logits, log_probs, case.ids, tail=tail)
    out.loss.sum().backward()
    assert out.loss.isnan().tolist() == case.logits.grad.isnan().any(1).tolist() == [False, False, True, False]
    assert bool(reference.topk_kl(case.logits, log_probs, case.ids, tail=tail)["loss"][2].isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_teacher_that_is_not_a_number_gives_no_gradient_under_a_clamp(dtype: torch.dtype) -> None:
    case = topk_case(4, vocab=11, k=3, dtype=dtype)
    log_probs = case.log_probs.clone()
    log_probs[2, 1] = torch.nan
    settings = {"log_prob_min_clamp": -0.1}  # every student's log-prob is below it
    out = topk_kl(case.logits, log_probs, case.ids, **settings)
    out.loss.sum().backward()
    logits = case.logits.detach().clone().requires_grad_()
    plain = reference.topk_kl(logits, log_probs, case.ids, **settings)
    plain["loss"].sum().backward()
    nowhere_else = [False, False, True, False]
    for loss, gradient in ((out.loss, case.logits.grad), (plain["loss"], logits.grad)):
        assert loss.isnan().tolist() == gradient.isnan().all(1).tolist() == gradient.isnan().any(1).tolist()
        assert loss.isnan().tolist() == nowhere_else
    for name in ("student_mass", "teacher_mass"):
        torch.testing.assert_close(getattr(out, name), plain[name], equal_nan=True)
    assert bool((out.student_mass == out.student_mass[0]).all()), "counted after the clamp, of the student's own too"
