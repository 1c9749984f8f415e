"""Vocabulary and hidden size of well-known models, each with the public file that says so."""

from __future__ import annotations

from dataclasses import dataclass

from compact_logits.errors import ConfigError
from compact_logits.host_values import describe

__all__ = ["PRESETS", "Preset", "find_preset"]

_SLIME = "THUDM/slime 624b824a8 scripts/models"


@dataclass(frozen=True)
class Preset:
    """`vocab` is the model's own, which Megatron pads to a multiple of `vocab_multiple` times the tensor-parallel size.
    `tied`: the head's weight is the embedding's."""

    name: str
    vocab: int
    hidden: int
    tied: bool
    source: str
    vocab_multiple: int = 128


# slime compares hidden size and tying with the model's published config.json at every start.
PRESETS = (
    Preset("qwen2.5-0.5b", 151936, 896, True, f"{_SLIME}/qwen2.5-0.5B.sh"),
    Preset("qwen2.5-7b", 152064, 3584, False, f"{_SLIME}/qwen2.5-7B.sh"),
    Preset("qwen2.5-32b", 152064, 5120, False, f"{_SLIME}/qwen2.5-32B.sh"),
    Preset("qwen3-0.6b", 151936, 1024, True, f"{_SLIME}/qwen3-0.6B.sh"),
    Preset("qwen3-4b", 151936, 2560, True, f"{_SLIME}/qwen3-4B.sh"),
    Preset("qwen3-8b", 151936, 4096, False, f"{_SLIME}/qwen3-8B.sh"),
    Preset("qwen3-14b", 151936, 5120, False, f"{_SLIME}/qwen3-14B.sh"),
    Preset("qwen3-32b", 151936, 5120, False, f"{_SLIME}/qwen3-32B.sh"),
    Preset("qwen3-30b-a3b", 151936, 2048, False, f"{_SLIME}/qwen3-30B-A3B.sh"),
    Preset("qwen3-235b-a22b", 151936, 4096, False, f"{_SLIME}/qwen3-235B-A22B.sh"),
    Preset("qwen3-next-80b-a3b", 151936, 2048, False, f"{_SLIME}/qwen3-next-80B-A3B.sh"),
    Preset("qwen3.5-0.8b", 248320, 1024, True, f"{_SLIME}/qwen3.5-0.8B.sh"),
    Preset("qwen3.5-4b", 248320, 2560, True, f"{_SLIME}/qwen3.5-4B.sh"),
    Preset("qwen3.5-9b", 248320, 4096, False, f"{_SLIME}/qwen3.5-9B.sh"),
    Preset("qwen3.5-27b", 248320, 5120, False, f"{_SLIME}/qwen3.5-27B.sh"),
    Preset("qwen3.5-35b-a3b", 248320, 2048, False, f"{_SLIME}/qwen3.5-35B-A3B.sh"),
    Preset("glm4-9b", 151552, 4096, False, f"{_SLIME}/glm4-9B.sh"),
    Preset("glm4-32b", 151552, 6144, False, f"{_SLIME}/glm4-32B.sh"),
    Preset("glm4.5-106b-a12b", 151552, 4096, False, f"{_SLIME}/glm4.5-106B-A12B.sh"),
    Preset("glm4.5-355b-a32b", 151552, 5120, False, f"{_SLIME}/glm4.5-355B-A32B.sh"),
    Preset("glm4.7-30b-a3b", 154880, 2048, False, f"{_SLIME}/glm4.7-30B-A3B.sh", vocab_multiple=64),
    Preset("glm5-744b-a40b", 154880, 6144, False, f"{_SLIME}/glm5-744B-A40B.sh", vocab_multiple=16),
    Preset("deepseek-v3", 129280, 7168, False, f"{_SLIME}/deepseek-v3.sh"),
    Preset("kimi-k2", 163840, 7168, False, f"{_SLIME}/kimi-k2.sh"),
    Preset("minimax-m2", 200064, 3072, False, f"{_SLIME}/minimax-m2.sh"),
    Preset("moonlight-16b-a3b", 163840, 2048, False, f"{_SLIME}/moonlight.sh"),
    Preset("llama3.1-8b", 128256, 4096, False, f"{_SLIME}/llama3.1-8B-Instruct.sh"),
    Preset("llama3.2-3b", 128256, 3072, True, f"{_SLIME}/llama3.2-3B-Instruct.sh"),
)


def find_preset(name: str) -> Preset:
    """The preset of that name, in upper or lower case. Raises `ConfigError` that lists what there is."""
    for preset in PRESETS:
        if preset.name == name.strip().lower():
            return preset
    raise ConfigError(f"--preset must be one of {', '.join(preset.name for preset in PRESETS)}, got {describe(name)}")
