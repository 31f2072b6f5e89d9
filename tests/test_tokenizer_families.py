"""WordPiece, unigram, RWKV, PLaMo-2 and the rarer byte-pair encodings, with small made vocabularies.

That these give llama.cpp's ids on random text is tested, where llama_cpp is at hand, in test_tokenizer_vs_llama_cpp.py.
"""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
from helpers.vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, byte_level, character_map, sentencepiece

from ggufpy.errors import TokenizerError
from ggufpy.tokenizer import Tokenizer, native
from ggufpy.tokenizer.charsmap import CharacterMap
from ggufpy.tokenizer.lattice import Lattice
from ggufpy.tokenizer.unicode_classes import base, category, is_space, lower


def made(model: str, tokens: list[tuple[str, int]], **keys: Any) -> Tokenizer:
    metadata = {
        "model": model,
        "tokens": [text for text, _ in tokens],
        "token_type": [kind for _, kind in tokens],
        **keys,
    }
    return Tokenizer.from_metadata({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


def pieces(tokenizer: Tokenizer, text: str | bytes, **options: bool) -> list[str]:
    return [tokenizer.token_to_piece(id).decode("utf-8", "replace") for id in tokenizer.encode(text, **options)]


# -- characters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("char", "kind"),
    [*zip("aé中5½!。+€\u0301 \u3000\n\x7f\u200b\u0378", "LLLNNPPSSMWWCCC-", strict=True)],
)
def test_the_class_of_a_character(char: str, kind: str) -> None:
    """As in llama.cpp's table; line ends are controls that count as spaces."""
    assert kind == category(char)


def test_lower_case_and_base_letters() -> None:
    """One character each; what is not assigned in llama.cpp's version of Unicode stays."""
    assert "aéißⰰ\u2c5f" == "".join(map(lower, "AÉİßⰀ\u2c2f"))
    assert "aeo" == "".join(map(base, "äéö"))
    assert "\u1100" == base("각")
    assert (lower("\ua7cb"), base("\U00016121")) == ("\ua7cb", "\U00016121")
    assert [char for char in map(chr, range(0x3001)) if is_space(char)] == [
        *"\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029"
        "\u202f\u205f\u3000"
    ]


# -- WordPiece ---------------------------------------------------------------------------------------------------------

BERT = [("[PAD]", CONTROL), ("[UNK]", CONTROL), ("[CLS]", CONTROL), ("[SEP]", CONTROL), ("[MASK]", CONTROL)]
BERT += [(text, NORMAL) for text in ("▁hello", "▁hel", "lo", "▁cafe", "▁Café", "▁!", "▁世", "▁界", "▁a", "b", "c")]
BERT_IDS = {"bos_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello", "▁hello"),
        ("hello!hello", "▁hello ▁! ▁hello"),
        ("hel\u0301LO", "▁hello"),
        ("Café", "▁cafe"),
        ("世界a", "▁世 ▁界 ▁a"),
        ("abcb", "▁a b c b"),
        ("xyz a", "[UNK] ▁a"),
        ("abx", "[UNK]"),
        ("  a\n\u3000 a\xa0", "▁a ▁a"),
        ("a\0\ufffd\u200bb", "▁a b"),
        ("", ""),
    ],
)
def test_wordpiece_takes_the_longest_tokens_of_normalized_words(text: str, expected: str) -> None:
    """Lower case and no accents; punctuation and Chinese are words of their own; begin and end are always added."""
    tokenizer = made("bert", BERT, **BERT_IDS)
    expected_ids = [tokenizer._vocab.id_of[token.encode()] for token in f"[CLS] {expected} [SEP]".split()]
    assert expected_ids == tokenizer.encode(text)
    assert expected_ids[1:-1] == tokenizer.encode(text, add_special=False)


def test_wordpiece_keeps_case_and_accents_on_request() -> None:
    """By the normalizer's keys."""
    cased = made("bert", BERT, **BERT_IDS, **{"normalizer.lowercase": False})
    assert pieces(cased, "Café Hello", add_special=False) == [" Café", "[UNK]"]
    accents = made("bert", BERT, **BERT_IDS, **{"normalizer.strip_accents": False})
    assert pieces(accents, "CAFÉ CAFE", add_special=False) == ["[UNK]", " cafe"]


def test_wordpiece_decodes_with_spaces_cleaned_up() -> None:
    """As llama_detokenize does."""
    tokenizer = made("bert", BERT, **BERT_IDS)
    assert tokenizer.decode(tokenizer.encode("hello ! a", add_special=False)) == " hello! a"
    assert tokenizer.decode(tokenizer.encode("[MASK]a", parse_special=True)) == "[CLS][MASK] a[SEP]"


# -- unigram -----------------------------------------------------------------------------------------------------------

SCORES = {" ": -3.0, "a": -4.0, "b": -4.0, "ab": -9.0, " ab": -8.0, "bab": -5.0, "é": -6.0, "ﬁ": -6.0, "fi": -7.0}


def unigram(scores: dict[str, float] = SCORES, special: tuple[tuple[str, int], ...] = (), **keys: Any) -> Tokenizer:
    keys = {"add_eos_token": False, "unknown_token_id": 0, **keys}
    return Tokenizer.from_metadata(sentencepiece(scores, special, model="t5", with_bytes=False, **keys))


def test_unigram_takes_the_best_sum() -> None:
    """Neither the longest tokens nor the fewest."""
    assert pieces(unigram(), "ab") == ["a", "b"]
    assert pieces(unigram(), "abab") == ["a", "bab"]
    assert pieces(unigram({**SCORES, "ab": -8.0}), "ab") == ["ab"], "of equal sums, the longest last token"


@pytest.mark.parametrize(
    ("prefix", "merged", "expected"),
    [
        (False, False, ["a", " ", " ", "b", " "]),
        (True, False, [" ", "a", " ", " ", "b", " "]),
        (False, True, [" ", "a", " ", "b"]),
        (True, True, [" ", "a", " ", "b"]),
    ],
)
def test_unigram_spaces(prefix: bool, merged: bool, expected: list[str]) -> None:
    """One before the text if the file says so; or if it says that, one before each word and no others."""
    tokenizer = unigram({" ": -1.0, "a": -1.0, "b": -1.0}, add_space_prefix=prefix, remove_extra_whitespaces=merged)
    assert expected == pieces(tokenizer, "a  b ")
    assert pieces(tokenizer, "  ") == ([] if merged else [" ", " "])


def test_unknown_characters_in_a_row_are_one_token() -> None:
    """Also where they are bytes that are no text."""
    assert pieces(unigram(), "xyaz") == ["<unk>", "a", "<unk>"]
    assert pieces(unigram(), b"\xff\xfea") == ["<unk>", "a"]


def test_an_unknown_character_without_a_token_for_it() -> None:
    """llama.cpp has an id of -1 then."""
    with pytest.raises(TokenizerError, match="a character that is no token"):
        unigram(unknown_token_id=99).encode("x")


def test_the_longest_match_is_replaced() -> None:
    """By the file's character map, in the text as it comes, whatever characters the match has."""
    charsmap = list(character_map({"e\u0301": "é", "ﬁ": "fi", "x": "", "b b": "bab", "\u3000": " "}))
    tokenizer = unigram(precompiled_charsmap=charsmap)
    assert pieces(tokenizer, "e\u0301ﬁxa") == ["é", "fi", "a"]
    assert pieces(tokenizer, "ab b\u3000b") == ["a", "bab", " ", "b"]
    assert pieces(tokenizer, "ab a b") == ["a", "b", " ", "a", " ", "b"]
    assert pieces(tokenizer, "e") == ["<unk>"]


def test_nothing_is_replaced_in_what_begins_like_a_user_defined_token() -> None:
    """As in llama.cpp, which looks for the longest beginning of one."""
    charsmap = list(character_map({"a": "b", "<": "b"}))
    tokenizer = unigram(special=(("<ac>", USER_DEFINED),), precompiled_charsmap=charsmap)
    assert pieces(tokenizer, "<ab") == ["<unk>", "a", "b"]
    assert pieces(tokenizer, "<ac>a") == ["<ac>", "b"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\1\0", "expected more than 5 bytes, found 2"),
        (b"\xff\xff\xff\xff" + bytes(8), "expected more than 4294967299 bytes, found 12"),
        (b"\4\0\0\0" + (1 << 20).to_bytes(4, "little") + b"x\0", "a node refers to node"),
        (character_map({"a": "b"})[:-1], "a node refers to a replacement at 0, and there is none"),
    ],
)
def test_a_broken_character_map_is_refused(data: bytes, reason: str) -> None:
    """A10: by name, when it is opened or first used."""
    with pytest.raises(TokenizerError, match=f"precompiled_charsmap: {reason}"):
        unigram(precompiled_charsmap=list(data)).encode("a")


def test_a_match_goes_over_any_characters() -> None:
    """In C as in Python, and what becomes of each character, joined, is the same."""
    keys = {"a b": "1", "b ": "2", "c": "3", " d": "4", "か\u3099": "が" * 9, "かさ": "5", "c\u0301\u0302": "6"}
    charsmap = CharacterMap(character_map(keys), [b"ad", "é!".encode()])
    rng = random.Random(8)
    for _ in range(2000):
        text = "".join(rng.choice("abcd かさ\u3099\u0301\u0302éè!ü\udcff") for _ in range(rng.randrange(12)))
        expected = b"".join(part for _, part in charsmap._replaced(text.encode("utf-8", "surrogateescape")))
        assert expected == charsmap.normalize(text), text
        assert expected == b"".join(filter(None, charsmap.normalized_characters(text))), text


def test_of_equal_sums_the_first_found_stays() -> None:
    """Which is the one whose last part is longest."""
    lattice = Lattice([b"a", b"aa", b"aaa"], [-1.0, -2.0, -3.0], cost=-9.0)
    assert lattice.backwards(b"aaa") == [2]
    assert lattice.backwards(b"aaaa") == [2, 0]
    assert lattice.backwards("éüa".encode()) == [0, -1]


# -- RWKV --------------------------------------------------------------------------------------------------------------


def test_rwkv_takes_the_longest_token_of_bytes() -> None:
    """Tokens are written with escapes; nothing is added to a text."""
    texts = ["<s>", "a", "ab", "abcd", r"\x00", r"\n", r"\\", r"\xe4\xb8", r"\xad", "b", "c", r"\'", "\\x0", "d\\"]
    tokenizer = made("rwkv", [(text, NORMAL) for text in texts], add_bos_token=True, bos_token_id=0)
    assert tokenizer.encode("abcabcd") == [2, 10, 3]
    assert tokenizer.encode("a\0\n\\'") == [1, 4, 5, 6, 11]
    assert tokenizer.encode("中") == [7, 8]
    assert tokenizer.encode(b"\xad") == [8]
    assert tokenizer.decode([7, 8, 5]) == "中\n"
    with pytest.raises(TokenizerError, match="a byte that begins no token"):
        tokenizer.encode("z")


def test_rwkv_writes_the_unknown_token_where_there_is_one() -> None:
    """A byte at a time."""
    tokenizer = made("rwkv", [("<unk>", UNKNOWN), ("a", NORMAL), ("zy", NORMAL)], unknown_token_id=0)
    assert tokenizer.encode("zzya") == [0, 2, 1]


# -- PLaMo-2 -----------------------------------------------------------------------------------------------------------


def plamo(scores: dict[str, float], **keys: Any) -> Tokenizer:
    tokens = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens = [("<|plamo:unk|>", UNKNOWN), *tokens, *((text, NORMAL) for text in scores)]
    return made("plamo2", tokens, scores=[0.0] * 257 + list(scores.values()), **keys)


def test_plamo_takes_the_best_sum_from_the_end() -> None:
    """Of equal ones the cut that is longer where it starts, seen from the end; nothing is added to a text."""
    assert pieces(plamo({"a": -1.0, "b": -1.0, "ab": -1.5, "ba": -1.2}), "aba") == ["a", "ba"]
    equal = plamo({"a": -1.0, "aa": -2.0, "aaa": -3.0}, add_bos_token=True)
    assert pieces(equal, "aaaa") == ["aaa", "a"]


def test_plamo_writes_what_is_no_token_in_bytes() -> None:
    """A byte order mark at the beginning is none of it."""
    tokenizer = plamo({"a": -1.0})
    assert tokenizer.encode("\ufeffaé") == [257, 1 + 0xC3, 1 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("é\ufeffa")) == "é\ufeffa"


def test_plamo_needs_all_bytes() -> None:
    """A10: said when text is asked for."""
    tokenizer = made("plamo2", [("<0x00>", BYTE), ("a", NORMAL)])
    with pytest.raises(TokenizerError, match="no token for the byte 0x01"):
        tokenizer.encode("a")


# -- the rarer byte-pair encodings -------------------------------------------------------------------------------------


def raw(pre: str | None, merges: list[tuple[str, str]], model: str = "gpt2", **keys: Any) -> Tokenizer:
    first = [("<s>", CONTROL), *((f"<0x{byte:02X}>", BYTE) for byte in range(256))]
    singles = sorted({char for pair in merges for part in pair for char in part})
    tokens = [*first, *((text, NORMAL) for text in dict.fromkeys([*singles, *map("".join, merges)]))]
    keys = {"pre": pre, "merges": [" ".join(pair) for pair in merges], "bos_token_id": 0, **keys}
    return made(model, tokens, **{key: value for key, value in keys.items() if value is not None})


def test_gemma4_merges_characters_and_always_begins_with_bos() -> None:
    """Whatever the file says; newlines in a row are one token if there is one, and spaces are U+2581 in the tokens."""
    merges = [("▁", "a"), ("a", "b"), ("b", "▁"), ("\n", "\n"), ("\n\n", "\n\n")]
    tokenizer = raw(None, merges, "gemma4", add_bos_token=False)
    assert pieces(tokenizer, "ab a\n\n\n\nb b é") == ["<s>", "ab", " a", "\n\n\n\n", "b ", "b ", "\ufffd", "\ufffd"]
    assert tokenizer.decode(tokenizer.encode("ab é", add_special=False)) == "ab é"
    assert (tokenizer.add_bos, raw("sarvam-moe", merges).add_bos) == (True, False)


def test_whitespace_drops_spaces_and_may_lower_the_case() -> None:
    """By the normalizer's key, which is off for the pre-tokenizer of that name."""
    merges = [("a", "b"), ("A", "b")]
    assert pieces(raw("whitespace", merges, "whitespace"), " ab\u3000Ab\nab") == ["ab", "Ab", "ab"]
    lowered = raw("whitespace", merges, "whitespace", **{"normalizer.lowercase": True})
    assert pieces(lowered, "Ab AB") == ["ab", "ab"]


def test_hybrid_dna_takes_bases_six_at_a_time() -> None:
    """Filled up with A; what no token has is `<oov>`; without these tokens it is text."""
    extra = ["<dna>", "</dna>", "<oov>", "ACGTAC\ue000", "GTAAAA\ue000", "x\ue000"]
    metadata = byte_level("gpt-2", special=[("<s>", CONTROL), *((text, NORMAL) for text in extra)])
    metadata["tokenizer.ggml.model"] = "hybriddna"
    tokenizer = Tokenizer.from_metadata(metadata)
    text_ids = [7 + byte for byte in b"hi"]
    assert tokenizer.encode("hi<dna>acgtacgt</dna>hi") == [*text_ids, 1, 4, 5, 2, *text_ids]
    assert tokenizer.encode("<dna>ACGTNN") == [1, 3]
    assert tokenizer.encode("<dna></dna>") == [1, 2]
    assert tokenizer.decode([1, 4, 2]) == "<dna>ACGTAC</dna>"
    plain = byte_level("gpt-2") | {"tokenizer.ggml.model": "hybriddna"}
    assert Tokenizer.from_metadata(plain).decode(Tokenizer.from_metadata(plain).encode("<dna>A")) == "<dna>A"


def test_a_file_without_tokens_gives_no_text() -> None:
    """It may still say how many there are."""
    metadata = {"tokenizer.ggml.model": "none", "general.architecture": "x", "x.vocab_size": 7}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert (tokenizer.n_vocab, tokenizer.eog_token_ids) == (7, frozenset())
    with pytest.raises(TokenizerError, match="the file has no tokens"):
        tokenizer.encode("a")


# -- the compiled part -------------------------------------------------------------------------------------------------


def tokenizers() -> dict[str, dict[str, Any]]:
    """Metadata of vocabularies of each family whose search is also in C."""
    rng = random.Random(9)
    parts = list(" abé中!")
    for _ in range(200):
        parts.append(rng.choice(parts) + rng.choice(parts))
    pairs = [(rng.choice(parts[:60]), rng.choice(parts[:60])) for _ in range(300)]
    scores = {part: round(-9 * rng.random(), 1) for part in parts}
    spm = sentencepiece(scores, unknown_token_id=0)
    kinds = dict(zip(spm["tokenizer.ggml.tokens"], spm["tokenizer.ggml.token_type"], strict=True))
    bert = dict.fromkeys(["[UNK]", "[CLS]", "[SEP]", *(rng.choice(["", "▁"]) + part for part in parts)])
    ids = {"bos_token_id": 1, "seperator_token_id": 2, "unknown_token_id": 0}
    named = {
        "bert": {"tokens": list(bert), "token_type": [3] * 3 + [1] * (len(bert) - 3), **ids},
        "rwkv": {"tokens": [repr(part.encode())[2:-1] for part in kinds], "unknown_token_id": 0},
        "plamo2": {"tokens": list(kinds), "token_type": list(kinds.values()), "scores": spm["tokenizer.ggml.scores"]},
    }
    made = {name: {f"tokenizer.ggml.{key}": value for key, value in keys.items()} for name, keys in named.items()}
    for name, metadata in made.items():
        metadata["tokenizer.ggml.model"] = name
    merges = [f"{left} {right}".replace(" ", "▁").replace("▁", " ", 1) for left, right in pairs if " " not in left]
    merges = list(dict.fromkeys(merge for merge in merges if merge.count(" ") == 1))
    raw = {"model": "gpt2", "pre": "sarvam-moe", "tokens": list(kinds), "token_type": list(kinds.values())}
    made["raw"] = {f"tokenizer.ggml.{key}": value for key, value in {**raw, "merges": merges}.items()}
    made["byte-level"] = byte_level("qwen2", pairs)
    made["byte-level, whole words"] = byte_level("llama-bpe", pairs, add_bos_token=False)
    return {**made, "llama": spm, "t5": {**spm, "tokenizer.ggml.model": "t5", "tokenizer.ggml.eos_token_id": 1}}


@pytest.mark.parametrize("name", tokenizers())
def test_a_tokenizer_goes_when_nobody_has_it(name: str) -> None:
    """Without the garbage collector: what it remembers and what C has do not hold it."""
    tokenizer = Tokenizer.from_metadata(tokenizers()[name])
    tokenizer.decode(tokenizer.encode("ab é中 " * 1000))
    gone = weakref.ref(tokenizer), weakref.ref(tokenizer._family())
    gc.disable()
    try:
        del tokenizer
        assert [life() for life in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("name", tokenizers())
def test_c_and_python_give_the_same_ids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search in C has a twin in Python, which is used where ggufpy is not compiled."""
    if not native.available():
        pytest.skip("ggufpy is not compiled")
    rng = random.Random(name)
    texts = ["".join(rng.choice("  aabbé中!\nxü") for _ in range(rng.choice([3, 30, 5000]))) for _ in range(30)]
    texts += ["a" * 5000, "ab" * 3000, "é" * 3000, "x" * 3000, ""]
    in_c = Tokenizer.from_metadata(tokenizers()[name])
    found = [[in_c.encode(text) for text in texts] for _ in range(2)]
    assert found[0] == found[1], "with the words remembered"
    monkeypatch.setattr(native, "available", lambda: False)
    in_python = Tokenizer.from_metadata(tokenizers()[name])
    assert [in_python.encode(text) for text in texts] == found[0]
