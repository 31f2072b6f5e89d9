"""What is in an answer beside its text: reasoning and calls of tools, as models write them.

Owns: taking both out of a finished text. Does not own: templates, which turn them into text (`chat.py`), or generation.
Nothing is guessed at and nothing is lost: a call that is not well-formed stays in the text, and `raw` is all of it.
The control tokens that mark calls have to be in the text, as `Tokenizer.decode` leaves them by default.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "ToolCall", "hermes_calls", "llama3_calls", "mistral_calls", "parse_answer", "split_reasoning"]

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_LLAMA3_NAMED = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_LLAMA3_CODE = re.compile(r"\s*([\w.]+)\.call\((.*)\)\s*\Z", re.DOTALL)
_SEPARATORS = re.compile(r"[;,\s]*")
_MAX_CODE = 2000  # characters; Python's own parser is not made for hostile input
_LLAMA3_ENDS = ("<|eom_id|>", "<|eot_id|>")
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL_TAG = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]([\w-]+))?(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Describe a call: `raw` is its part of the answer, `id` is there only where the model gives one."""

    name: str
    arguments: dict[str, Any]
    raw: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold an answer taken apart. `content` is what is left for people, `reasoning` is None where there is none."""

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    raw: str


def parse_answer(text: str, *, begin: str = "<think>", end: str = "</think>") -> Answer:
    """Take reasoning and calls, in whichever of the three ways they are written, out of an answer."""
    reasoning, content = split_reasoning(text, begin=begin, end=end)
    for take in (hermes_calls, mistral_calls, llama3_calls):
        left, calls = take(content)
        if calls:
            return Answer(left.strip(), reasoning, calls, text)
    return Answer(content, reasoning, (), text)


def split_reasoning(text: str, *, begin: str = "<think>", end: str = "</think>") -> tuple[str | None, str]:
    """Return the reasoning and what follows it, without the line ends between.

    Some templates write `begin` themselves, so an answer may have `end` only. Reasoning that was cut off has no end,
    and nothing follows it.
    """
    before, opened, after = text.partition(begin)
    if opened and before.strip():
        return None, text  # it is spoken of, not begun
    body = after if opened else text
    reasoning, closed, rest = body.partition(end)
    if not opened and not closed:
        return None, text
    return reasoning.strip(), rest.lstrip()


def hermes_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Take `<tool_call>{"name": …, "arguments": …}</tool_call>` out of a text (Hermes, Qwen). The last may be open."""
    calls: list[ToolCall] = []

    def take(found: re.Match[str]) -> str:
        call = _call(_json(found[1]), found[0])
        if call is None:
            return found[0]
        calls.append(call)
        return ""

    return _HERMES.sub(take, text), tuple(calls)


def llama3_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Take the calls of Llama 3 out of a text.

    They are `{"name": …, "parameters": …}`, alone or after `<|python_tag|>`, several separated by semicolons;
    `<function=NAME>{…}</function>`; or `<|python_tag|>NAME.call(key=value)`.
    """
    content, tag, code = text.partition(_PYTHON_TAG)
    body = code if tag else text
    for mark in _LLAMA3_ENDS:
        body = body.removesuffix(mark)
    if calls := _json_calls(body):
        return content if tag else "", calls
    if tag and (found := _LLAMA3_CODE.match(body)) and (arguments := _keywords(found[2])) is not None:
        return content, (ToolCall(found[1], arguments, body),)
    named: list[ToolCall] = []

    def take(found: re.Match[str]) -> str:
        arguments = _json(found[2])
        if not isinstance(arguments, dict):
            return found[0]
        named.append(ToolCall(found[1], arguments, found[0]))
        return ""

    left = _LLAMA3_NAMED.sub(take, text)
    return (left, tuple(named)) if named else (text, ())


def mistral_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Take what follows `[TOOL_CALLS]` out of a text: a JSON list of calls, or NAME[ARGS]{…} for each (Mistral)."""
    content, *parts = text.split(_MISTRAL_TAG)
    calls: list[ToolCall] = []
    for part in parts:
        found = _mistral_list(part) or _mistral_named(part)
        if not found:
            return text, ()
        calls += found
    return content, tuple(calls)


def _mistral_list(part: str) -> tuple[ToolCall, ...]:
    part = part.removesuffix("</s>").strip()
    return _json_calls(part[1:-1]) if part[:1] == "[" and part[-1:] == "]" else ()


def _mistral_named(part: str) -> list[ToolCall]:
    part, calls, at = part.removesuffix("</s>").rstrip(), [], 0
    while at < len(part):
        name = _MISTRAL_NAMED.match(part, at)
        parsed = _json_at(part, name.end()) if name else None
        if name is None or parsed is None or not isinstance(parsed[0], dict):
            return []
        calls.append(ToolCall(name[1], parsed[0], part[at : parsed[1]], name[2]))
        at = parsed[1]
    return calls


def _json_calls(text: str) -> tuple[ToolCall, ...]:
    """Read a text that is nothing but calls, with separators between."""
    calls, at = [], 0
    while (at := _after(_SEPARATORS, text, at)) < len(text):
        parsed = _json_at(text, at)
        call = _call(parsed[0], text[at : parsed[1]]) if parsed else None
        if parsed is None or call is None:
            return ()
        calls.append(call)
        at = parsed[1]
    return tuple(calls)


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _call(value: Any, raw: str) -> ToolCall | None:
    """Read a call from JSON; arguments may be JSON in a string."""
    if not isinstance(value, dict):
        return None
    value = value.get("function") if isinstance(value.get("function"), dict) else value
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    arguments = _json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    id = value.get("id")
    return ToolCall(name, arguments, raw, id if isinstance(id, str) else None)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_at(text: str, at: int) -> tuple[Any, int] | None:
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _keywords(code: str) -> dict[str, Any] | None:
    """Read the keyword arguments of a call in Python, all of them literals."""
    try:
        call = ast.parse(f"f({code})", mode="eval").body if len(code) <= _MAX_CODE else None
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
