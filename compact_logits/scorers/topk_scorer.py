"""The scorer of the top-k KL: the teacher's k ids a row, and in the tail-aware form everything else as one category."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from compact_logits.chunks import Block
from compact_logits.scorers.temperature import inverse_temperature, tempered
from compact_logits.scorers.topk_stats import (
    add_at_,
    chosen_of_all,
    clear_at_,
    first_of_each_id,
    joined_tops,
    row_sums,
    student_top,
)
from compact_logits.vocab_parallel import VocabShard, gather_stats, merge_softmax

__all__ = ["TopKScorer"]


@dataclass(frozen=True, eq=False)
class TopKScorer:
    """`sum_k q_k (log q_k - log p_k)` over the teacher's ids, `q` the teacher and `p` the student over the vocabulary.

    Gradient: `d / dz_j = Q p_j - sum_{k: id_k = j} q_k`, with `Q` the sum of `q_k`; where a student log-prob is below
    the clamp, its `q_k` is missing from both, unless that is NaN. Tail-aware, with `q_0 = 1 - sum_k q_k` and `p_0` the
    sum of `p_j` over the ids not listed: plus `q_0 (log q_0 - log max(p_0, eps))`, and where `p_0 > eps` the gradient
    gains `q_0 p_j`, less `q_0 p_j / p_0` at the ids not listed. That needs `p_0` itself, whose sum therefore leaves the
    listed ids out: one minus the listed ones is zero in fp32 from 6e-8 down. A category is there once: of several
    entries with one id the first counts, and one of `log q_k = -inf` lists nothing, as the teacher did not give it.

    Outputs: loss, student mass, teacher mass, overlap count, overlap-token advantage; tail-aware also the head's and
    the tail's part of the loss, the student's and the teacher's tail mass. The loss alone is differentiable.

    Collectives of `merge`: two all-gathers where the vocabulary is sharded, of `k + 2` (tail-aware `k + 3`) and of 6
    numbers a row, since only the rank that has an id knows its log-prob.
    """

    teacher_log_probs: Tensor  # (rows, k), in the working dtype, clamped
    teacher_ids: Tensor  # (rows, k) int64, global
    shard: VocabShard
    temperature: float | Tensor  # scalar or (rows,)
    log_prob_min_clamp: float | None
    tail_mass_eps: float | None  # None for the truncated form

    @property
    def tail(self) -> bool:
        return self.tail_mass_eps is not None

    @property
    def stats_width(self) -> int:
        return self._sums + 3 * self._k

    @property
    def needs_spare(self) -> bool:
        return False

    @property
    def turn_shares_(self) -> None:
        return None

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return (True, *[False] * (8 if self.tail else 4))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        per_row = (self.temperature,) if isinstance(self.temperature, Tensor) else ()
        return (self.teacher_log_probs, self.teacher_ids, *per_row)

    @property
    def _k(self) -> int:
        return self.teacher_ids.shape[1]

    @cached_property
    def _listed(self) -> Tensor:  # (rows, k) bool
        """The entries that count, which in the truncated form are all."""
        if not self.tail:
            return torch.ones_like(self.teacher_ids, dtype=torch.bool)
        given = self.teacher_log_probs != -torch.inf
        return first_of_each_id(torch.where(given, self.teacher_ids, -1)) & given

    @property
    def _sums(self) -> int:
        """Columns of the statistics before the student's top: maximum, sum of exponentials, that of the tail."""
        return 3 if self.tail else 2

    def of(
        self,
        rows: Tensor,  # (kept,) int64
    ) -> TopKScorer:
        """The scorer of some of the rows alone."""
        return replace(
            self,
            teacher_log_probs=self.teacher_log_probs.index_select(0, rows),
            teacher_ids=self.teacher_ids.index_select(0, rows),
            temperature=self.temperature.index_select(0, rows)
            if isinstance(self.temperature, Tensor)
            else self.temperature,
        )

    def part(self, columns: slice) -> TopKScorer:
        part = replace(self, shard=self.shard.columns(columns))
        part.__dict__["_listed"] = self._listed  # found once for all parts
        return part

    def local_stats(self, block: Block) -> Tensor:
        logits, z, _, rows = block
        # Columns: what `_sums` says, the slice's top k logits, the logits at the teacher's ids, their places in it.
        stats = z.new_zeros(z.shape[0], self.stats_width)
        top, at_ids, places = stats[:, self._sums :].split(self._k, dim=1)
        ids, owned = self.shard.local_ids(self.teacher_ids[rows])
        if self.shard.size == 0:
            top.fill_(-torch.inf)
            at_ids.fill_(torch.nan)
            places.fill_(self._k)
            stats[:, 0] = -torch.inf
            return stats
        logits = tempered(logits, z, self.temperature, rows)
        at_ids.copy_(logits.gather(1, ids).masked_fill_(~owned, torch.nan))
        values, place = student_top(logits, ids)
        top.copy_(values)
        places.copy_(place.masked_fill_(~owned, self._k))
        maximum = top[:, 0]
        stats[:, 0] = maximum
        torch.sub(logits, maximum.masked_fill(maximum == -torch.inf, 0.0)[:, None], out=z).exp_()
        stats[:, 1] = row_sums(z)
        if self.tail:
            clear_at_(z, ids, owned & self._listed[rows])
            stats[:, 2] = row_sums(z)
        return stats

    def combine(self, parts: Tensor) -> Tensor:
        tops, at_ids, places = parts[:, :, self._sums :].split(self._k, dim=2)
        sums = [merge_softmax(parts[:, :, 0].double(), part.double()) for part in parts[:, :, 1 : self._sums].unbind(2)]
        values, place = joined_tops(tops, places.to(torch.int64))
        selected = at_ids[0]
        for of_part in at_ids[1:]:
            selected = torch.where(selected.isnan(), of_part, selected)
        columns = torch.stack([sums[0][0], *[total for _, total, _ in sums]], dim=1)
        return torch.cat([columns.to(parts.dtype), values, selected, place.to(parts.dtype)], dim=1)

    def merge(self, stats: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        k = self._k
        _, at_ids, places = stats[:, self._sums :].split(k, dim=1)
        ranks = gather_stats(stats[:, : self._sums + k], self.shard)
        maximum, total, _ = merge_softmax(ranks[:, :, 0], ranks[:, :, 1])
        rank = self.shard.group.rank() if self.shard.group is not None and self.shard.sharded else 0
        among_top = chosen_of_all(ranks[:, :, self._sums :], rank, places.to(torch.int64))

        owned = self.shard.local_ids(self.teacher_ids)[1]
        counted = owned & self._listed
        q, log_q = self._teacher(slice(None))
        log_p, active = self._clamped(_log_probs(at_ids, maximum, total), log_q)
        # A teacher's log-prob of -inf is an entry that it did not give: q log q is 0 there, not NaN. One that is NaN
        # itself stays so.
        terms = torch.where((q != 0) & owned, q * (log_q - log_p), 0.0)
        of_this_rank = [
            terms.sum(dim=1),
            log_p.exp().masked_fill_(~counted, 0.0).sum(dim=1),
            q.masked_fill(~(owned & active), 0.0).sum(dim=1),
            (among_top & counted).sum(dim=1),
            -terms.masked_fill(~among_top, 0.0).sum(dim=1),
            owned.sum(dim=1),
        ]
        summed = gather_stats(torch.stack([part.to(stats.dtype) for part in of_this_rank], dim=1), self.shard).sum(
            dim=0
        )
        head, student_mass, active_mass, overlap, advantage, found = summed.unbind(dim=1)
        # An id that no slice has gives no number that could be mistaken for one, and no such gradient.
        head, active_mass = (part.masked_fill(found != k, torch.nan) for part in (head, active_mass))
        advantage = torch.where(overlap > 0, advantage / overlap.clamp(min=1), 0.0)
        metrics = (student_mass, q.sum(dim=1).to(stats.dtype), overlap.to(torch.int64), advantage)
        if self.tail_mass_eps is None:
            return (head, *metrics), (maximum, total, active_mass)
        student_tail = merge_softmax(ranks[:, :, 0], ranks[:, :, 2])[1] / total
        # The teacher gives log-probs of its own ids only, so that its tail is what they leave.
        teacher_tail = (1.0 - q.sum(dim=1)).clamp_(0.0, 1.0).to(stats.dtype)
        tail, *factors = _tail(teacher_tail, student_tail, active_mass, self.tail_mass_eps)
        # Never negative but for rounding and for the guard, and neither is information.
        loss = (head + tail).clamp(min=0.0)
        return (loss, *metrics, head, tail, student_tail, teacher_tail), (maximum, total, *factors)

    def d_logits_(self, block: Block, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> None:
        logits, z, _, rows = block
        d_loss = grads[0]
        if self.shard.size == 0:
            return
        if d_loss is None:
            z.zero_()
            return
        maximum, total, of_others, of_listed = saved if self.tail else (*saved, saved[2])
        logits = tempered(logits, z, self.temperature, rows)
        teacher_ids = self.teacher_ids[rows]
        ids, owned = self.shard.local_ids(teacher_ids)
        log_p = _log_probs(logits.gather(1, ids), maximum, total)
        q, log_q = self._teacher(rows)
        _, active = self._clamped(log_p, log_q)
        d_row = d_loss * inverse_temperature(self.temperature, rows, d_loss)
        torch.sub(logits, maximum[:, None], out=z).exp_()
        # The listed ids apart from the others: their two terms nearly cancel, or are nothing beside the others' factor.
        once = self._listed[rows] if self.tail else first_of_each_id(teacher_ids)
        clear_at_(z, ids, owned & self._listed[rows])
        at_ids = (log_p.exp() * of_listed[:, None]).masked_fill_(~once, 0.0)
        at_ids -= q.masked_fill_(~active, 0.0)
        z.mul_((d_row * of_others / total)[:, None])
        add_at_(z, ids, owned, (at_ids * d_row[:, None]).to(z.dtype))

    def _teacher(self, rows: slice) -> tuple[Tensor, Tensor]:  # probs, log-probs, (rows, k) fp64 both
        log_q = self.teacher_log_probs[rows].double()
        return log_q.exp().masked_fill_(~self._listed[rows], 0.0), log_q

    def _clamped(
        self,
        log_p: Tensor,  # (rows, k)
        log_q: Tensor,  # (rows, k), the teacher's
    ) -> tuple[Tensor, Tensor]:  # clamped (rows, k); where the gradient passes (rows, k) bool
        if self.log_prob_min_clamp is None:
            return log_p, torch.ones_like(log_p, dtype=torch.bool)
        passes = (log_p > self.log_prob_min_clamp) | log_q.isnan()
        return log_p.clamp(min=self.log_prob_min_clamp), passes


def _log_probs(
    at_ids: Tensor,  # (rows, k), logits
    maximum: Tensor,  # (rows,)
    total: Tensor,  # (rows,), sum of exp(z_j - maximum)
) -> Tensor:  # (rows, k) fp64
    """In fp64, as all that is k wide: it costs nothing beside a row of logits, and its differences are what counts."""
    return at_ids.double() - maximum.double()[:, None] - total.double().log()[:, None]


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
