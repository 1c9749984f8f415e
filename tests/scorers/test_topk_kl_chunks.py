"""Chunks change what is held at once, and not a bit of what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from compact_logits import linear_topk_kl, reference, topk_kl
from compact_logits.scorers.topk_stats import row_sums
from tests.support.topk_case import topk_case


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("vocab", [1, 4095, 4096, 40001])
def test_a_row_has_the_same_sum_in_any_company(vocab: int, count: int) -> None:
    values = torch.rand(5, vocab, generator=torch.Generator().manual_seed(0))
    with threads(count):
        together = row_sums(values)
        assert torch.equal(torch.cat([row_sums(row[None]) for row in values]), together)
    torch.testing.assert_close(together.double(), values.double().sum(1), rtol=3e-7, atol=0)


def test_what_a_row_sum_has_to_stand_up_to() -> None:
    values = torch.rand(5, 40001, generator=torch.Generator().manual_seed(0))
    with threads(2):
        alone = torch.cat([row[None].sum(1) for row in values])
        assert not torch.equal(alone, values.sum(1)), "torch splits one long row among threads, several it does not"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab", "k"), [(192, 2048, 32), (11, 40000, 16)])
@pytest.mark.parametrize("settings", [{}, {"log_prob_min_clamp": -10.0}, {"tail": True}], ids=str)
def test_chunked_is_bit_for_bit_the_whole(
    dtype: torch.dtype, rows: int, vocab: int, k: int, settings: dict[str, float]
) -> None:
    case = topk_case(rows, vocab=vocab, k=k, dtype=dtype)

    def run(chunk_bytes: int | None) -> list[Tensor]:
        case.logits.grad = None
        out = topk_kl(*case, chunk_bytes=chunk_bytes, **settings)
        (out.loss * torch.linspace(0.5, 2.0, rows)).sum().backward()
        return [*[value.detach() for value in out if value is not None], case.logits.grad]

    with threads(2):
        whole = run(2**40)
        for chunk_bytes in (1, 7 * vocab * 4 * 16, 64 * vocab * 4 * 16, None):
            assert all(torch.equal(a, b) for a, b in zip(run(chunk_bytes), whole, strict=True))


def test_four_steps_of_an_optimiser_stay_with_the_dense_formula() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(24, 16, generator=generator)
    start = torch.randn(300, 16, generator=generator) * 0.3
    top = torch.log_softmax(torch.randn(24, 300, generator=generator), -1).topk(12)

    def train(tail: bool, dense: bool) -> tuple[list[float], Tensor]:
        weight = start.clone().requires_grad_()
        optimizer = torch.optim.AdamW([weight], lr=1e-2)
        losses = []
        for _ in range(4):
            if dense:
                loss = reference.topk_kl(hidden @ weight.t(), top.values, top.indices, tail=tail)["loss"].mean()
            else:
                loss = linear_topk_kl(
                    hidden, weight, top.values, top.indices, tail=tail, chunk_bytes=20_000
                ).loss.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, weight.detach()

    for tail in (False, True):
        ours, plain = train(tail, dense=False), train(tail, dense=True)
        assert ours[0] == pytest.approx(plain[0], rel=1e-5)
        assert ours[0][-1] < ours[0][0] - 0.01
        torch.testing.assert_close(ours[1], plain[1], rtol=0, atol=2e-5)
