"""`python -m ggufpy`: the command line, for where the `ggufpy` script is not on the path."""

from __future__ import annotations

import sys

from ggufpy.cli import main

if __name__ == "__main__":
    sys.exit(main())
