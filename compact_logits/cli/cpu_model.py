"""A real megatron-core GPTModel on CPU over gloo, with tensor, sequence, context and pipeline parallelism."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from compact_logits.cli.cpu_attention import ContiguousAttention, ZigzagAttention
from compact_logits.cli.without_cuda import without_cuda
from compact_logits.errors import ConfigError, InputError

__all__ = ["build_gpt", "cpu_megatron", "packed_seq_params", "sum_gradients"]


@contextmanager
def cpu_megatron(
    rank: int, world: int, *, tp: int, cp: int = 1, pp: int = 1, vpp: int | None = None, init_method: str | None = None
) -> Iterator[None]:
    """Megatron's parallel state over gloo for the time of the context; afterwards the process is as it was.

    Takes the default process group that is there, else makes one by `init_method` ("tcp://127.0.0.1:<port>",
    "file://<path>") and ends it too. So one process may run one layout after another. Raises `ConfigError` if neither
    is there, or if the group does not fit.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    if world % (tp * cp * pp):
        raise ConfigError(f"{world} ranks cannot be divided into TP {tp} x CP {cp} x PP {pp}; use a multiple")
    with ExitStack() as stack:
        stack.enter_context(without_cuda())
        if not dist.is_initialized():
            if init_method is None:
                raise ConfigError("there is no default process group: give init_method, or start one over gloo before")
            dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
            stack.callback(dist.destroy_process_group)
        if (dist.get_rank(), dist.get_world_size()) != (rank, world):
            here = f"rank {dist.get_rank()} of {dist.get_world_size()}"
            raise ConfigError(f"the default process group has {here}, rank {rank} of {world} was asked for")
        # Megatron forgets its dozens of groups but leaves them running, each with threads that keep a core busy.
        stack.callback(_end_groups_but, set(_groups()))
        stack.callback(parallel_state.destroy_model_parallel)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
        )
        # The ordinary tracker forks the CUDA generators. This kind leaves every generator alone.
        tracker = {name: value for name, value in vars(random).items() if name.startswith("_CUDA_RNG_STATE_TRACKER")}
        stack.callback(vars(random).update, tracker)
        random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        yield


def _groups() -> list[dist.ProcessGroup]:
    """Every process group that this rank has a part in."""
    return list(dist.distributed_c10d._world.pg_map)


def _end_groups_but(kept: set[dist.ProcessGroup]) -> None:
    for group in _groups():
        if group not in kept:
            dist.destroy_process_group(group)
    gc.collect()  # models refer to their groups, and to themselves


def build_gpt(
    *,
    tp: int,
    cp: int = 1,
    pp: int = 1,
    vocab: int = 96,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    seed: int = 0,
    contiguous_cp: bool = False,
    max_length: int = 512,
    vp_stage: int | None = None,
    **config: Any,
) -> torch.nn.Module:
    """The `GPTModel` of this rank's pipeline stage, inside a `Float16Module` when `dtype` is bfloat16.

    Same seed, same global weights, whatever TP and CP are (with PP the layers draw in another order). `config` goes
    to `TransformerConfig`; sequence parallelism is on where TP is more than 1. Head and embedding are scaled up, so
    that log-probs differ from a uniform distribution's and errors show.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
        "pipeline_model_parallel_size": pp,
        "sequence_parallel": tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "normalization": "RMSNorm",
        "use_cpu_initialization": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
    }
    transformer_config = TransformerConfig(**{**settings, **config})
    torch.manual_seed(seed)
    layers_spec = _layer_spec(transformer_config, contiguous_cp, vp_stage)
    model = GPTModel(
        transformer_config,
        layers_spec,
        vocab_size=vocab,
        max_sequence_length=max_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        parallel_output=True,
        position_embedding_type="none",
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=_mtp_spec(transformer_config, layers_spec, vp_stage),
        vp_stage=vp_stage,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "output_layer" in name or "word_embeddings" in name:
                parameter.mul_(20)
    return Float16Module(transformer_config, model) if dtype == torch.bfloat16 else model


def packed_seq_params(cu_seqlens: list[int]) -> Any:
    """Megatron's description of packed sequences, by their bounds over all CP ranks: `[0, first length, ..., all]`."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor(cu_seqlens, dtype=torch.int32)
    longest = int((bounds[1:] - bounds[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def sum_gradients(model: torch.nn.Module) -> None:
    """Complete each `grad`, in place: that of a norm over TP (its rows are sharded by SP), then all of them over CP.

    One all-reduce for each of the two and each parameter that is not frozen. Raises `InputError` for one that has no
    `grad`: the graph that led to it was cut, and the other ranks would wait for it for ever.
    """
    from megatron.core import parallel_state

    tp_group = parallel_state.get_tensor_model_parallel_group()
    cp_group = parallel_state.get_context_parallel_group()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if parameter.grad is None:
            raise InputError(f"{name} has no gradient; connect it to the loss on every rank, also where no row is kept")
    for parameter in trained.values():
        if tp_group.size() > 1 and getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=tp_group)
        if cp_group.size() > 1:
            dist.all_reduce(parameter.grad, group=cp_group)


class _RMSNorm(torch.nn.Module):
    """Megatron's own torch norm refuses sequence parallelism, since its weight would not be marked for the sum."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(
        self,
        hidden: Tensor,  # (rows, batch, hidden)
    ) -> Tensor:  # (rows, batch, hidden)
        return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


def _layer_spec(config: Any, contiguous_cp: bool, vp_stage: int | None) -> Any:
    """Megatron's own layers, with norm and core attention replaced by those that need neither TE nor a GPU."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.input_layernorm = _RMSNorm
    spec.submodules.pre_mlp_layernorm = _RMSNorm
    spec.submodules.self_attention.submodules.core_attention = ContiguousAttention if contiguous_cp else ZigzagAttention
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=_RMSNorm)


def _mtp_spec(config: Any, layers_spec: Any, vp_stage: int | None) -> Any:
    """Heads of multi-token prediction where `mtp_num_layers` asks for them, made of the same parts."""
    if not config.mtp_num_layers:
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    spec = get_gpt_mtp_block_spec(config, layers_spec, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in spec.layer_specs:
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = _RMSNorm
    return spec
