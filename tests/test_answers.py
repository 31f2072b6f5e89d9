"""Reasoning and calls of tools in answers, as Qwen, Hermes, Llama 3 and Mistral write them."""

from __future__ import annotations

import random

import pytest

from ggufpy.answers import (
    Answer,
    ToolCall,
    hermes_calls,
    llama3_calls,
    mistral_calls,
    parse_answer,
    split_reasoning,
)

TIDE = {"port": "Brest", "day": 3}


def plain(calls: tuple[ToolCall, ...]) -> list[tuple[str, dict[str, object], str | None]]:
    return [(call.name, call.arguments, call.id) for call in calls]


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        ("<think>\nTwo.\n</think>\n\nFour.", "Two.", "Four."),
        ("Two.\n</think>\n\nFour.", "Two.", "Four."),
        ("\n<think></think>Four.", "", "Four."),
        ("<think>cut off", "cut off", ""),
        ("Four.", None, "Four."),
        ("Write <think> first.", None, "Write <think> first."),
        ("Write <think>, then </think>.", None, "Write <think>, then </think>."),
        ("", None, ""),
    ],
)
def test_reasoning(text: str, reasoning: str | None, rest: str) -> None:
    """It may be opened by the template, cut off, or only spoken of."""
    assert (reasoning, rest) == split_reasoning(text)


def test_other_marks() -> None:
    """Models have their own."""
    assert split_reasoning("[THINK]a[/THINK]b", begin="[THINK]", end="[/THINK]") == ("a", "b")


def test_hermes_calls() -> None:
    """Several, in the middle of text, the last one cut off by a stop; names and arguments as they are."""
    first = '<tool_call>\n{"name": "tide", "arguments": {"port": "Brest", "day": 3}}\n</tool_call>'
    second = '<tool_call>{"name": "now", "arguments": {}}'
    content, calls = hermes_calls(f"Let me see.\n{first}\n{second}")
    assert content.strip() == "Let me see."
    assert plain(calls) == [("tide", TIDE, None), ("now", {}, None)]
    assert [call.raw for call in calls] == [first, second]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "tide", "arguments": {</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "tide", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        "<tool_call></tool_call>",
        "no call",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    """Nothing is repaired, and nothing lost."""
    assert hermes_calls(text) == (text, ())
    assert parse_answer(text) == Answer(text, None, (), text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "tide", "parameters": {"port": "Brest", "day": 3}}', [("tide", TIDE, None)]),
        ('<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 1}}<|eom_id|>',
         [("a", {}, None), ("b", {"x": 1}, None)]),
        ('{"type": "function", "name": "a", "parameters": {"x": null}}<|eot_id|>', [("a", {"x": None}, None)]),
        ('<function=tide>{"port": "Brest", "day": 3}</function>', [("tide", TIDE, None)]),
        ('<|python_tag|>brave_search.call(query="tide at Brest", n=2)<|eom_id|>',
         [("brave_search", {"query": "tide at Brest", "n": 2}, None)]),
    ],
)  # fmt: skip
def test_llama_3_calls(text: str, expected: list[tuple[str, dict[str, object], str | None]]) -> None:
    """In each of the ways that its templates describe."""
    content, calls = llama3_calls(text)
    assert (content, plain(calls)) == ("", expected)
    assert plain(parse_answer(text).tool_calls) == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "a"} is JSON',
        '{"port": "Brest"}',
        "<|python_tag|>print(1)",
        "<|python_tag|>a.call(1)",
        "<|python_tag|>a.call(x=open('f'))",
        "<|python_tag|>a.call(**x)",
        "<function=a>nothing</function>",
    ],
)
def test_code_and_json_that_are_no_calls(text: str) -> None:
    """They stay, and nothing in them is run."""
    assert llama3_calls(text) == (text, ())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[TOOL_CALLS][{"name": "tide", "arguments": {"port": "Brest", "day": 3}, "id": "call00001"}]</s>',
         [("tide", TIDE, "call00001")]),
        ('[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": "{\\"x\\": 1}"}]',
         [("a", {}, None), ("b", {"x": 1}, None)]),
        ('[TOOL_CALLS]tide[ARGS]{"port": "Brest", "day": 3}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}</s>',
         [("tide", TIDE, None), ("now", {}, "abc")]),
        ('[TOOL_CALLS]a{"x": 1}b{"y": 2}', [("a", {"x": 1}, None), ("b", {"y": 2}, None)]),
    ],
)  # fmt: skip
def test_mistral_calls(text: str, expected: list[tuple[str, dict[str, object], str | None]]) -> None:
    """As a list, or one after the other."""
    content, calls = mistral_calls(f"Wait. {text}")
    assert (content, plain(calls)) == ("Wait. ", expected)


@pytest.mark.parametrize(
    "text", ["[TOOL_CALLS]", '[TOOL_CALLS][{"name": 1}]', "[TOOL_CALLS]a[ARGS]{", "[TOOL_CALLS]{}"]
)
def test_broken_mistral_calls_stay_text(text: str) -> None:
    """All of it."""
    assert mistral_calls(text) == (text, ())


def test_an_answer_has_all_parts() -> None:
    """And the text that they were taken from."""
    call = '<tool_call>\n{"name": "tide", "arguments": {"port": "Brest", "day": 3}}\n</tool_call>'
    text = f"<think>\nLook it up.\n</think>\n\nOne moment.\n{call}"
    expected = Answer("One moment.", "Look it up.", (ToolCall("tide", TIDE, call),), text)
    assert expected == parse_answer(text)


def test_any_text_can_be_parsed() -> None:
    """Without an error, and with the text kept."""
    rng = random.Random(1)
    parts = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "a", "arguments": {}}', "{", "}", "[", "a"]
    parts += [
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "a.call(",
        "x=1)",
        "<function=f>",
        "</function>",
        ";",
        " ",
        "\n",
    ]
    for _ in range(5000):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(9)))
        assert text == parse_answer(text).raw
    for text in ("[" * 100_000, "<tool_call>" + "[" * 100_000, "<|python_tag|>a.call(x=" + "(" * 5000):
        assert parse_answer(text).tool_calls == ()
