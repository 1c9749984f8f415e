"""Read by Python when it starts, if this folder is on `PYTHONPATH`: a run of slime's own tests gets slime over the
Megatron it pins, with this package installed where `COMPACT_LOGITS` says so. The processes that these tests start use
no function that is replaced; they get what slime's tests put in Megatron's place, as ever."""

from __future__ import annotations

import sys

if any("pytest" in word for word in sys.orig_argv):
    from tests.upstream.slime.tree import load_actor

    load_actor()
    from megatron.core import parallel_state

    from compact_logits.integrations import slime

    # What slime's tests put in the place of Megatron says so of a process without parallel groups.
    parallel_state.get_context_parallel_world_size = lambda *_, **__: 1
    parallel_state.get_context_parallel_rank = lambda *_, **__: 0
    slime.install()
elif any("multiprocessing" in word for word in sys.orig_argv):
    from tests.upstream.slime.tree import leave_blank

    leave_blank()
