"""Every chat template that comes with llama.cpp renders as with transformers, whose texts are committed."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from helpers.llama_sources import llama_models

from ggufpy import chat
from ggufpy.errors import TemplateError

DATA = Path(__file__).parent / "data" / "templates"
CONVERSATIONS = json.loads((DATA / "conversations.json").read_text(encoding="utf-8"))
NAMES = sorted(path.stem for path in DATA.glob("*.json") if path.stem != "conversations")
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>", "unk_token": "<UNK>"}  # as in make_template_texts.py


CONTROL = re.compile(r"<\|[\w ]+\|>|</?(?:think|tool_call|s|BOS|EOS)>|\[/?[A-Z_]+\]")  # what may be control tokens


class Noon(datetime):
    """Stops the clock: some templates tell the date."""

    @classmethod
    def now(cls, tz: Any = None) -> Noon:
        return cls(2026, 2, 3, 12, 0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_template_renders_as_with_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """System, user, assistant and tool turns, reasoning, content in parts; refusals with the template's own words."""
    monkeypatch.setattr(chat, "datetime", Noon)
    template = (llama_models() / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    expected = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    assert expected.keys() == CONVERSATIONS.keys()
    for case, conversation in CONVERSATIONS.items():
        wanted, messages = expected[case], conversation["messages"]
        arguments = {"tools": None, **{key: value for key, value in conversation.items() if key != "messages"}}
        if isinstance(wanted, dict):
            with pytest.raises(TemplateError) as caught:
                chat.render(template, messages, TOKENS, **arguments)
            assert wanted.get("refusal", str(caught.value)) == str(caught.value), case
            assert wanted.get("failure", "") in str(caught.value), case
        else:
            assert wanted == chat.render(template, messages, TOKENS, **arguments), case
            guarded = sorted(set(CONTROL.findall(template)))
            text, shadow = chat.render_guarded(template, messages, guarded, TOKENS, **arguments)
            assert wanted == text, f"{case}, guarded"
            assert len(text) == len(shadow), case


def test_every_template_has_its_texts() -> None:
    """None is forgotten."""
    assert NAMES == sorted(path.stem for path in (llama_models() / "templates").glob("*.jinja"))
