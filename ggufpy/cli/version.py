"""`ggufpy --version`: the versions of ggufpy and of the ggml it was built with."""

from __future__ import annotations

from argparse import Namespace

import ggufpy
from ggufpy.errors import BuildError

__all__ = ["run"]


def run(args: Namespace) -> int:
    """Print one line; it does not take a compiled part that works."""
    try:
        info = ggufpy.build_info()
    except BuildError as error:
        print(f"ggufpy {ggufpy.__version__} without its compiled part: {error}")
    else:
        print(f"ggufpy {ggufpy.__version__}, ggml {info['ggml_version']} ({info['ggml_commit'][:9]})")
    return 0
