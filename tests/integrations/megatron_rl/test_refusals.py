"""What keeps Megatron-RL's gathered path: each by name, to the bit, told once; an error in strict mode."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits.cli.cpu_model import cpu_megatron
from compact_logits.errors import InputError, RefusedError
from compact_logits.integrations import megatron_rl
from tests.support.megatron_rl_passes import compacted
from tests.support.megatron_rl_stand_in import build_stand_in, stand_in
from tests.support.ranks import RankPool

BY_RUN = [
    ({"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl full_iteration"),
    ({"cuda_graph_scope": ["full_iteration"]}, "--cuda-graph-impl full_iteration"),
    ({"batch_invariant_mode": True}, "--batch-invariant-mode"),
    ({"hybrid_layer_pattern": "M*M*"}, "HybridModel"),
    ({"gtp_weight_remat_size": 2}, "GTP"),
    ({"use_megatron_fsdp": True}, "FSDP"),
    ({"use_torch_fsdp2": True}, "FSDP"),
    ({"fp8_output_proj": True}, "--fp8-output-proj"),
    ({"config_logger_dir": "logged"}, "--config-logger-dir"),
    ({"rl_verify_model_weights_swap": True}, "--rl-verify-model-weights-swap"),
    ({"label_smoothing": 0.1}, "--label-smoothing"),
    ({"mtp_num_layers": 1}, "--mtp-num-layers"),
]


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def tokens_and_policy(**sizes: Any) -> tuple[Tensor, Any]:
    random = torch.Generator().manual_seed(1)
    policy = build_stand_in(torch.randn(1, 6, 16, generator=random), dtype=torch.bfloat16, **sizes)
    return torch.randint(16, (1, 6), generator=random), policy


def refused(rl_utils: ModuleType, tokens: Tensor, model: Any, reason: str) -> None:
    """Assert that `model` keeps the gathered path because of `reason`, exactly, and that this is told once."""
    plain = rl_utils.get_logprobs(model, tokens, None)
    told = Told()
    logging.getLogger("compact_logits").addHandler(told)
    try:
        with compacted() as check:
            for _ in range(2):
                found = rl_utils.get_logprobs(model, tokens, None)
                assert found.dtype == plain.dtype and torch.equal(found, plain), reason
            arguments = {"batches": [tokens], "dtype": plain.dtype, "pp_group": None}
            assert rl_utils.compute_logprobs_batch(model, **arguments).dtype == plain.dtype
            findings = check()
            assert [finding.state for finding in findings] == ["refused"] and reason in findings[0].reason, findings
            assert findings[0].remedy
    finally:
        logging.getLogger("compact_logits").removeHandler(told)
    assert len(told.lines) == 1 and reason in told.lines[0], told.lines
    with compacted(COMPACT_LOGITS="strict"):
        with pytest.raises(RefusedError, match="COMPACT_LOGITS=strict") as raised:
            rl_utils.get_logprobs(model, tokens, None)
        assert reason in str(raised.value)
        with pytest.raises(RefusedError, match="COMPACT_LOGITS=strict"):
            rl_utils.compute_logprobs_batch(model, [tokens], torch.bfloat16, None)


def by_run(rank: int, world: int) -> None:
    for args, reason in BY_RUN:
        with stand_in(bf16=True, **args) as rl_utils, cpu_megatron(rank, world, tp=1):
            refused(rl_utils, *tokens_and_policy(), reason)


def test_runs_are_refused_by_name(rank_pool: RankPool) -> None:
    rank_pool.run(1, by_run)


def by_model(rank: int, world: int) -> None:
    with stand_in(bf16=True) as rl_utils, cpu_megatron(rank, world, tp=1):
        tokens, policy = tokens_and_policy()
        other = HybridModel(policy)
        refused(rl_utils, tokens, other, "the model is a HybridModel, proven is megatron-core's GPTModel")

        _, policy = tokens_and_policy()
        with_contract = type(policy)
        policy.__class__ = type("OldPolicy", (with_contract,), {"forward": old_forward})
        refused(rl_utils, tokens, policy, "this version has no output-processor contract")

        _, policy = tokens_and_policy()
        policy.output_layer.register_forward_hook(lambda *_: None)
        refused(rl_utils, tokens, policy, "forward hooks")

        _, policy = tokens_and_policy()
        policy.output_layer.__class__ = type("LoraHead", (type(policy.output_layer),), {})
        refused(rl_utils, tokens, policy, "the output layer is a LoraHead")

        _, policy = tokens_and_policy()
        policy.output_layer.weight.__fsdp_param__ = True
        refused(rl_utils, tokens, policy, "Megatron-FSDP")

        _, policy = tokens_and_policy()
        policy.config.mtp_num_layers = 1
        refused(rl_utils, tokens, policy, "multi-token prediction")

        _, policy = tokens_and_policy()
        policy.output_layer.gradient_accumulation_fusion = True
        refused_without_gradients(rl_utils, tokens, policy, "no main_grad")


class HybridModel(torch.nn.Module):
    """Another model class of Megatron's, with what `get_logprobs` needs of it."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy, self.post_process = policy, True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.policy(*args, **kwargs)


def old_forward(
    self: Any, tokens: Any, positions: Any, mask: Any, runtime_gather_output: Any = None, **_: Any
) -> Tensor:
    return self._postprocess(self.hidden, runtime_gather_output)


def refused_without_gradients(rl_utils: ModuleType, tokens: Tensor, model: Any, reason: str) -> None:
    """What only the training pass would meet, the pass for old log-probs meets too."""
    with torch.no_grad():
        refused(rl_utils, tokens, model, reason)


def test_models_are_refused_by_name(rank_pool: RankPool) -> None:
    rank_pool.run(1, by_model)


def two_paths_in_one_run(rank: int, world: int) -> None:
    with stand_in(bf16=True) as rl_utils, cpu_megatron(rank, world, tp=1), compacted() as check:
        tokens, policy = tokens_and_policy()
        old = rl_utils.get_logprobs(policy, tokens, None, no_grad=True)
        rl_utils.run.batch_invariant_mode = True
        with pytest.raises(
            InputError, match="earlier log-probs of this model are of the compact path.*batch-invariant"
        ):
            rl_utils.get_logprobs(policy, tokens, None)
        rl_utils.run.batch_invariant_mode = False
        assert torch.equal(rl_utils.get_logprobs(policy, tokens, None), old)

        _, other = tokens_and_policy()
        rl_utils.run.batch_invariant_mode = True
        plain = rl_utils.get_logprobs(other, tokens, None)
        rl_utils.run.batch_invariant_mode = False
        assert plain.dtype == torch.bfloat16
        assert torch.equal(rl_utils.get_logprobs(other, tokens, None), plain), "refused once, refused for the run"
        assert [finding.state for finding in check()] == ["on", "refused"]


def test_the_two_paths_never_meet_in_one_run(rank_pool: RankPool) -> None:
    rank_pool.run(1, two_paths_in_one_run)


def unanswered(rank: int, world: int) -> None:
    with stand_in(bf16=True) as rl_utils, cpu_megatron(rank, world, tp=1):
        tokens, policy = tokens_and_policy()
        with compacted():
            with pytest.raises(InputError, match=r"did not answer: the model has 6 rows .* marked for 5"):
                rl_utils.get_logprobs(policy, tokens[:, 1:], None)
            policy._postprocess = lambda hidden, *_: policy.output_layer(hidden)[0].transpose(0, 1)
            with pytest.raises(
                InputError, match="but the output layer did not answer: its output processor was never called"
            ):
                rl_utils.get_logprobs(policy, tokens, None)
            del policy._postprocess
            ours = rl_utils.selective_log_softmax
            rl_utils.selective_log_softmax = lambda logits, index: ours(logits[:, 1:], index)
            with pytest.raises(InputError, match=r"needed one answer for each of the \(1, 5\) labels, got \(1, 4, 2\)"):
                rl_utils.get_logprobs(policy, tokens, None)
            rl_utils.selective_log_softmax = ours
        assert not policy._forward_pre_hooks and "forward" not in vars(policy.output_layer)


def test_a_head_that_does_not_answer_is_an_error(rank_pool: RankPool) -> None:
    rank_pool.run(1, unanswered)


def interrupted(rank: int, world: int) -> None:
    with stand_in() as rl_utils, cpu_megatron(rank, world, tp=1):
        tokens, policy = tokens_and_policy()
        plain = rl_utils.get_logprobs(policy, tokens, None)
        with compacted():
            hook = policy.register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="midway"):
                rl_utils.get_logprobs(policy, tokens, None)
            hook.remove()
            # Outside of get_logprobs the model gives its logits, as the weight-swap check or a user may want them.
            logits = policy(tokens, None, None, runtime_gather_output=True)
            assert torch.equal(rl_utils.selective_log_softmax(logits[:, :-1], tokens[:, 1:]), plain)
        assert torch.equal(rl_utils.get_logprobs(policy, tokens, None), plain)


def fail(module: Any, args: Any) -> None:
    raise RuntimeError("midway")


def test_an_interrupted_call_leaves_nothing_behind(rank_pool: RankPool) -> None:
    rank_pool.run(1, interrupted)


def tempered(rank: int, world: int) -> None:
    with stand_in(bf16=True, batch_invariant_mode=True) as rl_utils, cpu_megatron(rank, world, tp=1), compacted():
        tokens, policy = tokens_and_policy()
        megatron_rl.mark_tokens(tokens, temperature=0.5)
        with pytest.raises(InputError, match="marked with temperature 0.5, and the gathered path"):
            rl_utils.get_logprobs(policy, tokens, None)


def test_a_temperature_that_the_gathered_path_ignores_is_an_error(rank_pool: RankPool) -> None:
    rank_pool.run(1, tempered)
