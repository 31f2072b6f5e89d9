"""What each name in `tokenizer.ggml.pre` means: how text is cut into words before byte-pair merging, and its defaults.

Owns: the names, their patterns and the flags that llama.cpp ties to them. Does not own: merging (`bpe.py`).

The names, patterns and flags are llama.cpp's (llama-vocab.cpp; unicode.cpp has some of the patterns as hand-written
loops, whose results the patterns here give). A pattern is matched against the shape of the text (`unicode_classes.py`),
where `\\p{L}` and its like stand for the inside of a character set. Patterns given one after another each cut the
pieces that the one before left, matches and gaps alike; a match never looks beyond its piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from ggufpy.tokenizer.unicode_classes import CLASS_SETS, shape

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "splitter"]

_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"'(?:[stmd]|re|ve|ll)| ?[\p{{L}}]+| ?[\p{{N}}]+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
# The same, after each digit was cut off as a word: digits end the text for the alternatives that look at spaces.
_DIGITS_THEN_GPT2 = (
    r"[\p{N}]|'(?:[stmd]|re|ve|ll)| ?[\p{L}]+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"  # "a  1" is a, two spaces, 1
)
_CONTRACTIONS = r"'(?:[sStTmMdD]|[rRvV][eE]|[lL][lL])"
_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{L}]+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|[\p{{N}}]{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|[\p{{N}}]|{_REST}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Describe one pre-tokenizer. `patterns` is empty while ggufpy knows the name but cannot cut text its way yet."""

    patterns: tuple[str, ...] = ()
    ignore_merges: bool = False  # a word that is a token is not taken apart and merged again
    add_bos: bool = False  # when the file does not say
    bos_by_default: bool = True  # False: no bos token unless the file names one
    clean_spaces: bool = True  # decoding drops the spaces before punctuation and contractions


_gpt2 = PreTokenizer((_GPT2,))
_smollm = PreTokenizer((_DIGITS_THEN_GPT2,))
_llama3 = PreTokenizer((_LLAMA3,))
_qwen2 = PreTokenizer((_QWEN2,))


def _uncleaned(pre: PreTokenizer) -> PreTokenizer:
    return replace(pre, clean_spaces=False)


_MEANINGS = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"[\p{N}]+", r"[0-9]{3}")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": replace(
        _llama3, ignore_merges=True, add_bos=True
    ),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code"
    " roberta-bpe mpt olmo jais exaone4": _gpt2,
    "trillion granite-docling": _uncleaned(_gpt2),
    "smollm command-r": _uncleaned(_smollm),
    "starcoder refact codeshell exaone minerva-7b mellum2": _smollm,
    "qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2": _uncleaned(_qwen2),
    "stablelm2 megrez": _qwen2,
    "dbrx smaug-bpe": _llama3,
    "chatglm-bpe": replace(_llama3, bos_by_default=False),
    "glm4 glm5": replace(_llama3, bos_by_default=False, ignore_merges=True),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for names, pre in _MEANINGS.items() for name in names.split()}


def _compile(pattern: str) -> re.Pattern[str]:
    for name, members in CLASS_SETS.items():
        pattern = pattern.replace(rf"\p{{{name}}}", members)
    return re.compile(pattern, re.ASCII)


@cache
def splitter(patterns: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return the function that cuts a text into words. Joined, the words are the text again."""
    first = _compile(patterns[0]).findall if len(patterns) == 1 else None
    stages = [_compile(f"({pattern})").split for pattern in patterns]

    def pieces(text: str) -> list[str]:
        if first is not None:  # one pattern matches everything
            return first(text)
        found = [text]
        for split in stages:
            found = [part for piece in found for part in split(piece) if part]
        return found

    def words(text: str) -> list[str]:
        if text.isascii():
            return pieces(text)
        cut, end = [], 0
        for piece in pieces(shape(text)):
            start, end = end, end + len(piece)
            cut.append(text[start:end])
        return cut

    return words
