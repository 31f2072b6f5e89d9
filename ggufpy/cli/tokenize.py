"""`ggufpy tokenize`: the tokens of a text, for people and as JSON. Needs neither the compiled part nor NumPy."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from ggufpy.cli.loading import find
from ggufpy.cli.terminal import table, visible
from ggufpy.tokenizer import Token, Tokenizer

__all__ = ["run"]

COLORS = ("\x1b[30;48;5;153m", "\x1b[30;48;5;157m", "\x1b[30;48;5;222m", "\x1b[30;48;5;217m", "\x1b[30;48;5;183m")
RESET = "\x1b[0m"


def run(args: Namespace) -> int:
    """Print the tokens of `args.text`, or of standard input."""
    text = sys.stdin.buffer.read() if args.text in (None, "-") else os.fsencode(args.text)
    tokenizer = Tokenizer.from_file(find(args.file))
    options = {"add_special": args.add_special, "parse_special": args.parse_special}
    if args.ids:
        print(*tokenizer.encode(text, **options))
        return 0
    tokens = tokenizer.tokens_with_offsets(_readable(text), **options)
    if args.json:
        print(json.dumps([_describe(token) for token in tokens], indent=2))
    else:
        print("\n".join(_lines(tokens)))
    return 0


def _readable(text: bytes) -> str | bytes:
    """Return text as str, so that places count characters; as bytes if it is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text


def _describe(token: Token) -> dict[str, Any]:
    """Return a token for JSON; its bytes are also there in hexadecimal, as they may be a part of a character."""
    piece = token.piece.decode("utf-8", "replace")
    return {"id": token.id, "piece": piece, "hex": token.piece.hex(), "start": token.start, "end": token.end}


def _lines(tokens: Sequence[Token]) -> list[str]:
    pieces = [visible(token.piece.decode("utf-8", "backslashreplace"), keep="") for token in tokens]
    head = ("id", "start", "end", "piece")
    rows = [
        (str(token.id), str(token.start), str(token.end), f'"{piece}"')
        for token, piece in zip(tokens, pieces, strict=True)
    ]
    lines = [f"{len(tokens)} token{'' if len(tokens) == 1 else 's'}"]
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        colored = [COLORS[i % len(COLORS)] + piece + RESET for i, piece in enumerate(pieces)]
        lines += ["", "".join(colored)]
    return [*lines, "", table([head, *rows], right=(0, 1, 2))] if tokens else lines
