"""Top-p replay: the log-prob normalised over the few ids that the sampler kept, entropy over the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from compact_logits.engine.kernels import LEAST_EXPONENT, combine_stats, new_stats
from compact_logits.engine.scorer import SoftmaxGrad
from compact_logits.engine.vocab_shard import VocabShard, gather_stats
from compact_logits.errors import InputError
from compact_logits.host_values import to_device
from compact_logits.scorers.log_prob_scorer import LogProbScorer

__all__ = ["TopPMask", "TopPScorer"]


@dataclass(frozen=True, eq=False)
class TopPMask:
    """A ragged set of vocabulary ids a row, on the CPU. A row that is not `recorded` is normalised over all ids.

    The row's target always belongs to its set, whether listed or not. Ids listed twice count once.
    """

    ids: Tensor  # (entries,) int64, global, distinct in a row
    row_of: Tensor  # (entries,) int64
    recorded: Tensor  # (rows,) bool

    @classmethod
    def build(
        cls,
        ids: Tensor,  # (listed,) integers, all recorded ids
        starts: Tensor,  # (rows,) int64, where in `ids` the row's set begins
        stops: Tensor,  # (rows,) int64, where it ends
        recorded: Tensor,  # (rows,) bool
    ) -> TopPMask:
        """Cut the rows' sets out of one flat list, without a loop over rows. No collective, no device work.

        Raises `InputError` where a span lies outside the list, or an id is negative.
        """
        lengths = torch.where(recorded, stops - starts, 0)
        inside = (lengths >= 0) & ((lengths == 0) | ((starts >= 0) & (stops <= ids.shape[0])))
        if not bool(inside.all()):
            row = int((~inside).nonzero()[0])
            raise InputError(
                f"the top-p set of row {row} is [{int(starts[row])}, {int(stops[row])}) of {ids.shape[0]} recorded "
                f"ids; record the offsets and the ids of one rollout together"
            )
        row_of = torch.arange(lengths.shape[0], device="cpu").repeat_interleave(lengths)
        first = lengths.cumsum(0) - lengths
        place = torch.arange(row_of.shape[0], device="cpu") - first[row_of] + starts[row_of]
        listed = ids[place].to(torch.int64)
        if listed.numel() and int(listed.min()) < 0:
            raise InputError(f"a recorded top-p set holds the id {int(listed.min())}; ids are vocabulary ids from 0 on")
        pairs = torch.unique(torch.stack([row_of, listed]), dim=1)
        return cls(ids=pairs[1], row_of=pairs[0], recorded=recorded)


@dataclass(frozen=True, eq=False)
class TopPScorer:
    """`log p_t = z_t - log sum_{i in N} exp z_i` with `N` the row's set, by gathering these logits alone.

    Gradient: `[j = t] - p_j` for `j` in `N`, exactly zero for every other id. Entropy and the rows without a recorded
    set are `base`'s. The target is handled apart from the other ids of the set, so that it counts once.
    """

    base: LogProbScorer
    mask: TopPMask

    writes_logits = False

    @property
    def shard(self) -> VocabShard:
        return self.base.shard

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return self.base.differentiable

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.base.inputs

    @cached_property
    def _entries(self) -> _Entries:
        return _Entries.build(self.mask, self.base)

    def of_rows(self, rows: slice | Tensor) -> TopPScorer:
        assert rows == slice(0, self.mask.recorded.shape[0]), "top-p masks are replayed over all rows at a time"
        return self

    def new_stats(self) -> tuple[Tensor, ...]:  # those of `base`; the logit of each entry
        return *self.base.new_stats(), self.base.inverse_temperature.new_empty(self._entries.row.shape[0])

    def add_slice_(self, stats: tuple[Tensor, ...], logits: Tensor, first: int) -> None:
        *of_base, of_entries = stats
        run = self._entries.run(first, logits.shape[1])
        of_entries[run] = logits[self._entries.row[run], self._entries.id[run] - first].to(of_entries.dtype)
        self.base.add_slice_(tuple(of_base), logits, first)

    def merge(self, stats: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        *of_base, of_entries = stats
        row = self._entries.row
        z = (of_entries * self.base.inverse_temperature[row]).double()
        z = z.masked_fill(self._entries.is_target, -torch.inf)
        maximum, total = new_stats(self.base.targets).unbind(dim=1)
        maximum = maximum.scatter_reduce(0, row, z, "amax")
        total = total.index_add(0, row, (z - maximum.masked_fill(maximum == -torch.inf, 0.0)[row]).exp())
        ranks = gather_stats(
            torch.cat([torch.stack([maximum, total], dim=1), self.base.to_send(tuple(of_base))], dim=1), self.shard
        )
        outputs, saved = self.base.merge_ranks(ranks[:, :, 2:])
        target = self.base.target_of(ranks)
        of_target = torch.stack([target, torch.ones_like(target)], dim=1)
        maximum, total = combine_stats(torch.cat([ranks[:, :, :2], of_target[None]])).unbind(dim=1)
        replayed = (target - maximum) - total.log()
        log_prob = torch.where(self._entries.recorded, replayed.to(outputs[0].dtype), outputs[0])
        return (log_prob, *outputs[1:]), (*saved, maximum, total, replayed, z)

    def logits_grad(self, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> _TopPGrad:
        *of_base, maximum, total, replayed, z = saved
        entries, row = self._entries, self._entries.row
        d_log_prob = torch.zeros_like(self.base.inverse_temperature) if grads[0] is None else grads[0]
        # Of the base: the entropy's gradient, and the log-prob's of rows without a recorded set.
        whole = self.base.logits_grad(tuple(of_base), (d_log_prob.masked_fill(entries.recorded, 0.0), *grads[1:]))
        d_target = d_log_prob.double().masked_fill(~entries.recorded, 0.0) * self.base.inverse_temperature
        at_target = torch.where(d_target == 0, 0.0, d_target * -torch.expm1(replayed)) + whole.values[:, 0]
        shifted = (z - of_base[0][row]).clamp(min=LEAST_EXPONENT)
        factor = whole.scale[row] if whole.slope is None else whole.scale[row] + whole.slope[row] * shifted
        of_set = (z - maximum[row]).exp() * (d_target / total)[row]
        of_set = of_set.masked_fill(d_target[row] == 0, 0.0)  # NaN where no rank has the target
        values = torch.where(entries.is_target, at_target[row], shifted.exp() * factor - of_set)
        whole = replace(whole, values=at_target[:, None].to(whole.values.dtype))
        return _TopPGrad(whole, entries, values.to(whole.values.dtype))


@dataclass(frozen=True)
class _TopPGrad:
    """The gradient of `base`, with the entries' own written over it."""

    whole: SoftmaxGrad
    entries: _Entries
    values: Tensor  # (entries,)

    def of_rows(self, rows: slice) -> _TopPGrad:
        assert rows == slice(0, self.whole.shift.shape[0]), "top-p masks are replayed over all rows at a time"
        return self

    def write_(self, logits: Tensor, first: int) -> None:
        self.whole.write_(logits, first)
        run = self.entries.run(first, logits.shape[1])
        logits[self.entries.row[run], self.entries.id[run] - first] = self.values[run].to(logits.dtype)


@dataclass(frozen=True)
class _Entries:
    """The entries of this rank's vocabulary, on the device, sorted by id, so that those of a slice are contiguous."""

    row: Tensor  # (entries,) int64
    id: Tensor  # (entries,) int64, global, ascending
    is_target: Tensor  # (entries,) bool
    recorded: Tensor  # (rows,) bool
    host_ids: Tensor  # `id` on the CPU

    @classmethod
    def build(cls, mask: TopPMask, base: LogProbScorer) -> _Entries:
        owned = (mask.ids >= base.shard.start) & (mask.ids < base.shard.stop)
        host_ids, order = mask.ids[owned].sort()
        pair = to_device(torch.stack([mask.row_of[owned][order], host_ids]), base.targets.device)
        recorded = to_device(mask.recorded, base.targets.device)
        return cls(pair[0], pair[1], pair[1] == base.targets[pair[0]], recorded, host_ids)

    def run(self, first: int, columns: int) -> slice:
        bounds = torch.tensor([first, first + columns], device="cpu")
        start, stop = torch.searchsorted(self.host_ids, bounds).tolist()
        return slice(start, stop)
