"""Makes tests/data/templates/*.json: what `transformers` renders with every chat template that comes with llama.cpp.

    python tests/make_template_texts.py FOLDER_OF_TEMPLATES

Run where transformers is installed; nothing else needs it. A file holds, for each of conversations.json, the text, or
the error that the template raised: its own words under "refusal", the kind of any other under "failure".
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils import chat_template_utils

DATA = Path(__file__).parent / "data" / "templates"
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>", "unk_token": "<UNK>"}


class Noon(datetime):
    """Stops the clock: some templates tell the date."""

    @classmethod
    def now(cls, tz: Any = None) -> Noon:
        return cls(2026, 2, 3, 12, 0, 0)


def render(template: str, chat: dict[str, Any]) -> str | dict[str, str]:
    """Return the text, or the error."""
    chat = dict(chat)
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            conversations=[chat.pop("messages")], chat_template=template, **TOKENS, **chat
        )
    except jinja2.TemplateError as error:
        kind = type(error)
        return {"refusal": str(error)} if kind is jinja2.TemplateError else {"failure": kind.__name__}
    except Exception as error:
        return {"failure": type(error).__name__}
    return texts[0]


def main() -> None:
    """Write a file for each template."""
    chat_template_utils.datetime = Noon
    conversations = json.loads((DATA / "conversations.json").read_text(encoding="utf-8"))
    for path in sorted(Path(sys.argv[1]).glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        found = {name: render(template, chat) for name, chat in conversations.items()}
        text = json.dumps(found, indent=1, ensure_ascii=False)
        (DATA / f"{path.stem}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
