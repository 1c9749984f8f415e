"""One linear head with its rows, run three ways: fp64 truth, plain torch of the same dtype, and the compact path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compact_logits import linear_log_probs, log_probs, reference
from tests.support.parity import assert_close_to_truth, assert_gradient_close_to_truth

__all__ = ["Head", "assert_as_good_as_plain"]

# "log_probs", "entropy" where there is one, and "d_<input>".
Results = dict[str, Tensor | None]


@dataclass(frozen=True)
class Head:
    """Inputs of a head, and the gradients that come back for its outputs."""

    hidden: Tensor  # (rows, hidden)
    weight: Tensor  # (vocab, hidden)
    targets: Tensor  # (rows,) int64
    d_log_probs: Tensor  # (rows,)
    d_entropy: Tensor  # (rows,)
    bias: Tensor | None = None  # (vocab,)
    temperature: float | Tensor = 1.0

    @classmethod
    def random(
        cls,
        rows: int,
        hidden: int,
        vocab: int,
        dtype: torch.dtype = torch.float32,
        *,
        bias: bool = False,
        temperature: float | str = 1.0,
        seed: int = 0,
    ) -> Head:
        """Logits a few units wide, gradients of both signs. `temperature="rows"` draws one a row, from 0.5 to 1.5."""
        source = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source, dtype=torch.float64)

        return cls(
            hidden=normal(rows, hidden).to(dtype),
            weight=(normal(vocab, hidden) * 2 / hidden**0.5).to(dtype),
            targets=torch.randint(0, vocab, (rows,), generator=source),
            d_log_probs=normal(rows).to(torch.promote_types(dtype, torch.float32)),
            d_entropy=normal(rows).to(torch.promote_types(dtype, torch.float32)),
            bias=normal(vocab).to(dtype) if bias else None,
            temperature=0.5 + torch.rand(rows, generator=source) if temperature == "rows" else temperature,
        )

    def plain(self, entropy: str = "loss") -> Results:
        """Dense logits through `reference.log_probs` and ordinary autograd."""

        def score(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
            logits = torch.nn.functional.linear(hidden, weight, bias)
            log_prob, of_row = reference.log_probs(logits, self.targets, temperature=self.temperature)
            return log_prob, {"none": None, "metric": of_row.detach(), "loss": of_row}[entropy]

        return self._run(score)

    def truth(self, entropy: str = "loss") -> Results:
        """The plain path in fp64, on the very numbers that the narrower inputs hold."""
        wide = {name: getattr(self, name).double() for name in ("hidden", "weight", "d_log_probs", "d_entropy")}
        bias = None if self.bias is None else self.bias.double()
        temperature = self.temperature.double() if isinstance(self.temperature, Tensor) else self.temperature
        return replace(self, **wide, bias=bias, temperature=temperature).plain(entropy)

    def compact(self, entropy: str = "loss", **options: Any) -> Results:
        """Through `linear_log_probs`, with its options."""

        def score(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
            fixed: Any = {"bias": bias, "temperature": self.temperature, "entropy": entropy}
            return linear_log_probs(hidden, weight, self.targets, **fixed, **options)

        return self._run(score)

    def with_logits(self, entropy: str = "loss", **options: Any) -> Results:
        """Through a plain product and `log_probs`, with its options."""

        def score(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
            logits = torch.nn.functional.linear(hidden, weight, bias)
            fixed: Any = {"temperature": self.temperature, "entropy": entropy}
            return log_probs(logits, self.targets, **fixed, **options)

        return self._run(score)

    def _run(self, score: Callable[..., tuple[Tensor, Tensor | None]]) -> Results:
        inputs = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        leaves = {n: None if t is None else t.detach().clone().requires_grad_() for n, t in inputs.items()}
        log_prob, entropy = score(*leaves.values())
        outputs = {"log_probs": log_prob} if entropy is None else {"log_probs": log_prob, "entropy": entropy}
        incoming = {"log_probs": self.d_log_probs, "entropy": self.d_entropy}
        roots = [name for name, output in outputs.items() if output.requires_grad]
        torch.autograd.backward([outputs[name] for name in roots], [incoming[name] for name in roots])
        gradients = {f"d_{name}": leaf.grad for name, leaf in leaves.items() if leaf is not None}
        return {name: output.detach() for name, output in outputs.items()} | gradients


def assert_as_good_as_plain(
    ours: Results,
    plain: Results,
    truth: Results,
    *,
    factor: float = 1.1,
    floor: float = 1e-6,
    where: str = "",
) -> None:
    """Every result in `truth`, outputs by their largest error and gradients by their L2 error; no more and no less."""
    assert ours.keys() == plain.keys() == truth.keys(), f"{where}results differ: {list(ours)}, {list(plain)}"
    for name, of_truth in truth.items():
        check = assert_gradient_close_to_truth if name.startswith("d_") else assert_close_to_truth
        check(ours[name], plain[name], of_truth, factor=factor, floor=floor, name=f"{where}{name}")  # type: ignore[arg-type]
