"""Training by Megatron-RL's own GRPO loss and its own pipeline schedule, over the gathered path and the compact one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits.cli.cpu_model import sum_gradients
from tests.support.megatron_rl_passes import compacted
from tests.support.megatron_rl_training import Trained, trained
from tests.support.megatron_rl_tree import build_policy, needs_tree, on_tree_ranks, rl_utils_on_cpu, settings

pytestmark = needs_tree

VOCAB = 160


def train(rank: int, world: int, path: str, packed: bool, iterations: int, updates: int) -> Trained:
    """TP 2 x DP 2. `"truth"` is the gathered path of the same model in fp64."""
    with rl_utils_on_cpu(rank, world, tp=2, args=settings()) as rl_utils:
        model = build_policy(tp=2, vocab=VOCAB)
        if path == "truth":
            model = model.double()
        with compacted() if path == "compact" else nullcontext():
            return trained(rl_utils, model, vocab=VOCAB, iterations=iterations, updates=updates, packed=packed)


def distance(ours: Trained, truth: Trained) -> float:
    difference = ours.parameters.double() - truth.parameters
    return (difference.norm() / truth.parameters.norm()).item()


@pytest.mark.parametrize("packed", [False, True])
def test_ten_updates_end_where_the_gathered_path_ends(packed: bool) -> None:
    every = {path: on_tree_ranks(train, path, packed, 5, 2) for path in ("truth", "gathered", "compact")}
    start = on_tree_ranks(train, "truth", packed, 0, 0)
    for rank, truth in enumerate(every["truth"]):
        gathered, compact = every["gathered"][rank], every["compact"][rank]
        assert len(compact.losses) == 10
        # Packed bins bring their loss mask along; of other batches nobody tells, and every log-prob is computed.
        assert torch.all(compact.uncounted == 0.0) if packed else torch.any(compact.uncounted != 0.0)
        assert torch.any(gathered.uncounted != 0.0)
        assert distance(start[rank], truth) > 1e-3, "nothing was learnt"
        assert distance(compact, truth) <= 1.1 * distance(gathered, truth) + 1e-7
        assert (compact.parameters - gathered.parameters).abs().max() <= 2e-5
        assert compact.losses == pytest.approx(truth.losses, abs=1e-5)


def test_twenty_iterations_stay_together() -> None:
    results = on_tree_ranks(train, "compact", True, 20, 1)
    for result in results:
        assert len(result.losses) == 20
        assert torch.isfinite(torch.tensor(result.losses)).all() and torch.isfinite(result.parameters).all()
        # One update an iteration: current and old policy are the same, and so are their log-probs, to the bit.
        assert torch.all(result.ratios == 1.0)
    for rank in (0, 1):  # the same slice of the model on both data-parallel ranks
        assert torch.equal(results[rank].parameters, results[rank + 2].parameters)


def pipeline(rank: int, world: int, path: str) -> dict[str, Any]:
    """TP 2 x PP 2, bf16: old log-probs, then one training step over two micro-batches, both by Megatron's schedule."""
    args = settings(bf16=True)
    with rl_utils_on_cpu(rank, world, tp=2, pp=2, args=args) as rl_utils:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        random = torch.Generator().manual_seed(9)
        batches = [(torch.randint(1, VOCAB, (1, 24), generator=random), torch.arange(24)[None]) for _ in range(2)]
        model = build_policy(
            tp=2, pp=2, vocab=VOCAB, dtype=torch.bfloat16, batch_p2p_comm=False, deallocate_pipeline_outputs=True
        )
        if path == "refused" and model.module.post_process:  # what only the last stage can see
            model.module.output_layer.register_forward_hook(lambda *_: None)
        schedule = get_forward_backward_func()
        with nullcontext() if path == "gathered" else compacted():
            old = rl_utils.compute_logprobs_batch(
                model=model,
                data_loader=batches,
                forward_backward_func=schedule,
                packing_context=None,
                trajs_batch_size=2,
                seq_length=24,
                logprobs_batch_size=1,
                decoder_seq_length=None,
                dtype=torch.bfloat16,
                pp_group=parallel_state.get_pipeline_model_parallel_group(),
                is_correction=False,
            )

            def forward_step(data_iterator: Any, chunk: Any) -> tuple[Tensor, Any]:
                tokens, positions = next(data_iterator)
                return rl_utils.get_logprobs(chunk, tokens, positions), loss_of

            schedule(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=[model],
                num_microbatches=2,
                seq_length=24,
                micro_batch_size=1,
                forward_only=False,
            )
        sum_gradients(model)
        gradients = torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])
    return {"old": old, "gradients": gradients}


def loss_of(log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = -log_probs.float()[:, ::3].mean()
    return loss, {"loss": loss.detach()}


def test_pipeline_stages_agree_on_one_dtype() -> None:
    every = {path: on_tree_ranks(pipeline, path) for path in ("gathered", "compact", "refused")}
    for gathered, refused in zip(every["gathered"], every["refused"], strict=True):
        assert torch.equal(refused["old"], gathered["old"]) and refused["old"].dtype == torch.bfloat16
        assert torch.equal(refused["gradients"], gathered["gradients"])
    for gathered, compact in zip(every["gathered"], every["compact"], strict=True):
        assert gathered["old"].dtype == torch.bfloat16 and compact["old"].dtype == torch.float32
        assert torch.equal(compact["old"], every["compact"][0]["old"]), "a stage received other log-probs"
        assert torch.allclose(compact["old"], gathered["old"].float(), rtol=2**-7, atol=2**-7)
        cosine = torch.cosine_similarity(compact["gradients"].double(), gathered["gradients"].double(), dim=0)
        assert gathered["gradients"].any() and cosine >= 0.9998
