"""`python -m compact_logits` is `compact-logits`."""

from __future__ import annotations

import sys

from compact_logits.cli import main

if __name__ == "__main__":
    sys.exit(main())
