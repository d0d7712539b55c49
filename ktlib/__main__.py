"""`python -m ktlib` is the command `ktlib`."""

from __future__ import annotations

import sys

from ktlib.cli import main

if __name__ == "__main__":
    sys.exit(main())
