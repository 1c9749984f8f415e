"""Megatron-RL's functions and a policy of its contract, on whatever megatron-core is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["build_stand_in", "stand_in"]

_FILES = {"rl_utils": "stand_in_rl_utils.py", "sequence_packing_utils": "stand_in_packing.py"}


@contextmanager
def stand_in(**args: Any) -> Iterator[ModuleType]:
    """The stand-in `megatron.rl.rl_utils`, in `sys.modules` for the time of the context, and in a module
    `train_rl_stand_in` that has taken `get_logprobs` by name. `args` are those of the run."""
    package = ModuleType("megatron.rl")
    package.__path__ = []
    package.__spec__ = importlib.util.spec_from_loader("megatron.rl", loader=None, is_package=True)
    made = {"megatron.rl": package}
    for name, file in _FILES.items():
        spec = importlib.util.spec_from_file_location(f"megatron.rl.{name}", Path(__file__).with_name(file))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made[f"megatron.rl.{name}"] = module
    rl_utils = made["megatron.rl.rl_utils"]
    vars(rl_utils.run).update(args)
    made["train_rl_stand_in"] = ModuleType("train_rl_stand_in")
    made["train_rl_stand_in"].get_logprobs = rl_utils.get_logprobs  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield rl_utils
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def build_stand_in(
    logits: Tensor,  # (batch, sequence, vocab): what the policy gives, whatever its tokens
    *,
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    **config: Any,
) -> Any:
    """A policy with a real sharded output layer and hidden states of zeros and a one, so that its logits are exact.

    Its `hidden` (sequence / tensor-parallel size, batch, batch * sequence) is a parameter. Needs Megatron's parallel
    state.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    class StandInPolicy(GPTModel):
        def __init__(self) -> None:
            rows, vocab = logits.shape[0] * logits.shape[1], logits.shape[2]
            group = parallel_state.get_tensor_model_parallel_group()
            settings = TransformerConfig(
                num_layers=1,
                hidden_size=rows,
                num_attention_heads=group.size(),
                use_cpu_initialization=True,
                params_dtype=dtype,
                tensor_model_parallel_size=group.size(),
                sequence_parallel=sequence_parallel,
                gradient_accumulation_fusion=False,
                **config,
            )
            MegatronModule.__init__(self, settings)
            self.post_process, self.share_embeddings_and_output_weights = True, False
            pipeline = parallel_state.get_pipeline_model_parallel_group()
            self.pg_collection = SimpleNamespace(cp=None, pp=pipeline, tp=group)
            self.output_layer = ColumnParallelLinear(
                rows, vocab, config=settings, init_method=torch.nn.init.zeros_, bias=False, gather_output=False
            )
            columns = logits.flatten(0, 1).t().chunk(group.size())[group.rank()]
            hidden = torch.eye(rows).view(logits.shape[0], logits.shape[1], rows).transpose(0, 1)
            if sequence_parallel:
                hidden = hidden.chunk(group.size())[group.rank()]
            with torch.no_grad():
                self.output_layer.weight.copy_(columns)
            self.hidden = torch.nn.Parameter(hidden.to(dtype).contiguous())

        def forward(
            self,
            input_ids: Tensor,
            position_ids: Any,
            attention_mask: Any,
            packed_seq_params: Any = None,
            runtime_gather_output: bool | None = None,
            *,
            fp32_output: bool = False,
            output_processor: Any = None,
            output_processor_context: Any = None,
        ) -> Tensor:
            return self._postprocess(self.hidden, runtime_gather_output, output_processor, output_processor_context)

        def _postprocess(
            self,
            hidden_states: Tensor,
            runtime_gather_output: bool | None = None,
            output_processor: Any = None,
            output_processor_context: Any = None,
        ) -> Tensor:
            if not self.post_process:
                return hidden_states
            if output_processor is not None:
                return output_processor(
                    hidden_states=hidden_states,
                    output_layer=self.output_layer,
                    output_weight=None,
                    runtime_gather_output=runtime_gather_output,
                    context=output_processor_context,
                    scale_logits=lambda each: each,
                )
            given, _ = self.output_layer(hidden_states, runtime_gather_output=runtime_gather_output)
            return given.transpose(0, 1).contiguous()

    return StandInPolicy()
