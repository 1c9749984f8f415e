"""A batch's settings beside its tensors."""

from __future__ import annotations

from typing import Any


def get_non_tensor_data(data: dict[str, Any], key: str, default: Any) -> Any:
    return data.get(key, default)
