"""One of several processes that compile all kernels into one cache folder at the same time.

`python -m tests.support.compile_worker MEETING NUMBER WORLD`, with the folder in TRITON_CACHE_DIR: once all have come
to the meeting, compiles what the engine proves at install, and prints how long that took and what came out.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import torch

from compact_logits.engine.kernels.compare import compare_kernels
from tests.support.cubin import launches_of

if __name__ == "__main__":
    meeting, number, world = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    launches = launches_of(lambda kernels: compare_kernels(kernels, torch.device("cpu")))
    (meeting / number).touch()
    while len(list(meeting.iterdir())) < world:
        time.sleep(0.001)
    begun = time.perf_counter()
    cubins = [launch.compiled(90).cubin for launch in launches]
    seconds = time.perf_counter() - begun
    print(json.dumps({"seconds": seconds, "cubins": [hashlib.sha256(cubin).hexdigest() for cubin in cubins]}))
