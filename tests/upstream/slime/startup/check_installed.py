"""Whether this very process is what its setting says: run by pytest beside slime's own tests."""

from __future__ import annotations

import os
import sys

from compact_logits.patching import MARKER


def test_slime_s_functions_are_replaced_or_not() -> None:
    loss = sys.modules["slime.backends.megatron_utils.loss"]
    asked = os.environ["COMPACT_LOGITS"] == "1"
    for name in ("get_log_probs_and_entropy", "compute_advantages_and_returns"):
        assert hasattr(getattr(loss, name), MARKER) == asked
