"""One recipe through slime's own actor: reference pass, log-prob pass, advantages, training steps."""

from __future__ import annotations

import importlib
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from compact_logits.cli.cpu_model import cpu_megatron
from tests.upstream.slime.parts import KeepingOptimizer, Policies, Scheduler, build_chunks
from tests.upstream.slime.recipes import Layout, Recipe
from tests.upstream.slime.rollout import make_rollout
from tests.upstream.slime.tree import load_actor, parse_flags

__all__ = ["Result", "run_recipe", "world_of"]

# What Megatron's own parser and validation would have set.
_MEGATRON = {
    "align_grad_reduce": True,
    "align_param_gather": False,
    "bf16": False,
    "decoder_seq_length": None,
    "enable_mtp_training": False,
    "fp16": False,
    "manual_gc": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "seq_length": 64,
    "use_distributed_optimizer": False,
}


@dataclass
class Result:
    """What one rank saw. Values are per sample and of this context-parallel rank, as slime keeps them.

    `values`: by slime's names, among them the training policy's "probe_log_probs" and "probe_entropy"; empty where
    the pipeline stage is not the last. `masks` are aligned with them. `metrics` are those slime logged, each with the
    number of the log call; empty on the ranks that log none. `gradients` are complete, one dict for each step.
    """

    values: dict[str, list[Tensor]]
    masks: list[Tensor]
    metrics: dict[str, float]
    gradients: list[dict[str, Tensor]]
    warnings: list[str]


def world_of(rank: int, world: int, layout: Layout) -> AbstractContextManager[None]:
    """Megatron's parallel state for `layout`, with slime's actor imported. Within it recipes run one after another."""
    load_actor()
    return cpu_megatron(rank, world, tp=layout.tp, cp=layout.cp, pp=layout.pp, vpp=layout.vpp)


def run_recipe(
    recipe: Recipe,
    layout: Layout,
    *,
    before: Callable[[Namespace], AbstractContextManager[Any]] | None = None,
) -> Result:
    """Run `train_actor` of slime's actor once over the recipe's rollout, all ranks together.

    `before` is entered with the run's arguments when slime's actor is imported and its model built, where slime calls
    its `--custom-megatron-init-path`, and left when the last pass has run. The weights are the same in every run.
    """
    module = load_actor()
    args = _arguments(recipe, layout)
    chunks = build_chunks(recipe, layout)
    for chunk in chunks:
        chunk.config.calculate_per_token_loss = args.calculate_per_token_loss
    actor = _bare_actor(module, args, recipe, layout, chunks)
    rollout = make_rollout(recipe, args)
    iterators = module.get_data_iterator(rollout)

    def cut(values: list[Tensor]) -> list[Tensor]:
        lengths = zip(values, rollout["total_lengths"], rollout["response_lengths"], strict=True)
        return [module.slice_log_prob_with_cp(*each) for each in lengths]

    masks = cut(rollout["loss_masks"])
    # Before anything is installed: what the rollout engine reports owes nothing to the path that is tested.
    actor._switch_model("rollout")
    reported = actor.compute_log_prob(iterators, rollout["num_microbatches"], store_prefix="rollout_")
    for key, values in reported.items():
        rollout[key] = [
            torch.where(mask != 0, value, recipe.off_mask) for value, mask in zip(values, masks, strict=True)
        ]
    actor._switch_model("actor")
    random = torch.Generator().manual_seed(12)
    critic = {"values": cut([torch.randn(length, generator=random) for length in rollout["response_lengths"]])}
    with _recorded() as records, (before or _nothing)(args):
        actor.train_actor(0, rollout, external_data=critic if args.use_critic else None)
        probe = Namespace(**{**vars(args), "use_rollout_entropy": True})
        rollout.update(
            module.forward_only(
                module.get_log_probs_and_entropy,
                probe,
                chunks,
                iterators,
                rollout["num_microbatches"],
                store_prefix="probe_",
                use_rollout_top_p_replay=True,
            )
        )
    values = {key: value for key, value in rollout.items() if _is_per_token(value, masks)}
    return Result(values, masks, records.metrics, actor.optimizer.steps, records.warnings)


def _arguments(recipe: Recipe, layout: Layout) -> Namespace:
    args = parse_flags(f"--data-pad-size-multiplier 8 {recipe.flags}")
    vars(args).update({name: value for name, value in _MEGATRON.items() if name not in vars(args)})
    vars(args).update(allgather_cp=layout.allgather_cp, bf16=layout.dtype == torch.bfloat16, **recipe.config)
    importlib.import_module("megatron.training.global_vars").set_args(args)
    return args


def _bare_actor(module: ModuleType, args: Namespace, recipe: Recipe, layout: Layout, chunks: list[Any]) -> Any:
    """slime's actor as its `init` leaves it, without the cluster and the checkpoints that `init` is about."""
    tags = {"rollout"}
    if args.kl_coef != 0 or args.use_kl_loss:
        tags.add("ref")
    if args.keep_old_actor:
        tags.add("old_actor")
    if args.use_opd:
        tags.add("teacher")
    actor = object.__new__(module.MegatronTrainRayActor)
    actor.args, actor.role, actor.model = args, "actor", chunks
    actor.optimizer, actor.opt_param_scheduler = KeepingOptimizer(chunks), Scheduler()
    actor.weights_backuper, actor._active_model_tag = Policies(recipe, layout, chunks, tags), "actor"
    actor.prof, actor.weight_updater = SimpleNamespace(step=_ignore), SimpleNamespace(pop_metrics=dict)
    path = args.rollout_data_postprocess_path
    actor.rollout_data_postprocess = (
        None if path is None else importlib.import_module("slime.utils.misc").load_function(path)
    )
    if "train_wait" not in module.Timer().start_time:
        module.Timer().start("train_wait")
    return actor


@contextmanager
def _recorded() -> Iterator[Any]:
    """Take what slime would send to its trackers, and what this package warns of."""
    records = SimpleNamespace(metrics={}, warnings=[])
    calls = iter(range(1000))

    def log(args: Any, metrics: dict[str, float], step_key: str) -> None:
        call = next(calls)
        records.metrics.update({f"{call} {key}": value for key, value in metrics.items()})

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("compact_logits")
    replaced = [
        (importlib.import_module("slime.observability.logging_utils"), "log", log),
        # Times and operations per second: not a matter of this comparison.
        (importlib.import_module("slime.observability.train_metric_utils"), "log_perf_data", _ignore),
    ]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        for (owner, name, _), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)


def _is_per_token(value: Any, masks: list[Tensor]) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(masks)
        and all(torch.is_tensor(each) and each.is_floating_point() for each in value)
        and all(each.shape == mask.shape for each, mask in zip(value, masks, strict=True))
    )


def _ignore(*_: Any, **__: Any) -> None: ...


def _nothing(args: Namespace) -> AbstractContextManager[None]:
    return nullcontext()
