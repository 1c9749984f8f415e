"""The GPT model of the demo and of the Megatron tests: one model, in whatever way it is cut over the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits.cli.cpu_attention import ZigzagAttention, packed_positions
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron, packed_seq_params, sum_gradients
from compact_logits.cli.without_cuda import without_cuda
from tests.support.ranks import RankPool

BOUNDS = [0, 16, 24, 32]
VOCAB = 96
WHOLE = {"tp": 1, "cp": 1, "contiguous_cp": False}
CUT = [
    {"tp": 2, "cp": 1, "contiguous_cp": False},
    {"tp": 1, "cp": 2, "contiguous_cp": False},
    {"tp": 1, "cp": 2, "contiguous_cp": True},
    {"tp": 2, "cp": 2, "contiguous_cp": False},
    {"tp": 2, "cp": 2, "contiguous_cp": True},
]


def forward_backward(rank: int, world: int, layout: dict[str, Any], dtype: torch.dtype, tied: bool) -> dict[str, Any]:
    """This rank's logits, the rows of the pack they belong to, and its gradients of a fixed linear function of them."""
    tp, cp, contiguous = layout["tp"], layout["cp"], layout["contiguous_cp"]
    with cpu_megatron(rank, world, tp=tp, cp=cp):
        model = build_gpt(**layout, vocab=VOCAB, dtype=dtype, tied=tied)
        cp_rank, tp_rank = rank // tp, rank % tp
        bounds = torch.tensor(BOUNDS)
        position, segment = packed_positions(bounds, cp_rank=cp_rank, cp_size=cp, contiguous=contiguous)
        rows = bounds[segment] + position
        random = torch.Generator().manual_seed(1)
        tokens = torch.randint(VOCAB, (BOUNDS[-1],), generator=random)
        slope = torch.randn(BOUNDS[-1], VOCAB, generator=random)
        logits = model(tokens[rows][None], rows[None], None, packed_seq_params=packed_seq_params(BOUNDS))[0]
        (logits * slope[rows].chunk(tp, dim=1)[tp_rank]).sum().backward()
        sum_gradients(model)
        gradients = {}
        for name, parameter in model.named_parameters():
            cut = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
            gradients[name] = (cut, parameter.grad)
    return {"rows": rows, "logits": logits.detach(), "gradients": gradients, "tp_rank": tp_rank, "cp_rank": cp_rank}


def several(rank: int, world: int, layouts: list[dict[str, Any]], dtype: torch.dtype, tied: bool) -> list[Any]:
    return [forward_backward(rank, world, layout, dtype, tied) for layout in layouts]


def joined(parts: list[dict[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits (rows, vocab) in the order of the pack and whole gradients, put together from all ranks."""
    logits = torch.empty(BOUNDS[-1], VOCAB)
    for part in parts:
        width = part["logits"].shape[1]
        logits[part["rows"], part["tp_rank"] * width : (part["tp_rank"] + 1) * width] = part["logits"].float()
    first = [part["gradients"] for part in parts if part["cp_rank"] == 0]
    for part in parts:
        for name, (_, gradient) in part["gradients"].items():
            assert torch.equal(gradient, first[part["tp_rank"]][name][1]), f"{name} differs between CP ranks"
    whole = {}
    for name, (cut, gradient) in first[0].items():
        whole[name] = torch.cat([part[name][1] for part in first], dim=cut) if cut >= 0 else gradient
    return logits, whole


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("tied", [False, True])
def test_same_model_however_it_is_cut(rank_pool: RankPool, dtype: torch.dtype, tolerance: float, tied: bool) -> None:
    logits, gradients = joined(rank_pool.run(1, forward_backward, WHOLE, dtype, tied))
    assert logits.std() > 0.5
    for world in (2, 4):
        layouts = [layout for layout in CUT if layout["tp"] * layout["cp"] == world]
        outcomes = zip(*rank_pool.run(world, several, layouts, dtype, tied), strict=True)
        for layout, parts in zip(layouts, outcomes, strict=True):
            cut_logits, cut_gradients = joined(list(parts))
            error = (cut_logits - logits).norm() / logits.norm()
            assert error < tolerance, f"{layout}: logits differ by {error:.2e}"
            assert cut_gradients.keys() == gradients.keys()
            for name, gradient in gradients.items():
                error = (cut_gradients[name].float() - gradient.float()).norm() / gradient.float().norm()
                assert error < tolerance, f"{layout}: the gradient of {name} differs by {error:.2e}"


def test_attention_equals_the_textbook(rank_pool: RankPool) -> None:
    assert rank_pool.run(1, attention_error)[0] < 1e-12


def attention_error(rank: int, world: int) -> float:
    lengths, heads, groups, dim = [5, 3], 4, 2, 8
    query = torch.randn(8, heads, dim, dtype=torch.float64)
    key, value = torch.randn(2, 8, groups, dim, dtype=torch.float64).unbind()
    with cpu_megatron(rank, world, tp=1):
        attention = ZigzagAttention(None, 1, None, "self")
        out = attention(query, key, value, packed_seq_params=packed_seq_params([0, 5, 8]))
    expected, start = [], 0
    for length in lengths:
        for row in range(start, start + length):
            for head in range(heads):
                group = head // (heads // groups)
                scores = key[start : row + 1, group] @ query[row, head] / dim**0.5
                expected.append(scores.softmax(0) @ value[start : row + 1, group])
        start += length
    return (out - torch.stack(expected).view(8, heads * dim)).abs().max().item()


def test_positions_of_both_cuts() -> None:
    bounds = torch.tensor([0, 8, 12])
    zigzag = [packed_positions(bounds, cp_rank=rank, cp_size=2, contiguous=False) for rank in range(2)]
    assert [p.tolist() for p, _ in zigzag] == [[0, 1, 6, 7, 0, 3], [2, 3, 4, 5, 1, 2]]
    assert [s.tolist() for _, s in zigzag] == [[0, 0, 0, 0, 1, 1]] * 2
    contiguous = [packed_positions(bounds, cp_rank=rank, cp_size=2, contiguous=True) for rank in range(2)]
    assert [p.tolist() for p, _ in contiguous] == [[0, 1, 2, 3, 4, 5], [6, 7, 0, 1, 2, 3]]
    assert [s.tolist() for _, s in contiguous] == [[0] * 6, [0, 0, 1, 1, 1, 1]]
    with pytest.raises(ValueError, match="zigzag CP cuts sequence 1 into 4 equal parts, got 3 rows"):
        packed_positions(torch.tensor([0, 8, 11]), cp_rank=0, cp_size=2, contiguous=False)
    with pytest.raises(ValueError, match="contiguous CP cuts the pack into 2 equal parts, got 11 rows; pad it"):
        packed_positions(torch.tensor([0, 8, 11]), cp_rank=0, cp_size=2, contiguous=True)


def test_leaving_restores_what_was_replaced(rank_pool: RankPool) -> None:
    rank_pool.run(1, leave_twice)


def leave_twice(rank: int, world: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    names = ("current_device", "synchronize", "current_stream")
    before = [getattr(torch.cuda, name) for name in names]
    tracker = random._CUDA_RNG_STATE_TRACKER
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on purpose"), cpu_megatron(rank, world, tp=1):
            assert torch.cuda.current_device() == torch.device("cpu")
            assert torch.zeros(2, device="cuda").cuda().to("cuda:0").device == torch.device("cpu")
            assert parallel_state.model_parallel_is_initialized()
            raise RuntimeError("on purpose")
        assert all(getattr(torch.cuda, name) is old for name, old in zip(names, before, strict=True))
        assert random._CUDA_RNG_STATE_TRACKER is tracker
        assert not parallel_state.model_parallel_is_initialized()
        assert dist.is_initialized(), "the group was there before, and is not ours to end"


def test_own_process_group_is_ended(tmp_path: Any) -> None:
    for _ in range(2):
        with cpu_megatron(0, 1, tp=1, init_method=f"file://{tmp_path}/store"):
            assert dist.get_backend() == "gloo"
        assert not dist.is_initialized()


def test_bad_layouts_are_named(rank_pool: RankPool) -> None:
    with pytest.raises(ValueError, match="3 ranks cannot be divided into TP 2"), cpu_megatron(0, 3, tp=2):
        pass
    with pytest.raises(ValueError, match="give init_method"), cpu_megatron(0, 1, tp=1):
        pass
    rank_pool.run(1, enter_as_another)


def enter_as_another(rank: int, world: int) -> None:
    with (
        pytest.raises(ValueError, match="the default process group has rank 0 of 1, rank 1 of 2 was asked for"),
        cpu_megatron(1, 2, tp=1),
    ):
        pass


def test_cut_graph_is_an_error(rank_pool: RankPool) -> None:
    rank_pool.run(1, skip_the_head)


def skip_the_head(rank: int, world: int) -> None:
    with cpu_megatron(rank, world, tp=1):
        model = build_gpt(tp=1)
        for name, parameter in model.named_parameters():
            parameter.grad = None if "output_layer" in name else torch.zeros_like(parameter)
        with pytest.raises(ValueError, match=r"output_layer\.weight has no gradient; connect it to the loss"):
            sum_gradients(model)


def test_without_cuda_leaves_other_devices_alone() -> None:
    with without_cuda():
        assert torch.zeros(1, device="meta").device.type == "meta"
        assert torch.zeros(1).to("meta").device.type == "meta"
