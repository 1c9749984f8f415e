"""The scorer of the top-k KL: the teacher's k ids a row, and in the tail-aware form everything else as one category."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from compact_logits.engine.kernels import combine_stats, new_stats, row_stats_, write_at_
from compact_logits.engine.scorer import SoftmaxGrad, read_at_
from compact_logits.engine.vocab_shard import VocabShard, gather_stats
from compact_logits.scorers.topk_stats import add_top_, in_top, repeats, summed_by_id

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

    Collectives of `merge`: two all-gathers where the vocabulary is sharded, of `k + 2` (tail-aware `k + 3`) and of 5
    fp64 a row (6 with a clamp), since only the rank that has an id knows its log-prob.
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
    def _unlisted(self) -> Tensor | None:  # (rows, k) bool
        """The entries that do not count; None in the truncated form, where all do."""
        if self.tail_mass_eps is None:
            return None
        missing = self.teacher_log_probs == -torch.inf
        return repeats(self.teacher_ids.masked_fill(missing, -1)) | missing

    @cached_property
    def _listed_ids(self) -> Tensor:  # (rows, k) int64, -1 where the entry lists nothing
        return self.teacher_ids if self._unlisted is None else self.teacher_ids.masked_fill(self._unlisted, -1)

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
        dtype, k, ids = self.inverse_temperature.dtype, self.teacher_ids.shape[1], self.teacher_ids
        tempered = at_ids * self.inverse_temperature[:, None]
        z = tempered.double()
        elsewhere = (ids < self.shard.start) | (ids >= self.shard.stop)
        uncounted = elsewhere if self._unlisted is None else elsewhere | self._unlisted
        if self.writes_logits:
            rows = _with_listed(rows, at_ids.masked_fill(uncounted, -torch.inf), self.inverse_temperature)
        sums = rows.shape[1]
        ranks = gather_stats(torch.cat([rows, top], dim=1), self.shard)
        maximum, total, *others = _combined(ranks[:, :, :sums])
        rank = self.shard.group.rank() if self.shard.group is not None and self.shard.sharded else 0
        overlaps = in_top(top_ids, ranks[:, :, sums:], rank, ids)
        if self._unlisted is not None:
            overlaps = overlaps.masked_fill(self._unlisted, False)

        q, log_q = self._teacher()
        log_p = z - maximum[:, None] - total.log()[:, None]
        active = self._active(q, log_p)
        if self.log_prob_min_clamp is not None:
            log_p = log_p.clamp(min=self.log_prob_min_clamp)
        # A teacher's log-prob of -inf is an entry that it did not give: q log q is 0 there, not NaN. One that is NaN
        # itself stays so.
        terms = (q * (log_q - log_p)).masked_fill((q == 0) | elsewhere, 0.0)
        of_this_rank = [
            terms.sum(dim=1),
            log_p.exp().masked_fill(uncounted, 0.0).sum(dim=1),
            overlaps.sum(dim=1, dtype=q.dtype),
            terms.masked_fill(~overlaps, 0.0).sum(dim=1),
            elsewhere.sum(dim=1, dtype=q.dtype),
        ]
        if active is not q:
            of_this_rank.append(active.masked_fill(elsewhere, 0.0).sum(dim=1))
        summed = gather_stats(torch.stack(of_this_rank, dim=1), self.shard).sum(dim=0)
        head, student_mass, overlap, of_overlap, not_here, *of_active = summed.unbind(dim=1)
        teacher_mass, advantage = q.sum(dim=1), 0.0 - of_overlap / overlap.clamp(min=1)
        active_mass = of_active[0] if of_active else teacher_mass
        # An id that no rank has gives no number that could be mistaken for one, and no such gradient.
        unknown = not_here != (ranks.shape[0] - 1) * k
        head, active_mass = (part.masked_fill(unknown, torch.nan) for part in (head, active_mass))
        metrics = [student_mass, teacher_mass, advantage]
        if self.tail_mass_eps is None:
            return _outputs(dtype, head, overlap, metrics), (maximum, total, active_mass, active_mass, tempered)
        student_tail = others[0] / total
        # The teacher gives log-probs of its own ids only, so that its tail is what they leave.
        teacher_tail = (1.0 - teacher_mass).clamp(0.0, 1.0)
        tail, *factors = _tail(teacher_tail, student_tail, active_mass, self.tail_mass_eps)
        # Never negative but for rounding and for the guard, and neither is information.
        loss = (head + tail).clamp(min=0.0)
        outputs = _outputs(dtype, loss, overlap, [*metrics, head, tail, student_tail, teacher_tail])
        return outputs, (maximum, total, *factors, tempered)

    def logits_grad(self, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> SoftmaxGrad:
        maximum, total, of_others, of_listed, z = saved
        d_row = torch.zeros_like(total) if grads[0] is None else grads[0].double() * self.inverse_temperature
        unread = d_row == 0  # an id that no rank has must not make NaN of a gradient that is zero
        q = self._teacher()[0]
        log_p = z.double() - maximum[:, None] - total.log()[:, None]
        q = self._active(q, log_p)
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
        q = log_q.exp()
        return (q if self._unlisted is None else q.masked_fill(self._unlisted, 0.0)), log_q

    def _active(
        self,
        q: Tensor,  # (rows, k), the teacher's probs
        log_p: Tensor,  # (rows, k), not clamped
    ) -> Tensor:  # (rows, k)
        """`q` where a gradient passes, else zero; NaN stays NaN."""
        return q if self.log_prob_min_clamp is None else q * (log_p > self.log_prob_min_clamp)


def _with_listed(
    rest: Tensor,  # (rows, 2) fp64, the statistics of the ids not listed
    listed: Tensor,  # (rows, k) logits, -inf where they are not here
    inverse_temperature: Tensor,  # (rows,)
) -> Tensor:  # (rows, 3) fp64, the statistics of all, and the rest's sum shifted alike
    every = rest.clone()
    row_stats_(every, listed, inverse_temperature, False, False)
    maximum = every[:, :1].masked_fill(every[:, :1] == -torch.inf, 0.0)
    return torch.cat([every, (rest[:, :1] - maximum).exp() * rest[:, 1:]], dim=1)


def _combined(
    ranks: Tensor,  # (ranks, rows, 2 or 3) fp64
) -> tuple[Tensor, ...]:  # maximum, sum, the rest's sum; (rows,) each
    if ranks.shape[0] == 1:
        return ranks[0].contiguous().unbind(dim=1)  # a copy, so that what is saved holds no logits
    sums = [combine_stats(torch.stack([ranks[:, :, 0], each], dim=2)) for each in ranks[:, :, 1:].unbind(dim=2)]
    return (sums[0][:, 0], *[each[:, 1] for each in sums])


def _outputs(
    dtype: torch.dtype,
    loss: Tensor,  # (rows,) fp64
    overlap: Tensor,  # (rows,) fp64
    metrics: list[Tensor],  # (rows,) fp64 each
) -> tuple[Tensor, ...]:
    student_mass, teacher_mass, *others = torch.stack(metrics).to(dtype).unbind()
    return loss.to(dtype), student_mass, teacher_mass, overlap.long(), *others


def _tail(
    teacher_tail: Tensor,  # (rows,)
    student_tail: Tensor,  # (rows,)
    teacher_mass: Tensor,  # (rows,)
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # the tail's part of the loss, of_others, of_listed; (rows,) each
    """The KL of the one category, and by what the gradient multiplies `p_j` of an id not listed, of a listed one."""
    guarded = student_tail.clamp(min=eps)
    tail = torch.xlogy(teacher_tail, teacher_tail / guarded)
    free = teacher_tail.masked_fill(student_tail <= eps, 0.0)
    of_listed = teacher_mass + free
    return tail, of_listed - free / guarded, of_listed
