"""An engine that runs what it is given, and remembers that it did."""

from __future__ import annotations

from typing import Any


class BaseEngine:
    def __init__(self, engine_config: Any = None) -> None:
        self.engine_config = engine_config
        self.forwards = 0

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> str:
        self.forwards += 1
        return "done"

    def train_batch(self, data: Any, loss_function: Any) -> str:
        return self.forward_backward_batch(data, loss_function)

    def infer_batch(self, data: Any, loss_function: Any = None) -> str:
        return self.forward_backward_batch(data, loss_function, forward_only=True)
