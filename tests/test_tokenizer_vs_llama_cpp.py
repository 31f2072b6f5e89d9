"""Live comparisons with llama.cpp's tokenizer on random text. They run where llama_cpp can be imported."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.vocabularies import byte_level, spell

from ggufpy.gguf import write_gguf
from ggufpy.tokenizer import Tokenizer
from ggufpy.tokenizer.pretokenizers import PRE_TOKENIZERS

pytest.importorskip("llama_cpp")
from fuzz_tokenizer import differences
from helpers.llama_vocabulary import LlamaVocabulary

# llama.cpp's source tree, for the vocabularies in its models folder: no such file is committed here.
SOURCE = os.environ.get("GGUFPY_LLAMA_CPP_SOURCE")
VOCABULARIES = [
    "aquila",
    "baichuan",
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gpt-2",
    "gpt-neox",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
]
SUPPORTED = [name for name, pre in PRE_TOKENIZERS.items() if pre.stages]

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


@pytest.fixture(params=SUPPORTED)
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


def test_smollm2_agrees_on_random_text(smollm2_path: Path) -> None:
    """Ids, text, streams, every token's bytes, and what ends generation."""
    assert list(differences(smollm2_path, 500)) == []


def test_gemma3_agrees_on_random_text(gemma3_path: Path) -> None:
    """The same."""
    assert list(differences(gemma3_path, 200)) == []


@pytest.mark.skipif(not SOURCE, reason="GGUFPY_LLAMA_CPP_SOURCE does not name llama.cpp's source tree")
@pytest.mark.parametrize("name", VOCABULARIES)
def test_llama_cpps_vocabularies(name: str) -> None:
    """B8: the pairs of text and ids beside them, where there are any, and random text."""
    path = Path(str(SOURCE)) / "models" / f"ggml-vocab-{name}.gguf"
    texts, ids = path.with_suffix(".gguf.inp"), path.with_suffix(".gguf.out")
    if texts.exists():
        ours = Tokenizer.from_file(path)
        for text, line in zip(_lines(texts), ids.read_text().split("\n"), strict=True):
            assert ours.encode(text, add_special=False) == [int(id) for id in line.split()], text
    assert list(differences(path, 200)) == []


def _lines(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\n__ggml_vocab_test__\n")
