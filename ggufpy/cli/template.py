"""`ggufpy template`: the prompt that a chat template makes of messages. Needs neither the compiled part nor NumPy."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import Any

from ggufpy.cli.loading import find, read_text
from ggufpy.cli.parser import UsageError
from ggufpy.cli.terminal import tolerant, visible
from ggufpy.tokenizer import Tokenizer

__all__ = ["run"]


def run(args: Namespace) -> int:
    """Print what the template makes of the messages, or the template."""
    if args.name and args.chat_template:
        raise UsageError("--name and --chat-template: expected one of the two")
    tokenizer = Tokenizer.from_file(find(args.file))
    template = _template(tokenizer, args)
    if args.source:
        _write(tokenizer.choose_chat_template(template))
        return 0
    chat = _chat(args.messages)
    messages = chat.pop("messages")
    options = {"add_generation_prompt": args.generation_prompt, **chat, "chat_template": template}
    text = tokenizer.apply_chat_template(messages, **{**options, "tokenize": False})
    if args.json:
        ids = tokenizer.apply_chat_template(messages, **{**options, "tokenize": True})
        print(json.dumps({"text": text, "ids": ids}, indent=2))
    else:
        _write(str(text))
    return 0


def _template(tokenizer: Tokenizer, args: Namespace) -> str | None:
    """Return the template that the options name; None leaves the choice to the file."""
    if args.chat_template:
        return read_text(args.chat_template)
    if args.name and args.name not in tokenizer.chat_templates:
        names = ", ".join(tokenizer.chat_templates) or "none"
        raise UsageError(f"--name: the file has no template {args.name!r}; it has {names}")
    return args.name  # type: ignore[no-any-return]


def _chat(path: str | None) -> dict[str, Any]:
    """Read messages and what comes with them."""
    text = read_text(path)
    try:
        chat = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"MESSAGES: expected JSON, and line {error.lineno} is not: {error.msg}") from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of too many digits
        raise UsageError(f"MESSAGES: {error}") from None
    chat = {"messages": chat} if isinstance(chat, list) else chat
    if not isinstance(chat, dict) or not isinstance(chat.get("messages"), list):
        raise UsageError("MESSAGES: expected a list of messages, or an object with messages in it")
    return chat


def _write(text: str) -> None:
    """Write the text and one newline; a terminal gets it harmless."""
    stream = tolerant(sys.stdout)
    stream.write((visible(text, keep="\n\t") if stream.isatty() else text) + "\n")
