"""Where in a text its tokens come from, for each family of vocabularies."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from helpers.vocabularies import CONTROL, NORMAL, USER_DEFINED, byte_level, character_map, sentencepiece

from ggufpy.tokenizer import Token, Tokenizer
from ggufpy.tokenizer.offsets import places

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def real(request: pytest.FixtureRequest) -> tuple[Tokenizer, list[str]]:
    tokenizer = Tokenizer.from_file(request.getfixturevalue(f"{request.param}_path"))
    rows = json.loads((DATA / f"{request.param}_token_ids.json").read_text())
    return tokenizer, [row["text"] for row in rows if "text" in row]


def shown(text: str, tokens: list[Token]) -> list[str]:
    return [text[token.start : token.end] for token in tokens]


def test_the_tokens_of_real_vocabularies_cover_the_text(real: tuple[Tokenizer, list[str]]) -> None:
    """Each has its bytes in its place; those of one character share that. Ids and bytes are those of `encode`."""
    tokenizer, texts = real
    for text in texts:
        for special in (False, True):
            tokens = tokenizer.tokens_with_offsets(text, add_special=False, parse_special=special)
            ids = tokenizer.encode(text, add_special=False, parse_special=special)
            assert ids == [token.id for token in tokens]
            end, covered = 0, b""
            for token, place in zip(tokens, shown(text, tokens), strict=True):
                assert end in (token.start, token.end, token.start + 1), "no gaps; a character may be shared"
                assert token.piece in place.replace("▁", " ").encode() or token.piece in place.encode(), text
                end, covered = token.end, covered + token.piece
            if covered.decode("utf-8", "replace").replace("▁", " ") == text.replace("▁", " "):
                assert end == len(text)


def test_places_in_bytes_for_bytes(real: tuple[Tokenizer, list[str]]) -> None:
    """Also where they are not UTF-8."""
    tokenizer, _ = real
    for data in ("a 🦙é\nb".encode(), b"ok \xff\xfe a", "日本語".encode(), b""):
        tokens = tokenizer.tokens_with_offsets(data, add_special=False)
        assert [token.id for token in tokens] == tokenizer.encode(data, add_special=False)
        assert all(0 <= token.start <= token.end <= len(data) for token in tokens)
        assert not tokens or (tokens[0].start, tokens[-1].end) == (0, len(data))


def test_added_tokens_have_an_empty_place() -> None:
    """At the ends of the text; special tokens in it have the place of their name, less the spaces they take."""
    special = [("<s>", CONTROL), ("<|end|>", CONTROL)]
    metadata = byte_level("gpt-2", special=special, add_bos_token=True, add_eos_token=True, eos_token_id=1)
    tokens = Tokenizer.from_metadata(metadata).tokens_with_offsets("a<|end|>", parse_special=True)
    assert [(0, 0, 0), (2 + ord("a"), 0, 1), (1, 1, 8), (1, 8, 8)] == [(one.id, one.start, one.end) for one in tokens]
    phi = Tokenizer.from_metadata(metadata | {"general.name": "phi-3"})
    tokens = phi.tokens_with_offsets("<|end|>  a", parse_special=True, add_special=False)
    assert [(0, 7), (9, 10)] == [(one.start, one.end) for one in tokens]


def test_a_space_that_is_put_before_a_text_is_not_in_it() -> None:
    """Nor before the text after a special token."""
    tokenizer = Tokenizer.from_metadata(sentencepiece({" ": -1, " a": -2, "b": -3}, [("<x>", USER_DEFINED)]))
    text = "a b<x>b"
    tokens = tokenizer.tokens_with_offsets(text, add_special=False)
    assert ["a", " ", "b", "<x>", "", "b"] == shown(text, tokens)


def wordpiece() -> Tokenizer:
    names = ["[UNK]", "[CLS]", "[SEP]", "▁hello", "▁!", "▁a", "b", "▁世", "▁ca", "fe"]
    keys: dict[str, Any] = {"model": "bert", "tokens": names, "token_type": [CONTROL] * 3 + [NORMAL] * 7}
    keys |= {"bos_token_id": 1, "seperator_token_id": 2, "unknown_token_id": 0}
    return Tokenizer.from_metadata({f"tokenizer.ggml.{key}": value for key, value in keys.items()})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello  hello!", ["Hello", "hello", "!"]),
        ("xyz ab", ["xyz", "a", "b"]),
        ("a\u200bb 世a", ["a", "b", "世", "a"]),
        ("CAFÉ xx yy!", ["CA", "FÉ", "xx", "yy", "!"]),
        ("中国 a", ["中", "国", "a"]),
        (" ", []),
    ],
)
def test_wordpiece(text: str, expected: list[str]) -> None:
    """In the text as it was, whatever case and accents; an unknown word is one token."""
    assert expected == shown(text, wordpiece().tokens_with_offsets(text, add_special=False))


def test_unigram() -> None:
    """What a character map replaces has the place of the characters that it replaces."""
    charsmap = list(character_map({"e\u0301": "é", "ﬁ": "fi", "\u3000": " "}))
    scores = {" ": -1.0, "é": -1.0, "f": -1.0, "i": -1.0, " a": -1.5}
    keys = {"add_space_prefix": True, "remove_extra_whitespaces": True, "add_eos_token": False, "unknown_token_id": 0}
    metadata = sentencepiece(scores, model="t5", with_bytes=False, precompiled_charsmap=charsmap, **keys)
    text = "e\u0301ﬁ\u3000 axy a"
    tokens = Tokenizer.from_metadata(metadata).tokens_with_offsets(text)
    assert ["", "e\u0301", "ﬁ", "ﬁ", " a", "xy", " a"] == shown(text, tokens)


def test_a_family_without_text_of_its_own() -> None:
    """Bytes that are no token, and vanish, leave a gap."""
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"][1 + ord("x")] = "xx"
    text = "axxb"
    assert ["a", "b"] == shown(text, Tokenizer.from_metadata(metadata).tokens_with_offsets(text))


def test_places_never_fail() -> None:
    """Whatever is looked for in whatever, places lie in the text and in order."""
    rng = random.Random(2)
    parts = [b"a", b"b", b" ", b" a", b"\xc3", b"\xa9", "é".encode(), b"", b"  "]
    for _ in range(3000):
        seen = [rng.choice(parts) for _ in range(rng.randrange(8))]
        pieces = [rng.choice([*parts, None]) for _ in range(rng.randrange(8))]
        found = places(seen, pieces)
        assert len(pieces) == len(found)
        assert all(0 <= start <= end <= len(seen) for start, end in found)


def test_a_batch_is_texts_one_by_one() -> None:
    """With the same options."""
    tokenizer = Tokenizer.from_metadata(byte_level(add_bos_token=True))
    texts = ["a", b"b", "", "<|end|>"]
    assert [tokenizer.encode(text) for text in texts] == tokenizer.encode_batch(texts)
    assert [[98], [99], [], [0]] == tokenizer.encode_batch(texts, add_special=False, parse_special=True)


def test_fill_in_the_middle_tokens() -> None:
    """By key or by name; nothing unless all three are known."""
    names = ["<x>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    special = [(name, CONTROL) for name in names]
    assert (1, 2, 3) == Tokenizer.from_metadata(byte_level(special=special)).fim_token_ids
    assert (0, 2, 3) == Tokenizer.from_metadata(byte_level(special=special, fim_pre_token_id=0)).fim_token_ids
    assert Tokenizer.from_metadata(byte_level(special=special[:3])).fim_token_ids is None
