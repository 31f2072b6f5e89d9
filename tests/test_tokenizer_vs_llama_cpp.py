"""Live comparisons with llama.cpp's tokenizer on random text. They run where llama_cpp can be imported."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    byte_level,
    character_map,
    sentencepiece,
    spell,
)

from ggufpy.gguf import write_gguf
from ggufpy.tokenizer import Tokenizer
from ggufpy.tokenizer.pretokenizers import PRE_TOKENIZERS

pytest.importorskip("llama_cpp")
from fuzz_tokenizer import differences
from helpers.llama_sources import llama_models
from helpers.llama_vocabulary import LlamaVocabulary

VOCABULARIES = [
    "aquila",
    "baichuan",
    "bert-bge",
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "gpt-neox",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "nomic-bert-moe",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
]
BYTE_LEVEL = [name for name, pre in PRE_TOKENIZERS.items() if not pre.raw]

# Characters of every class that a pattern looks at, and of the borders between them.
ALPHABET = [
    *"aAzZsStTrReElLvVdDmMx01239 \n\r\t'.,!?+/<=>^`|~$_-(){}[]\"#\\@:;éÉßǅ中文一龥가힣ㄱㄅ、。！：“…あアｱ€ﷺ𐐀Ａａ½١Ⅷ🦙",
    *"\u0800\u0301\u0903\u3000\xa0\x85\u2028\u0378\ufffd\U0002fa1e\ufadf\u9fff\u200b\x00\x1c\x0b\u0e01",
]


def paired_vocabulary(pre: str, path: Path) -> Path:
    """Write a vocabulary that merges any two bytes of the alphabet in a random order.

    Where a word begins and ends then shows in the ids.
    """
    rng, used = random.Random(0), sorted({byte for char in ALPHABET for byte in char.encode()})
    pairs = [(bytes([left]), bytes([right])) for left in used for right in used]
    rng.shuffle(pairs)
    metadata = byte_level(pre)
    tokens = [*metadata["tokenizer.ggml.tokens"], *(spell(left + right) for left, right in pairs)]
    metadata |= {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [f"{spell(left)} {spell(right)}" for left, right in pairs],
    }
    write_gguf(path, metadata, {})
    return path


@pytest.fixture(params=BYTE_LEVEL)
def paired(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Tokenizer, LlamaVocabulary]]:
    path = paired_vocabulary(request.param, tmp_path / "vocab.gguf")
    theirs = LlamaVocabulary(path)
    yield Tokenizer.from_file(path), theirs
    theirs.close()


def test_every_pre_tokenizer_cuts_as_llama_cpp(paired: tuple[Tokenizer, LlamaVocabulary]) -> None:
    """Words begin and end at the same places, and the defaults of the name are the same."""
    ours, theirs = paired
    facts = theirs.facts()
    assert (ours.bos_token_id, ours.add_bos) == (facts["bos"], facts["add_bos"])
    rng = random.Random(7)
    for _ in range(300):
        text = "".join(rng.choice(ALPHABET) * rng.choice([1, 1, 1, 2, 4]) for _ in range(rng.randint(1, 9)))
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids).decode("utf-8", "replace"), text
    for _ in range(5):  # mostly ASCII, which goes another way
        text = "".join(rng.choice(ALPHABET) if rng.random() < 0.01 else rng.choice("abc  12,.'\n") for _ in range(900))
        assert ours.encode(text) == theirs.encode(text), text


def test_smollm2_agrees_on_random_text(smollm2_path: Path) -> None:
    """Ids, text, streams, every token's bytes, and what ends generation."""
    assert list(differences(smollm2_path, 500)) == []


def test_gemma3_agrees_on_random_text(gemma3_path: Path) -> None:
    """The same."""
    assert list(differences(gemma3_path, 200)) == []


@pytest.mark.parametrize("name", VOCABULARIES)
def test_llama_cpps_vocabularies_agree_on_random_text(name: str) -> None:
    """All that come with it, also those without pairs of text and ids."""
    assert list(differences(llama_models() / f"ggml-vocab-{name}.gguf", 100)) == []


# -- made vocabularies of the other families ---------------------------------------------------------------------------


def random_pieces(rng: random.Random, n: int) -> list[str]:
    """Make tokens of the alphabet: all its characters but a few, and random combinations."""
    single = [char for char in ALPHABET if char not in "\0\ufffd" and rng.random() < 0.9]
    combined = ["".join(rng.choice(ALPHABET[:60]) for _ in range(rng.randint(2, 4))) for _ in range(n)]
    return list(dict.fromkeys([*single, *(piece for piece in combined if "\0" not in piece)]))


def random_merges(rng: random.Random, n: int) -> list[tuple[str, str]]:
    """Make pairs of what earlier pairs made; spaces are U+2581 and take part."""
    parts = [char for char in dict.fromkeys([*ALPHABET, "▁"]) if char not in "\0 "]
    merges = []
    for _ in range(n):
        merges.append((rng.choice(parts), rng.choice(parts)))
        parts.append("".join(merges[-1]))
    return list(dict.fromkeys(merges))


def scored(model: str, **keys: Any) -> dict[str, Any]:
    rng = random.Random(model)
    scores = {piece: round(-10 * rng.random(), rng.choice([0, 3])) for piece in random_pieces(rng, 1500)}
    special = [("<x>", USER_DEFINED), ("<xy", USER_DEFINED), (" a", USER_DEFINED), ("<c>", CONTROL)]
    return sentencepiece(scores, special, model=model, unknown_token_id=0, **keys)


def wordpiece(**keys: Any) -> dict[str, Any]:
    rng = random.Random(1)
    found = [rng.choice(["▁", ""]) + piece for piece in random_pieces(rng, 1500)]
    tokens = list(dict.fromkeys(["[UNK]", "[CLS]", "[SEP]", *(text for text in found if text)]))
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "seperator_token_id": 2}
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3)
    return prefixed({"model": "bert", "tokens": tokens, "token_type": types, **ids, **keys})


def rwkv() -> dict[str, Any]:
    tokens = [f"\\x{byte:02x}" for byte in range(256)]
    tokens += [repr(piece.encode())[2:-1] for piece in random_pieces(random.Random(2), 1500) if len(piece.encode()) > 1]
    return prefixed({"model": "rwkv", "tokens": list(dict.fromkeys(tokens)), "eos_token_id": 0})


def plamo2() -> dict[str, Any]:
    rng = random.Random(3)
    found = random_pieces(rng, 1500)
    tokens = ["<|plamo:unk|>", *(f"<0x{byte:02X}>" for byte in range(256)), *found]
    scores = [0.0] * 257 + [round(-10 * rng.random(), rng.choice([0, 3])) for _ in found]
    types = [UNKNOWN] + [BYTE] * 256 + [NORMAL] * len(found)
    return prefixed({"model": "plamo2", "tokens": tokens, "scores": scores, "token_type": types})


def raw(model: str, pre: str, **keys: Any) -> dict[str, Any]:
    merges = random_merges(random.Random(4), 3000)
    pieces = dict.fromkeys([*(part for pair in merges for part in pair), *map("".join, merges)])
    tokens = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)
    given = {"merges": [" ".join(pair) for pair in merges], "bos_token_id": 0, "eos_token_id": 0}
    return prefixed({"model": model, "pre": pre, "tokens": tokens, "token_type": types, **given, **keys})


def hybrid_dna() -> dict[str, Any]:
    rng = random.Random(5)
    bases = {"".join(rng.choice("ACGT") for _ in range(6)) + "\ue000" for _ in range(3000)}
    special = [(text, NORMAL) for text in ("<s>", "<dna>", "</dna>", "<oov>", *sorted(bases))]
    return byte_level("gpt-2", [("a", "b")], special) | {"tokenizer.ggml.model": "hybriddna"}


def prefixed(keys: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


CHARSMAP = list(
    character_map({"e\u0301": "é", "ﷺ": "abc", "a\u0301\u0903": " ", "\u3000": " ", "\t": " ", "€ €": "<x"})
)
MADE: dict[str, Callable[[], dict[str, Any]]] = {
    "spm": lambda: scored("llama"),
    "spm without prefix": lambda: scored("llama", add_space_prefix=False, add_eos_token=True),
    "unigram": lambda: scored("t5"),
    "unigram with prefix": lambda: scored("t5", add_space_prefix=True, precompiled_charsmap=CHARSMAP),
    "unigram merging spaces": lambda: scored("t5", remove_extra_whitespaces=True, precompiled_charsmap=CHARSMAP),
    "wordpiece": wordpiece,
    "wordpiece cased": lambda: wordpiece(**{"normalizer.lowercase": False}),
    "wordpiece with accents": lambda: wordpiece(**{"normalizer.strip_accents": False}),
    "rwkv": rwkv,
    "plamo2": plamo2,
    "gemma4": lambda: raw("gemma4", "gemma4", add_bos_token=False),
    "granite-embed-multi-311m": lambda: raw("gpt2", "granite-embed-multi-311m"),
    "sarvam-moe": lambda: raw("gpt2", "sarvam-moe"),
    "whitespace": lambda: raw("whitespace", "whitespace"),
    "whitespace, lower case": lambda: raw("whitespace", "whitespace", **{"normalizer.lowercase": True}),
    "whitespace, byte-level": lambda: byte_level("gpt-2", [("a", "b")]) | {"tokenizer.ggml.model": "whitespace"},
    "hybriddna": hybrid_dna,
}


@pytest.mark.parametrize("name", MADE)
def test_made_vocabularies_agree_on_random_text(name: str, tmp_path: Path) -> None:
    """One of each family, with random tokens, and each of its flags."""
    metadata = {"general.architecture": "llama", **MADE[name]()}
    types = {"tokenizer.ggml.precompiled_charsmap": "arr[u8]"}
    write_gguf(tmp_path / "vocab.gguf", metadata, metadata_types={key: types[key] for key in types.keys() & metadata})
    assert list(differences(tmp_path / "vocab.gguf", 300)) == []


DNA = ["<dna>", "</dna>", "ACGT", "acgtac", "CCCCCC", "N", "hello ", "é"]


def test_dna_agrees(tmp_path: Path) -> None:
    """The same, on text with bases in it."""
    write_gguf(tmp_path / "vocab.gguf", {"general.architecture": "llama", **hybrid_dna()}, {})
    ours, theirs = Tokenizer.from_file(tmp_path / "vocab.gguf"), LlamaVocabulary(tmp_path / "vocab.gguf")
    rng = random.Random(6)
    for _ in range(500):
        text = "".join(rng.choice([*DNA, rng.choice("ACGT") * rng.randrange(9)]) for _ in range(rng.randint(1, 9)))
        assert ours.encode(text) == theirs.encode(text), text
    theirs.close()
