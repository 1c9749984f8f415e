"""What other consumers ask of the head: a temperature a row, squared probabilities, a vocabulary without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits import reference
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.errors import InputError, PatchError
from compact_logits.megatron import Request, attach, mark, request_of
from compact_logits.megatron.attach import gpt_model_of
from compact_logits.megatron.postprocess import postprocess_wrapper
from tests.support.gpt_paths import VOCAB, Cut, Micro, micro_batch
from tests.support.marked_gpt import call, marked
from tests.support.ranks import RankPool


def defined(output: Tensor, micro: Micro, vocab: int, temperature: Tensor) -> Tensor:  # (kept, 3)
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    rows = gather_from_tensor_model_parallel_region(output)[0, micro.selection.indices, :vocab]
    log_probs, entropy = reference.log_probs(rows, micro.selection.targets, temperature=temperature)
    return torch.stack([log_probs, entropy, reference.sum_p2(rows, temperature=temperature)], dim=1)


def compared(rank: int, world: int, cut: Cut, vocab: int) -> None:
    with cpu_megatron(rank, world, tp=cut.tp):
        for mask in ("holes", "nothing"):
            micro = micro_batch(rank, cut, mask)
            micro.selection.targets.remainder_(vocab)
            random = torch.Generator().manual_seed(3)
            temperature = 0.5 + torch.rand(micro.selection.kept, generator=random)
            asked: dict[str, Any] = {"entropy": "loss", "temperature": temperature, "chunk_bytes": 3000}
            found, gradients = [], []
            for asks in (False, True):
                model = build_gpt(tp=cut.tp, vocab=VOCAB, layers=1)
                if asks:
                    attach(model)
                    loss_mask, request = marked(micro, sum_p2=True, vocab_size=vocab, **asked)
                    output = call(model, micro, loss_mask)
                    assert output.shape == (1, micro.layout.num_rows, 3) and request.compact
                    scalars = output[0, micro.selection.indices]
                    assert not bool(output.detach()[0, ~kept(micro)].any())
                else:
                    output = call(model, micro)
                    scalars = defined(output, micro, vocab, temperature)
                found.append(scalars.detach())
                (scalars[:, :2] * micro.weights[micro.selection.indices]).sum().add(0 * output.sum()).backward()
                weight = gpt_model_of(model).output_layer.weight
                gradients.append(weight.grad)
            torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)
            first = rank * VOCAB // cut.tp
            assert not bool(gradients[1][max(vocab - first, 0) :].any())


def kept(micro: Micro) -> Tensor:  # (rows,) bool
    return torch.zeros(micro.layout.num_rows, dtype=torch.bool).index_fill_(0, micro.selection.indices, True)


# The border to the padding lies inside the last slice, on the cut of two, or leaves a slice with padding alone.
@pytest.mark.parametrize("vocab", [90, 48, 30])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_head_answers_as_defined(rank_pool: RankPool, tp: int, vocab: int) -> None:
    rank_pool.run(tp, compared, Cut(tp), vocab)


def test_a_target_that_is_padding_is_refused_before_the_model_runs() -> None:
    selection = micro_batch(0, Cut(1), "holes").selection
    highest = int(selection.targets.max())
    Request(selection, vocab_size=highest + 1)
    with pytest.raises(InputError, match=f"targets must be below vocab_size, {highest}, got {highest}: that id is p"):
        Request(selection, vocab_size=highest)


def test_a_mask_of_another_layout_is_not_marked() -> None:
    selection = micro_batch(0, Cut(1), "holes").selection
    loss_mask = torch.ones(1, selection.num_rows + 1)
    with pytest.raises(InputError) as caught:
        mark(loss_mask, Request(selection))
    assert str(caught.value) == (
        "the loss mask has 57 rows and the selection was built for 56; build it from this micro-batch's layout"
    )
    assert request_of(loss_mask) is None


def test_a_seam_of_another_version_is_named() -> None:
    def _postprocess(self: object, hidden_states: object, labels: object, loss_mask: object) -> None: ...

    with pytest.raises(PatchError) as caught:
        postprocess_wrapper(_postprocess)
    assert str(caught.value).endswith(
        "_postprocess has no parameter 'runtime_gather_output': this version of it is not one compact_logits is proven "
        "with; unset COMPACT_LOGITS or use a supported version"
    )
