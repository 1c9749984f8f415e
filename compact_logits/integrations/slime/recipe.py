"""Which slime recipes read more of the logits than masked log-probs and entropies. One decision for a whole run."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

__all__ = ["Refusal", "refusals"]

_PROVEN_TIS = (
    "slime.backends.megatron_utils.loss.icepop_function",
    "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
)


@dataclass(frozen=True)
class Refusal:
    """Why a recipe keeps the full path: the flag, what it reads that the compact path does not produce, the remedy."""

    flag: str
    reason: str
    remedy: str
    metric_only: bool = False  # training is exact, one logged metric is not: refused in strict mode alone

    def __str__(self) -> str:
        return f"{self.flag}: {self.reason}"


def refusals(args: Namespace) -> list[Refusal]:
    """Every reason why the run that `args` describes keeps the full path; empty if it takes the compact path.

    Looks at the arguments alone, so that actor, old, reference and teacher passes, and all ranks, decide alike: a KL
    between a compact pass (0 at masked rows) and a full one (any value there) may be infinite.
    """
    return [*_custom_code(args), *_unmasked_reads(args), *_orders_of_operations(args), *_frameworks(args)]


def _custom_code(args: Namespace) -> list[Refusal]:
    given = []
    for flag, reads in (
        ("custom_advantage_function_path", "log-probs and KL of every row"),
        ("custom_pg_loss_reducer_function_path", "the loss of every row"),
        ("rollout_data_postprocess_path", "loss masks, which it may enlarge after the log-probs were computed"),
    ):
        if getattr(args, flag, None) is not None:
            given.append(Refusal(f"--{flag.replace('_', '-')}", f"custom code may read {reads}", "remove the flag"))
    tis = getattr(args, "custom_tis_function_path", None)
    if tis is not None and tis not in _PROVEN_TIS:
        remedy = f"use one of {', '.join(_PROVEN_TIS)}"
        given.append(Refusal("--custom-tis-function-path", f"{tis} may read log-probs of every row", remedy))
    if getattr(args, "loss_type", "policy_loss") not in ("policy_loss", "sft_loss"):
        reason = f"the {args.loss_type} reads the model's output itself"
        given.append(Refusal("--loss-type", reason, "use policy_loss or sft_loss"))
    return given


def _unmasked_reads(args: Namespace) -> list[Refusal]:
    given = []
    estimator = getattr(args, "advantage_estimator", "grpo")
    kl_coef = getattr(args, "kl_coef", 0.0)
    if estimator == "ppo" and kl_coef != 0:
        reason = "generalised advantage estimation sums the KL of every row"
        given.append(Refusal("--kl-coef", reason, "set --kl-coef 0, or use the KL loss (--use-kl-loss)"))
    if estimator != "ppo" and kl_coef != 0:
        reason = "the metric rollout/kl is a mean over every row"
        given.append(Refusal("--kl-coef", reason, "set --kl-coef 0, or use the KL loss", metric_only=True))
    if getattr(args, "use_rollout_entropy", False):
        given.append(Refusal("--use-rollout-entropy", "it keeps the entropy of every row", "remove the flag"))
    if getattr(args, "use_opsm", False) and (
        getattr(args, "use_opd", False) or (estimator == "reinforce_plus_plus_baseline" and kl_coef != 0)
    ):
        reason = "the metric opsm_clipfrac counts the advantage signs of every row"
        given.append(Refusal("--use-opsm", reason, "remove the flag", metric_only=True))
    for flag in ("save_debug_train_data", "dump_details"):
        if getattr(args, flag, None) is not None:
            reason = "the dump stores log-probs and advantages of every row"
            given.append(Refusal(f"--{flag.replace('_', '-')}", reason, "remove the flag"))
    return given


def _orders_of_operations(args: Namespace) -> list[Refusal]:
    given = []
    for flag in (
        "megatron_deepgemm_forward_layers",
        "megatron_deepgemm_forward_modules",
        "megatron_deepgemm_moe_forward_layers",
        "megatron_deepgemm_moe_forward_modules",
        "true_on_policy_mode",
        "batch_invariant_mode",
    ):
        if getattr(args, flag, None):
            reason = "training is aligned with the rollout engine to the bit"
            given.append(Refusal(f"--{flag.replace('_', '-')}", reason, "remove the flag"))
    if getattr(args, "label_smoothing", 0.0):
        reason = "label smoothing reads every column of the logits"
        given.append(Refusal("--label-smoothing", reason, "set it to 0"))
    scope = getattr(args, "cuda_graph_scope", None) or ()
    names = {str(getattr(each, "name", each)) for each in (scope if isinstance(scope, (list, tuple)) else [scope])}
    if "full_iteration" in names or getattr(args, "cuda_graph_impl", None) == "full_iteration":
        reason = "the number of kept rows changes between replays of a captured iteration"
        given.append(Refusal("--cuda-graph-scope", reason, "capture layers instead"))
    return given


def _frameworks(args: Namespace) -> list[Refusal]:
    given = []
    for flag in ("use_megatron_fsdp", "use_torch_fsdp2", "use_custom_fsdp"):
        if getattr(args, flag, False):
            reason = "the head's weight is gathered by module hooks this is not proven with"
            given.append(Refusal(f"--{flag.replace('_', '-')}", reason, "use the distributed optimizer"))
    if getattr(args, "defer_embedding_wgrad_compute", False):
        reason = "the deferred weight gradient expects one row count for all micro-batches"
        given.append(Refusal("--defer-embedding-wgrad-compute", reason, "remove the flag"))
    if getattr(args, "enable_mtp_training", False):
        reason = "multi-token prediction in training shares the head"
        given.append(Refusal("--enable-mtp-training", reason, "remove the flag"))
    return given
