"""A few GRPO iterations by Megatron-RL's own functions, over whichever path is installed."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits.cli.cpu_model import sum_gradients

__all__ = ["Trained", "trained"]

SEQUENCE = 32


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    ratios: Tensor  # (updates * counted positions,): current over old policy, before each update
    uncounted: Tensor  # (updates * other positions,): current log-probs that the loss does not count
    parameters: Tensor  # all of this rank's, one after another


def trained(
    rl_utils: ModuleType, model: Any, *, vocab: int, iterations: int, updates: int = 2, packed: bool, rate: float = 1e-3
) -> Trained:
    """`iterations` times: new rollouts, their old and reference log-probs, `updates` Adam steps on the real GRPO loss.

    Each data-parallel rank has rollouts of its own; packed ones are spread over the ranks as Megatron-RL spreads them.
    """
    from megatron.core import parallel_state

    data_ranks = parallel_state.get_data_parallel_group(with_context_parallel=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    reference = {name: value.clone() for name, value in model.state_dict().items() if value is not None}
    losses: list[float] = []
    ratios, uncounted = [torch.empty(0)], [torch.empty(0)]
    for iteration in range(iterations):
        random = torch.Generator().manual_seed(100 * iteration + (0 if packed else data_ranks.rank()))
        batch = _Batch(rl_utils, vocab, random, packed)
        old = batch.log_probs(model)
        current_state = {name: value.clone() for name, value in model.state_dict().items() if value is not None}
        model.load_state_dict(reference, strict=False)
        reference_log_probs = batch.log_probs(model)
        model.load_state_dict(current_state, strict=False)
        for _ in range(updates):
            current = rl_utils.get_logprobs(model, *batch.arguments(), **batch.packing())
            terms = rl_utils.calculate_grpo_loss(
                current_logprobs=current,
                old_logprobs=old,
                ref_logprobs=reference_log_probs,
                advantages=batch.advantages,
                clamp_eps_lower=0.2,
                clamp_eps_upper=0.2,
                kl_beta=0.05,
                entropy_weight=0.01,
                **batch.starts,
            )
            loss = (terms[0] * batch.loss_mask).sum() / max(float(batch.loss_mask.sum()), 1.0)
            loss.backward()
            sum_gradients(model)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=data_ranks)
                parameter.grad /= data_ranks.size()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            ratios.append(terms[2].detach()[batch.loss_mask != 0].float())
            uncounted.append(current.detach()[batch.loss_mask == 0].float())
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return Trained(losses, torch.cat(ratios), torch.cat(uncounted), parameters)


class _Batch:
    def __init__(self, rl_utils: ModuleType, vocab: int, random: torch.Generator, packed: bool) -> None:
        self._rl_utils = rl_utils
        rollouts = 3 if packed else 2
        tokens = torch.randint(1, vocab, (rollouts, SEQUENCE), generator=random)
        generated = torch.rand(rollouts, SEQUENCE, generator=random) < 0.4
        generated[:, :2] = False
        self.advantages = torch.randn(rollouts, generator=random)
        self.starts: dict[str, Any] = {}
        self._context: Any = None
        if packed:
            for row, length in enumerate((19, 9, 4)):
                tokens[row, length:], generated[row, length:] = 0, False
            world = torch.distributed.get_world_size()
            advantages = self.advantages.repeat(world)
            self._context = rl_utils.pack_all_trajectories(tokens, generated, None, advantages, SEQUENCE, 4, "fifo")
            loaded = rl_utils.load_packed_data_by_index(0, self._context, False)
            self.advantages, self.loss_mask = loaded[1], loaded[3]
            self.starts = {"seq_starts": loaded[7], "seq_lengths": loaded[8]}
            self._positions, self._params = loaded[4], loaded[10]
        else:
            self._tokens, self.loss_mask = tokens, generated[:, 1:].float()
            self._positions, self._params = torch.arange(SEQUENCE).expand(rollouts, -1), None

    def arguments(self) -> tuple[Tensor, Tensor]:
        """Tokens as the caller has them: of a bin, they are loaded anew each time."""
        if self._context is None:
            return self._tokens, self._positions
        return self._rl_utils.load_packed_data_by_index(0, self._context, False)[0], self._positions

    def packing(self) -> dict[str, Any]:
        return {"sequence_packing": self._context is not None, "packed_seq_params": self._params}

    def log_probs(self, model: Any) -> Tensor:
        return self._rl_utils.get_logprobs(model, *self.arguments(), no_grad=True, **self.packing())
