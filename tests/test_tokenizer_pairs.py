"""The pairs of text and token ids that come with llama.cpp's vocabularies (case B8). They need no llama.cpp."""

from __future__ import annotations

import pytest
from helpers.llama_sources import llama_models

from ggufpy.tokenizer import Tokenizer

VOCABULARIES = [
    "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm",
    "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
]  # fmt: skip


@pytest.mark.parametrize("name", VOCABULARIES)
def test_llama_cpps_pairs(name: str) -> None:
    """Every text has the ids beside it, and where they give the text back in llama.cpp, they do here."""
    path = llama_models() / f"ggml-vocab-{name}.gguf"
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().split("\n")
    assert lines[len(texts) :] in ([], [""])
    tokenizer = Tokenizer.from_file(path)
    for text, line in zip(texts, lines[: len(texts)], strict=True):
        assert [int(id) for id in line.split()] == tokenizer.encode(text, add_special=False), text


def test_spot_checks() -> None:
    """B8: leading spaces, digits, line ends, and spaces that special tokens take away."""
    llama = Tokenizer.from_file(llama_models() / "ggml-vocab-llama-bpe.gguf")
    cases = {" Việt": [101798], "3333": [8765, 18], "a\r\n\r\n\r\nb": [64, 8731, 65]}
    assert cases == {text: llama.encode(text, add_special=False) for text in cases}
    phi = Tokenizer.from_file(llama_models() / "ggml-vocab-phi-3.gguf")
    text = "<|user|>\nhi<|end|>\n"
    assert phi.encode(text, add_special=False, parse_special=True) == [32010, 7251, 32007]
