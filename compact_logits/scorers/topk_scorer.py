"""The scorer of the top-k KL: the teacher's k ids a row, and in the tail-aware form everything else as one category."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from compact_logits.engine.kernels import combine_stats, new_stats, row_stats_, write_at_
from compact_logits.engine.scorer import SoftmaxGrad, read_at_
from compact_logits.engine.vocab_shard import VocabShard, gather_stats
from compact_logits.scorers.topk_stats import add_top_, chosen_of_all, first_of_each_id, place_in, summed_by_id

__all__ = ["TopKScorer"]


@dataclass(frozen=True, eq=False)
class TopKScorer:
    """`sum_k q_k (log q_k - log p_k)` over the teacher's ids, `q` the teacher and `p` the student over the vocabulary.

    Gradient: `d / dz_j = Q p_j - sum_{k: id_k = j} q_k`, with `Q` the sum of `q_k`; where a student log-prob is below
    the clamp, its `q_k` is missing from both, unless that is NaN. Tail-aware, with `q_0 = 1 - sum_k q_k` and `p_0` the
    sum of `p_j` over the ids not listed: plus `q_0 (log q_0 - log max(p_0, eps))`, and where `p_0 > eps` the gradient
    gains `q_0 p_j`, less `q_0 p_j / p_0` at the ids not listed. That needs `p_0` itself: the listed logits are set to
    -inf before the others are summed, since one minus the listed ones is zero in fp32 from 6e-8 down. A category is
    there once: of several entries with one id the first counts, and one of `log q_k = -inf` lists nothing, as the
    teacher did not give it.

    Outputs: loss, student mass, teacher mass, overlap count, overlap-token advantage; tail-aware also the head's and
    the tail's part of the loss, the student's and the teacher's tail mass. The loss alone is differentiable.

    Collectives of `merge`: two all-gathers where the vocabulary is sharded, of `k + 2` (tail-aware `k + 3`) and of 6
    numbers a row, since only the rank that has an id knows its log-prob.
    """

    teacher_log_probs: Tensor  # (rows, k), fp32 or wider, clamped
    teacher_ids: Tensor  # (rows, k) int64, global
    shard: VocabShard
    inverse_temperature: Tensor  # (rows,) fp32, fp64 for fp64 logits
    log_prob_min_clamp: float | None
    tail_mass_eps: float | None  # None for the truncated form

    @property
    def writes_logits(self) -> bool:
        return self.tail_mass_eps is not None

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return (True, *[False] * (8 if self.tail_mass_eps is not None else 4))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.teacher_log_probs, self.teacher_ids, self.inverse_temperature)

    @cached_property
    def _listed(self) -> Tensor:  # (rows, k) bool
        """The entries that count, which in the truncated form are all."""
        if self.tail_mass_eps is None:
            return torch.ones_like(self.teacher_ids, dtype=torch.bool)
        given = self.teacher_log_probs != -torch.inf
        return first_of_each_id(torch.where(given, self.teacher_ids, -1)) & given

    @cached_property
    def _listed_ids(self) -> Tensor:  # (rows, k) int64, -1 where the entry lists nothing
        return torch.where(self._listed, self.teacher_ids, -1)

    def of_rows(self, rows: slice | Tensor) -> TopKScorer:
        return replace(
            self,
            teacher_log_probs=self.teacher_log_probs[rows],
            teacher_ids=self.teacher_ids[rows],
            inverse_temperature=self.inverse_temperature[rows],
        )

    def new_stats(self) -> tuple[Tensor, ...]:
        """Row statistics (tail-aware: of the ids not listed), the logits at the teacher's ids, NaN where they are not
        here, the student's top k logits and their ids."""
        logits = self.inverse_temperature.new_empty(self.teacher_ids.shape)
        at_ids, top = torch.full_like(logits, torch.nan), torch.full_like(logits, -torch.inf)
        return new_stats(logits), at_ids, top, torch.full_like(self.teacher_ids, -1)

    def add_slice_(self, stats: tuple[Tensor, ...], logits: Tensor, first: int) -> None:
        rows, at_ids, top, top_ids = stats
        read_at_(at_ids, logits, self.teacher_ids, first)
        add_top_(top, top_ids, logits, first)
        if self.writes_logits:
            write_at_(logits, self._listed_ids, torch.full_like(at_ids, -torch.inf), first)
        row_stats_(rows, logits, self.inverse_temperature, False, False)

    def merge(self, stats: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        rows, at_ids, top, top_ids = stats
        dtype, k = self.inverse_temperature.dtype, self.teacher_ids.shape[1]
        z = (at_ids * self.inverse_temperature[:, None]).double()
        owned = (self.teacher_ids >= self.shard.start) & (self.teacher_ids < self.shard.stop)
        listed = owned & self._listed
        if self.writes_logits:
            rows = _with_listed(rows, z.masked_fill(~listed, -torch.inf))
        sums = rows.shape[1]
        ranks = gather_stats(torch.cat([rows.to(dtype), top], dim=1), self.shard)
        maximum, total, *others = _combined(ranks[:, :, :sums].double())
        rank = self.shard.group.rank() if self.shard.group is not None and self.shard.sharded else 0
        in_top = chosen_of_all(ranks[:, :, sums:], rank, place_in(top_ids, self.teacher_ids))

        q, log_q = self._teacher()
        log_p, active = self._clamped(z - maximum[:, None] - total.log()[:, None], log_q)
        # A teacher's log-prob of -inf is an entry that it did not give: q log q is 0 there, not NaN. One that is NaN
        # itself stays so.
        terms = torch.where((q != 0) & owned, q * (log_q - log_p), 0.0)
        of_this_rank = [
            terms.sum(dim=1),
            log_p.exp().masked_fill(~listed, 0.0).sum(dim=1),
            q.masked_fill(~(owned & active), 0.0).sum(dim=1),
            (in_top & listed).sum(dim=1),
            -terms.masked_fill(~in_top, 0.0).sum(dim=1),
            owned.sum(dim=1),
        ]
        summed = gather_stats(torch.stack([part.double() for part in of_this_rank], dim=1), self.shard).sum(dim=0)
        head, student_mass, active_mass, overlap, advantage, found = summed.unbind(dim=1)
        # An id that no rank has gives no number that could be mistaken for one, and no such gradient.
        head, active_mass = (part.masked_fill(found != k, torch.nan) for part in (head, active_mass))
        advantage = torch.where(overlap > 0, advantage / overlap.clamp(min=1), 0.0)
        metrics = (student_mass, q.sum(dim=1), overlap, advantage)
        if self.tail_mass_eps is None:
            return _outputs(dtype, head, *metrics), (maximum, total, active_mass, active_mass, z)
        student_tail = others[0] / total
        # The teacher gives log-probs of its own ids only, so that its tail is what they leave.
        teacher_tail = (1.0 - q.sum(dim=1)).clamp(0.0, 1.0)
        tail, *factors = _tail(teacher_tail, student_tail, active_mass, self.tail_mass_eps)
        # Never negative but for rounding and for the guard, and neither is information.
        loss = (head + tail).clamp(min=0.0)
        outputs = _outputs(dtype, loss, *metrics, head, tail, student_tail, teacher_tail)
        return outputs, (maximum, total, *factors, z)

    def logits_grad(self, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> SoftmaxGrad:
        maximum, total, of_others, of_listed, z = saved
        d_row = torch.zeros_like(total) if grads[0] is None else grads[0].double() * self.inverse_temperature
        unread = d_row == 0  # an id that no rank has must not make NaN of a gradient that is zero
        q, log_q = self._teacher()
        log_p = z - maximum[:, None] - total.log()[:, None]
        q = q.masked_fill(~self._clamped(log_p, log_q)[1], 0.0)
        if self.tail_mass_eps is None:
            q = summed_by_id(self.teacher_ids, q)
        at_ids = ((log_p.exp() * of_listed[:, None] - q) * d_row[:, None]).masked_fill(unread[:, None], 0.0)
        dtype = self.inverse_temperature.dtype
        return SoftmaxGrad(
            inverse_temperature=self.inverse_temperature,
            shift=maximum.to(dtype),
            scale=(d_row * of_others / total).masked_fill(unread, 0.0).to(dtype),
            slope=None,
            ids=self._listed_ids,
            values=at_ids.to(dtype),
        )

    def _teacher(self) -> tuple[Tensor, Tensor]:  # probs, log-probs, (rows, k) fp64 both
        log_q = self.teacher_log_probs.double()
        return log_q.exp().masked_fill(~self._listed, 0.0), log_q

    def _clamped(
        self,
        log_p: Tensor,  # (rows, k)
        log_q: Tensor,  # (rows, k), the teacher's
    ) -> tuple[Tensor, Tensor]:  # clamped (rows, k); where the gradient passes (rows, k) bool
        if self.log_prob_min_clamp is None:
            return log_p, torch.ones_like(log_p, dtype=torch.bool)
        passes = (log_p > self.log_prob_min_clamp) | log_q.isnan()
        return log_p.clamp(min=self.log_prob_min_clamp), passes


def _with_listed(
    rest: Tensor,  # (rows, 2) fp64, the statistics of the ids not listed
    listed: Tensor,  # (rows, k) fp64, tempered logits, -inf where they are not here
) -> Tensor:  # (rows, 3) fp64, the statistics of all, and the rest's sum shifted alike
    maximum = torch.maximum(rest[:, 0], listed.amax(dim=1))
    finite = maximum.masked_fill(maximum == -torch.inf, 0.0)
    of_rest = (rest[:, 0] - finite).exp() * rest[:, 1]
    return torch.stack([maximum, of_rest + (listed - finite[:, None]).exp().sum(dim=1), of_rest], dim=1)


def _combined(
    ranks: Tensor,  # (ranks, rows, 2 or 3) fp64
) -> tuple[Tensor, ...]:  # maximum, sum, the rest's sum; (rows,) each
    sums = [combine_stats(torch.stack([ranks[:, :, 0], each], dim=2)) for each in ranks[:, :, 1:].unbind(dim=2)]
    return (sums[0][:, 0], *[each[:, 1] for each in sums])


def _outputs(dtype: torch.dtype, *values: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.to(torch.int64 if place == 3 else dtype) for place, each in enumerate(values))


def _tail(
    teacher_tail: Tensor,  # (rows,)
    student_tail: Tensor,  # (rows,)
    teacher_mass: Tensor,  # (rows,)
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # the tail's part of the loss, of_others, of_listed; (rows,) each
    """The KL of the one category, and by what the gradient multiplies `p_j` of an id not listed, of a listed one."""
    log_ratio = teacher_tail.log() - student_tail.clamp(min=eps).log()
    guarded = student_tail <= eps
    of_listed = torch.where(guarded, teacher_mass, teacher_mass + teacher_tail)
    of_others = torch.where(guarded, teacher_mass, of_listed - teacher_tail / student_tail)
    return torch.where(teacher_tail == 0, 0.0, teacher_tail * log_ratio), of_others, of_listed
