"""What a head's memory depends on, and what it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from compact_logits.engine.validation import check_chunk_bytes, check_flag, check_temperature
from compact_logits.errors import InputError
from compact_logits.host_values import as_index, describe
from compact_logits.scorers.log_prob_scorer import Entropy, check_entropy

__all__ = ["HeadBytes", "HeadSize"]

_SIZES = ("rows", "kept", "vocab", "hidden", "tp", "nucleus_ids", "top_k", "most_on_shard")


@dataclass(frozen=True)
class HeadSize:
    """The head of one rank: `rows` of one micro-batch on this context-parallel rank, of which `kept` count."""

    rows: int
    kept: int
    vocab: int
    hidden: int
    tp: int = 1
    sequence_parallel: bool = True  # of no effect with `tp` 1
    dtype: torch.dtype = torch.bfloat16
    entropy: Entropy = "loss"
    temperature: float = 1.0
    frozen: bool = False
    fused: bool = False  # the weight's gradient is added to an existing fp32 `main_grad`
    chunk_bytes: int | None = None
    nucleus_ids: int = 0  # ids that the sampler kept a row, replayed; 0: log-probs over the whole vocabulary
    top_k: int = 0  # ids of a teacher a row, whose KL is scored in place of log-probs; 0: log-probs
    most_on_shard: int | None = None  # kept rows of the sequence shard that has most; `None`: spread evenly

    def __post_init__(self) -> None:
        self._check_settings()
        if min(self.rows, self.vocab, self.hidden, self.tp) < 1 or not 0 <= self.kept <= self.rows:
            raise InputError(f"needed positive sizes and 0 <= kept <= rows, got {self}")
        if self.vocab % self.tp or self.rows % self.tp:
            raise InputError(
                f"tensor parallelism over {self.tp} ranks needs vocabulary ({self.vocab}) and rows ({self.rows}) that "
                f"it divides; pad them as Megatron does"
            )
        if not (0 <= self.nucleus_ids <= self.vocab and 0 <= self.top_k <= self.vocab // self.tp):
            raise InputError(
                f"needed 0 <= nucleus_ids <= vocab and 0 <= top_k <= vocab / tp, got {self.nucleus_ids} and "
                f"{self.top_k} with vocab {self.vocab} and tp {self.tp}"
            )
        if self.nucleus_ids and self.top_k:
            raise InputError("a head replays a top-p set or scores a teacher's top-k, got both; set one of them to 0")
        if self.most_on_shard is not None and not self._even <= self.most_on_shard <= self.rows // self.tp:
            raise InputError(
                f"of {self.kept} kept rows on {self.tp} shards of {self.rows // self.tp}, the fullest has from "
                f"{self._even} to {self.rows // self.tp}, got most_on_shard {self.most_on_shard}"
            )

    def _check_settings(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if as_index(value) is None and not (name == "most_on_shard" and value is None):
                raise InputError(f"{name} of a head must be a whole number, got {describe(value)}")
        for name in ("sequence_parallel", "frozen", "fused"):
            check_flag(name, getattr(self, name))
        check_entropy(self.entropy)
        check_temperature(self.temperature, ())
        check_chunk_bytes(self.chunk_bytes)

    @property
    def _even(self) -> int:
        return -(-self.kept // self.tp)

    @property
    def shard_counts(self) -> tuple[int, ...]:
        """Kept rows of each sequence shard, the fullest first and the others filled alike in turn."""
        share = self._even if self.most_on_shard is None else self.most_on_shard
        counts, left = [], self.kept
        for _ in range(self.tp):
            counts.append(min(share, left))
            left -= counts[-1]
        return tuple(counts)

    def of_rows(self, rows: int) -> HeadSize:
        """The same with more or fewer rows, as many of them kept in proportion, and as unevenly."""
        return self.keeping(round(self.kept / self.rows * rows), rows)

    def keeping(self, kept: int, rows: int) -> HeadSize:
        """The same with these numbers, the kept rows as unevenly spread."""
        most = None
        if self.most_on_shard is not None:
            share = self.most_on_shard / max(self.kept, 1)
            most = min(max(round(share * kept), -(-kept // self.tp)), rows // self.tp)
        return replace(self, rows=rows, kept=kept, most_on_shard=most)


@dataclass(frozen=True)
class HeadBytes:
    """What stands at once beyond hidden states, weight and their gradient buffers of other layers, in bytes.

    `forward`: most during forward. `saved`: between forward and backward. `backward`: most during backward, what is
    saved and the new gradients of hidden states and weight included.
    """

    forward: int
    saved: int
    backward: int

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward)

    def extended(self, shorter: HeadBytes, times: float) -> HeadBytes:
        """As much again, `times` over, as this has beyond `shorter`."""

        def extend(mine: int, less: int) -> int:
            return mine + round((mine - less) * times)

        return HeadBytes(
            forward=extend(self.forward, shorter.forward),
            saved=extend(self.saved, shorter.saved),
            backward=extend(self.backward, shorter.backward),
        )
