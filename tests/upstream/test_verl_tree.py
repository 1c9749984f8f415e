"""The verl integration against verl's own functions, from its source tree: the same numbers, its own tests pass."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import run_ranks
from tests.support.topk_case import topk_case
from tests.support.verl_process import installed, nested
from tests.support.verl_tree import needs_verl, settings_of, start_verl

pytestmark = needs_verl

KL_TEST = Path(os.environ.get("VERL_ROOT", ""), "tests", "utils", "test_special_megatron_kl_loss_tp.py")


def worst_relative_errors(ours: dict[str, Tensor], verls: dict[str, Tensor]) -> dict[str, float]:
    """Of each output, by its largest value: a token's advantage is a difference, and may be as small as it likes."""
    return {
        name: ((ours[name].double() - value.double()).abs().max() / value.double().abs().max()).item()
        for name, value in verls.items()
    }


def units_in_the_last_place(ours: Tensor, verls: Tensor) -> float:
    """The largest difference, in the spacing of the dtype's numbers at the largest gradient."""
    assert ours.dtype == verls.dtype
    spacing = 2.0 ** math.floor(math.log2(verls.abs().max().item())) * torch.finfo(verls.dtype).eps
    return (ours.float() - verls.float()).abs().max().item() / spacing


def compare(
    rank: int,
    world: int,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    all_settings: list[dict[str, Any]],
) -> list[tuple[dict[str, float], float]]:
    _, megatron, config, _ = start_verl()
    batch, tokens, vocab, k = sizes
    case = topk_case(batch * tokens, vocab=vocab, k=k, dtype=dtype)
    teacher = [nested(list(part.view(batch, tokens, k))) for part in (case.log_probs, case.ids.to(torch.int32))]

    def run(settings: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
        logits = case.logits.detach().view(1, batch * tokens, vocab).clone().requires_grad_()
        out = megatron.compute_forward_kl_topk(logits, *teacher, settings_of(config, **settings), "thd")
        out["distillation_losses"].sum().backward()
        return out, logits.grad

    compared = []
    for settings in all_settings:
        verls, d_verl = run(settings)
        with installed():
            ours, d_ours = run(settings)
        assert ours["overlap_count"].dtype == verls["overlap_count"].dtype
        assert verls["overlap_count"].float().mean() > 0.5
        compared.append((worst_relative_errors(ours, verls), units_in_the_last_place(d_ours, d_verl)))
    return compared


def judge(errors: dict[str, float], units: float, limit: float) -> None:
    assert errors.keys() == {
        "distillation_losses",
        "student_mass",
        "teacher_mass",
        "overlap_count",
        "overlap_token_advantage",
    }
    assert errors.pop("overlap_count") == 0.0
    assert max(errors.values()) <= limit, errors
    assert units <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verls_own_numbers_chunk_by_chunk(dtype: torch.dtype) -> None:
    settings = [
        {"log_prob_min_clamp": clamp, "use_chunked_topk": True, "chunked_topk_chunk_size": rows_at_once}
        for clamp in (None, -10.0)
        for rows_at_once in (7, 64, 4096)
    ]
    (compared,) = run_ranks(1, compare, dtype, (2, 96, 2048, 32), settings)
    assert len(compared) == 6
    for errors, units in compared:
        judge(errors, units, 8.2e-7)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 8.2e-7), (torch.bfloat16, 2e-6)])
def test_verls_own_numbers_at_a_large_vocabulary(dtype: torch.dtype, limit: float) -> None:
    settings = [{"log_prob_min_clamp": clamp} for clamp in (None, -10.0)]
    (compared,) = run_ranks(1, compare, dtype, (4, 128, 248_320, 128), settings, timeout=280)
    for errors, units in compared:
        judge(errors, units, limit)


def verls_own_test(rank: int, world: int) -> int:
    """Its `TestVocabParallelKLDivergence`, on a CPU, with the function it tests replaced."""
    _, megatron, _, _ = start_verl(tensor_parallel=world)
    spec = importlib.util.spec_from_file_location("verl_kl_test", KL_TEST)
    assert spec is not None and spec.loader is not None
    own: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    test = own.TestVocabParallelKLDivergence.__new__(own.TestVocabParallelKLDivergence)
    test.local_rank, test.world_size, test.device = rank, world, torch.device("cpu")
    test.group = own.mpu.get_tensor_model_parallel_group()
    test.cleanup = lambda: None

    def replaced(*args: Any) -> None:
        raise AssertionError("verl's own KL ran")

    calls: list[str] = []
    with installed():
        megatron._VocabParallelKLDivergence.forward = staticmethod(replaced)
        own.compute_forward_kl_topk_vp = counting(megatron.compute_forward_kl_topk, calls)
        for case in range(own.MAX_TEST_CASES):
            test.initialize(case)
            test.verify_correctness(iterations=2)
    return len(calls)


def counting(function: Any, calls: list[str]) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["data_format"])
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.skipif(not KL_TEST.is_file(), reason=f"no {KL_TEST}, which is in verl's repository and not in its wheel")
@pytest.mark.parametrize("world", [2, 4])
def test_verls_own_kl_test_passes_with_us_in_its_place(world: int) -> None:
    # Four cases, twice, in both data formats.
    assert run_ranks(world, verls_own_test, timeout=240) == [16] * world
