"""Nucleus replay: the log-prob normalised over the few ids that the sampler kept, entropy over the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from compact_logits.chunks import Block
from compact_logits.errors import InputError
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.scorers.temperature import inverse_temperature
from compact_logits.vocab_parallel import gather_stats, merge_softmax

__all__ = ["Nucleus", "NucleusScorer"]


@dataclass(frozen=True, eq=False)
class Nucleus:
    """A ragged set of vocabulary ids a row, on the CPU. A row that is not `recorded` is normalised over all ids.

    The row's target always belongs to its set, whether listed or not. Ids listed twice count once.
    """

    ids: Tensor  # (entries,) int64, global, distinct in a row
    row_of: Tensor  # (entries,) int64, ascending
    recorded: Tensor  # (rows,) bool

    @classmethod
    def build(
        cls,
        ids: Tensor,  # (listed,) integers, all recorded ids
        starts: Tensor,  # (rows,) int64, where in `ids` the row's set begins
        stops: Tensor,  # (rows,) int64, where it ends
        recorded: Tensor,  # (rows,) bool
    ) -> Nucleus:
        """Cut the rows' sets out of one flat list, without a loop over rows. No collective, no device work.

        Raises `InputError` where a span lies outside the list, or an id is negative.
        """
        lengths = torch.where(recorded, stops - starts, 0)
        inside = (lengths >= 0) & ((lengths == 0) | ((starts >= 0) & (stops <= ids.shape[0])))
        if not bool(inside.all()):
            row = int((~inside).nonzero()[0])
            raise InputError(
                f"the nucleus of row {row} is [{int(starts[row])}, {int(stops[row])}) of {ids.shape[0]} recorded ids; "
                f"record the offsets and the ids of one rollout together"
            )
        row_of = torch.arange(lengths.shape[0]).repeat_interleave(lengths)
        first = lengths.cumsum(0) - lengths
        place = torch.arange(row_of.shape[0]) - first[row_of] + starts[row_of]
        listed = ids[place].to(torch.int64)
        if listed.numel() and int(listed.min()) < 0:
            raise InputError(f"a recorded nucleus holds the id {int(listed.min())}; ids are vocabulary ids from 0 on")
        pairs = torch.unique(torch.stack([row_of, listed]), dim=1)
        return cls(ids=pairs[1], row_of=pairs[0], recorded=recorded)


@dataclass(frozen=True)
class NucleusScorer:
    """`log p_t = z_t - log sum_{i in N} exp z_i` with `N` the row's set, by gathering these logits alone.

    Gradient: `[j = t] - p_j` for `j` in `N`, exactly zero for every other id. Entropy and the rows without a recorded
    set are `base`'s. The target is kept apart from the other ids of the set, so that it counts once wherever it stands.
    """

    base: LogProbScorer
    nucleus: Nucleus

    @property
    def stats_width(self) -> int:
        return self.base.stats_width + 2

    @property
    def needs_spare(self) -> bool:
        return self.base.needs_spare

    @property
    def turn_shares_(self) -> None:
        return None

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return self.base.differentiable

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.base.inputs

    @cached_property
    def _entries(self) -> _LocalEntries:
        return _LocalEntries.build(self.nucleus, self.base)

    def part(self, columns: slice) -> NucleusScorer:
        return replace(self, base=self.base.part(columns))

    def local_stats(self, block: Block) -> Tensor:
        entries, z = self._entries.of_rows(block.rows), block.z
        padded = z.new_full((z.shape[0], max(entries.width, 1)), -torch.inf)
        padded[entries.row, entries.place] = entries.logits(block, self.base)
        maximum = padded.amax(dim=1)
        sum_exp = padded.sub_(maximum.masked_fill(maximum == -torch.inf, 0.0)[:, None]).exp_().sum(dim=1)
        return torch.cat([self.base.local_stats(block), torch.stack([maximum, sum_exp], dim=1)], dim=1)

    def combine(self, parts: Tensor) -> Tensor:
        maximum, sum_exp, _ = merge_softmax(parts[:, :, -2].double(), parts[:, :, -1].double())
        of_nucleus = torch.stack([maximum, sum_exp], dim=1).to(parts.dtype)
        return torch.cat([self.base.combine(parts[:, :, :-2]), of_nucleus], dim=1)

    def merge(self, stats: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        ranks = gather_stats(stats, self.base.shard)
        outputs, saved = self.base.merge_ranks(ranks[:, :, :-2])
        target = self.base.selected(ranks)
        maximum, sum_exp, _ = merge_softmax(
            torch.cat([ranks[:, :, -2], target[None]]), torch.cat([ranks[:, :, -1], torch.ones_like(target)[None]])
        )
        log_sum = sum_exp.log()
        replayed = (target - maximum) - log_sum
        log_prob = torch.where(self._entries.recorded, replayed, outputs[0])
        return (log_prob, *outputs[1:]), (*saved, maximum, log_sum, replayed)

    def d_logits_(self, block: Block, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> None:
        rows, entries = block.rows, self._entries.of_rows(block.rows)
        *of_base, maximum, log_sum, log_prob = saved
        logits = entries.logits(block, self.base)
        recorded = self._entries.recorded[rows]
        everywhere = None if grads[0] is None else grads[0].masked_fill(recorded, 0.0)
        self.base.d_logits_(block, tuple(of_base), (everywhere, *grads[1:]))
        if grads[0] is None:
            return
        scaled = grads[0].masked_fill(~recorded, 0.0) * inverse_temperature(self.base.temperature, rows, grads[0])
        others = (logits - maximum[entries.row] - log_sum[entries.row]).exp() * -scaled[entries.row]
        block.z.index_put_((entries.row, entries.local_id), others, accumulate=True)
        self.base.add_at_target_(block.z, rows, scaled * -torch.expm1(log_prob))


@dataclass(frozen=True)
class _LocalEntries:
    """The entries of this rank's slice of the vocabulary, on the device, with host offsets to cut blocks of rows."""

    row: Tensor  # (entries,) int64
    place: Tensor  # (entries,) int64, position among the row's entries
    local_id: Tensor  # (entries,) int64
    other: Tensor  # (entries,) bool, not the row's target
    recorded: Tensor  # (rows,) bool
    offsets: list[int]
    width: int = 0

    @classmethod
    def build(cls, nucleus: Nucleus, base: LogProbScorer) -> _LocalEntries:
        local, owned = base.counted.local_ids(nucleus.ids)
        row, local = nucleus.row_of[owned], local[owned]
        counts = torch.bincount(row, minlength=nucleus.recorded.shape[0])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        device = base.targets.device
        on_device = row.to(device, non_blocking=True)
        ids = local.to(device, non_blocking=True)
        return cls(
            row=on_device,
            place=(torch.arange(row.shape[0]) - offsets[row]).to(device, non_blocking=True),
            local_id=ids,
            other=ids + base.shard.start != base.targets[on_device],
            recorded=nucleus.recorded.to(device, non_blocking=True),
            offsets=offsets.tolist(),
        )

    def of_rows(self, rows: slice) -> _LocalEntries:
        cut = slice(self.offsets[rows.start], self.offsets[rows.stop])
        bounds = self.offsets[rows.start : rows.stop + 1]
        return _LocalEntries(
            row=self.row[cut] - rows.start,
            place=self.place[cut],
            local_id=self.local_id[cut],
            other=self.other[cut],
            recorded=self.recorded[rows],
            offsets=[],
            width=max((stop - start for start, stop in pairwise(bounds)), default=0),
        )

    def logits(self, block: Block, base: LogProbScorer) -> Tensor:  # (entries,) of the scratch's dtype
        """The tempered logits of the entries, -inf for the target, which is counted apart."""
        temperature, dtype = base.temperature, block.z.dtype
        if isinstance(temperature, Tensor):
            temperature = temperature[block.rows].to(dtype)[self.row]
        return (block.logits[self.row, self.local_id].to(dtype) / temperature).masked_fill_(~self.other, -torch.inf)
