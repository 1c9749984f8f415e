"""The recipes that slime offers, as its users write them, and the layouts they run in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

__all__ = ["EXTREME", "LAYOUTS", "PIPELINES", "RECIPES", "REFUSED", "TABLE_LAYOUTS", "Layout", "Recipe"]


@dataclass(frozen=True)
class Layout:
    """How the model lies over the ranks, tensor parallelism first; sequence parallelism is on where TP is over 1."""

    tp: int = 1
    cp: int = 1
    allgather_cp: bool = False
    dtype: torch.dtype = torch.float32
    pp: int = 1
    vpp: int | None = None

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp

    def __str__(self) -> str:
        kind = " allgather" if self.allgather_cp else " zigzag" if self.cp > 1 else ""
        stages = f" PP{self.pp}" + (f" VPP{self.vpp}" if self.vpp else "") if self.pp > 1 else ""
        return f"TP{self.tp} CP{self.cp}{kind}{stages} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Recipe:
    """Flags of slime's command line, and the rollout that they meet.

    `masks`: "turns" alternates counted and tool stretches; "one empty" also masks one whole sample out, which is a
    micro-batch by itself; "empty" masks out all; "late" counts two tokens at the very end of each sample alone, so
    that context-parallel ranks and sequence-parallel shards have none. `needs_cp1`: slime itself fails on it under CP.
    """

    name: str
    flags: str = ""
    masks: Literal["turns", "one empty", "empty", "late"] = "turns"
    steps: int = 2
    model: dict[str, Any] = field(default_factory=dict)  # for build_gpt
    config: dict[str, Any] = field(default_factory=dict)  # what the file of `--custom-config-path` would set
    needs_cp1: bool = False
    off_mask: float = 0.0  # what the rollout engine reports as log-probs of masked tokens
    unmasked_metrics: tuple[str, ...] = ()  # means over rows that do not count as well, so of another value here

    def __str__(self) -> str:
        return self.name


LAYOUTS = [
    Layout(tp, cp, allgather_cp, dtype)
    for tp, cp, allgather_cp in ((1, 1, False), (2, 1, False), (2, 2, False), (2, 2, True))
    for dtype in (torch.float32, torch.bfloat16)
]

# The columns of the feature table that is printed and in README.
TABLE_LAYOUTS = [LAYOUTS[0], LAYOUTS[2], LAYOUTS[4], LAYOUTS[6], LAYOUTS[3]]

PIPELINES = [Layout(pp=2), Layout(pp=2, vpp=2), Layout(2, pp=2, vpp=2, dtype=torch.bfloat16)]

_KL = "--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type"
_OLD = "--keep-old-actor"
_TIS = f"{_OLD} --use-tis"
_MIS = "--custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
_ICEPOP = "--custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function"
_USER = "tests.upstream.slime.user_code"


def _mis(**changed: Any) -> dict[str, Any]:
    """The settings that slime ships with its mismatch example, changed."""
    shipped = {
        "use_rs": True,
        "tis_level": "token",
        "rs_level": "token",
        "tis_mode": "truncate",
        "tis_lower_bound": 0.5,
        "tis_upper_bound": 2.0,
        "rs_lower_bound": None,
        "rs_upper_bound": None,
        "rs_veto_threshold": 1.0e-4,
        "tis_batch_normalize": True,
    }
    return {**shipped, **changed}


RECIPES = [
    Recipe("grpo, entropy and kl", f"{_OLD} --entropy-coef 0.01 {_KL} low_var_kl"),
    Recipe("grpo, log-probs of the loss reused", "--entropy-coef 0.01", steps=1),
    Recipe("grpo, tied head", f"{_OLD} --entropy-coef 0.01", model={"tied": True}),
    Recipe("cispo", f"{_OLD} --advantage-estimator cispo --eps-clip-high 0.28"),
    Recipe("gspo", f"{_OLD} --advantage-estimator gspo {_KL} k2"),
    Recipe("dual clip, per-token loss", f"{_OLD} --eps-clip-c 3.0 --calculate-per-token-loss --entropy-coef 0.01"),
    Recipe("opsm", f"{_OLD} --use-opsm"),
    Recipe("kl k1", f"{_OLD} {_KL} k1"),
    Recipe("kl k3, unbiased", f"{_OLD} {_KL} k3 --use-unbiased-kl"),
    Recipe("kl in the reward", f"{_OLD} --kl-coef 0.1", unmasked_metrics=("rollout/kl",)),
    Recipe("tis", _TIS),
    Recipe("tis, icepop", f"{_TIS} {_ICEPOP} --tis-clip-low 0.9 --tis-clip 1.1"),
    Recipe("mis, as shipped", f"{_TIS} {_MIS}", config=_mis()),
    Recipe("mis, by sequence, clipped", f"{_TIS} {_MIS}", config=_mis(tis_level="sequence", tis_mode="clip")),
    Recipe(
        "mis, geometric, masked",
        f"{_TIS} {_MIS}",
        config=_mis(tis_level="geometric", rs_level="geometric", tis_mode="mask", tis_batch_normalize=False),
    ),
    Recipe("mismatch metrics", f"--get-mismatch-metrics {_MIS}", config=_mis()),
    Recipe("log-probs of the rollout", "--use-rollout-logprobs --entropy-coef 0.01"),
    Recipe("temperature 0.7", f"{_OLD} --rollout-temperature 0.7 --entropy-coef 0.01 {_KL} low_var_kl"),
    Recipe("top-p 0.9", f"{_OLD} --rollout-top-p 0.9 --rollout-temperature 0.8 --entropy-coef 0.01 {_KL} low_var_kl"),
    Recipe("ppo", f"{_OLD} --advantage-estimator ppo --normalize-advantages --lambd 0.95 --gamma 0.99"),
    Recipe(
        "reinforce++, kl in the reward",
        f"{_OLD} --advantage-estimator reinforce_plus_plus --kl-coef 0.1 --gamma 0.99",
        # Under CP its returns hang on one graph for all samples, which the second micro-batch finds freed.
        needs_cp1=True,
        unmasked_metrics=("rollout/kl",),
    ),
    Recipe(
        "reinforce++ baseline, whitened",
        f"{_OLD} --advantage-estimator reinforce_plus_plus_baseline --kl-coef 0.1 --normalize-advantages",
        unmasked_metrics=("rollout/kl",),
    ),
    Recipe("opd, megatron teacher", f"{_OLD} --use-opd --opd-type megatron"),
    Recipe("sft", "--loss-type sft_loss --disable-compute-advantages-and-returns"),
    Recipe(
        "log-prob chunks, loss recomputed",
        f"{_OLD} --log-probs-chunk-size 16 --recompute-loss-function --entropy-coef 0.01",
    ),
    Recipe("dynamic batches", f"{_OLD} --use-dynamic-batch-size --entropy-coef 0.01 {_KL} low_var_kl"),
    Recipe("one sample all masked", f"{_OLD} --entropy-coef 0.01 {_KL} low_var_kl", masks="one empty"),
    Recipe("every sample all masked", f"{_OLD} --entropy-coef 0.01 {_KL} low_var_kl", masks="empty"),
    Recipe("two tokens a sample", f"{_OLD} --entropy-coef 0.01 {_KL} low_var_kl", masks="late"),
]

# The full path's ratios are finite there, e.g. exp(-4 + 90) in fp32; with 0 in place of the log-prob they are not.
EXTREME = [
    Recipe("tis, -90 at masked tokens", _TIS, off_mask=-90.0),
    Recipe("mis, -90 at masked tokens", f"{_TIS} {_MIS}", config=_mis(), off_mask=-90.0),
    Recipe("log-probs of the rollout, -90 at masked tokens", "--use-rollout-logprobs", off_mask=-90.0),
    Recipe(
        "reinforce++, k3 of the rollout's log-probs, -90 at masked tokens",
        "--use-rollout-logprobs --advantage-estimator reinforce_plus_plus --kl-coef 0.1 --kl-loss-type k3",
        off_mask=-90.0,
        needs_cp1=True,
        unmasked_metrics=("rollout/kl",),
    ),
]

# Left to the full path, which must then run as if nothing were installed.
REFUSED = [
    Recipe("ppo, kl in the reward", f"{_OLD} --advantage-estimator ppo --kl-coef 0.1"),
    Recipe("rollout entropy", f"{_OLD} --use-rollout-entropy"),
    Recipe("custom loss", f"{_OLD} --loss-type custom_loss --custom-loss-function-path {_USER}.mean_logit_loss"),
    Recipe("custom advantage", f"{_OLD} --custom-advantage-function-path {_USER}.advantage_of_log_probs"),
    Recipe("custom reducer", f"{_OLD} --custom-pg-loss-reducer-function-path {_USER}.unmasked_reducer"),
    Recipe("custom tis", f"{_TIS} --custom-tis-function-path {_USER}.unmasked_tis"),
    Recipe("masks enlarged after the log-probs", f"{_OLD} --rollout-data-postprocess-path {_USER}.count_everything"),
]
