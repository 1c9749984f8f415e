"""The passes over a block: as exact as torch's own, and at the edges too."""

from __future__ import annotations

import pytest
import torch

from compact_logits.scorers.passes import affine_, exponentials


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_exponentials(dtype: torch.dtype, in_place: bool) -> None:
    z = torch.linspace(-30, 0, 50_001, dtype=dtype).view(1, -1)
    out = z.clone() if in_place else torch.empty_like(z)
    assert exponentials(out if in_place else z, out=out) is out
    truth = z.double().exp()
    relative = ((out.double() - truth).abs() / truth).squeeze(0)
    step = torch.finfo(dtype).eps
    assert relative.max() <= 25 * step
    # Where p is not small, a step or two.
    assert relative[z.squeeze(0) > -2].max() <= 2 * step
    assert in_place or torch.equal(z, torch.linspace(-30, 0, 50_001, dtype=dtype).view(1, -1))


def test_exponentials_at_the_edges() -> None:
    z = torch.tensor([[0.0, -1e3, -torch.inf, torch.nan]])
    assert exponentials(z, out=torch.empty_like(z)).tolist()[0][:3] == [1.0, 0.0, 0.0]
    assert exponentials(z, out=z)[0, 3].isnan()


def test_affine() -> None:
    z, factor, constant = torch.randn(3, 7), torch.randn(3), torch.randn(3)
    expected = z * factor[:, None] + constant[:, None]
    affine_(z, factor, constant)
    torch.testing.assert_close(z, expected)
