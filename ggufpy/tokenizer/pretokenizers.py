"""What each name in `tokenizer.ggml.pre` means: how text is cut into words before byte-pair merging, and its defaults.

Owns: the names, their patterns and the flags that llama.cpp ties to them. Does not own: merging (`bpe.py`).

The names, patterns and flags are llama.cpp's (llama-vocab.cpp; unicode.cpp has some of the patterns as hand-written
loops, whose results the patterns here give). A pattern in which `\\p{...}` stands, the inside of a character set, is
matched against the shape of the text (`unicode_classes.py`), any other against the text itself. Where there are several
patterns, each cuts the pieces that the one before left, matches and gaps alike, and no match looks beyond its piece.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from ggufpy.tokenizer.unicode_classes import CLASS_SETS, shape

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "splitter"]

_FOREIGN_SPACES = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
_BEYOND_ASCII = re.compile("[^\0-\x7f]+")
_DIGITS = re.compile("[0-9]+")
_THREE_DIGITS = "[0-9]{3}"
_NUMBERS = re.compile(f"[{CLASS_SETS['N']}]+")


def _thirds_with_text(piece: str) -> list[str]:
    """Cut numbers by three from the right; the first part keeps the text before the number (AFMoE, Tiny Aya)."""
    cuts = [end for run in _NUMBERS.finditer(piece) for end in range(run.end(), run.start(), -3)]
    return _cut(piece, sorted(cuts))


def _thirds(piece: str) -> list[str]:
    """Cut before each digit that a multiple of three digits follow, itself counted (SuperBPE)."""
    cuts = [start for run in _DIGITS.finditer(piece) for start in range(run.end() - 3, run.start() - 1, -3)]
    return _cut(piece, sorted(cuts))


def _cut(text: str, places: list[int]) -> list[str]:
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


# A stage of cutting: a pattern, or a function where no pattern does it in linear time.
_Stage = str | Callable[[str], list[str]]

_ENDING = r"'(?:[sStTmMdD]|[rRvV][eE]|[lL][lL])"  # English contractions
_ENDED = f"(?:{_ENDING})?"
_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}]+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_UPPER, _LOWER = r"[\p{Lu}]", r"[\p{Ll}]"
_MARKED_UPPER, _MARKED_LOWER = r"[\p{Lu}\p{M}]", r"[\p{Ll}\p{M}]"
_OTHERS = r" ?[^\s\p{L}\p{N}]+"
_BLANKS = r"\s+(?!\S)|\s+"
_REST = rf"{_OTHERS}[\r\n]*|\s*[\r\n]+|{_BLANKS}"
_REST_WITH_SLASH = rf"{_OTHERS}[\r\n/]*|\s*[\r\n]+|{_BLANKS}"
_NEWLINES = r"[^\n]+|\n+"

_GPT2 = rf"'(?:[stmd]|re|ve|ll)| ?[\p{{L}}]+| ?[\p{{N}}]+|{_OTHERS}|{_BLANKS}"
# The same after each digit was cut off as a word: digits end the text for the alternatives that look beyond spaces.
_DIGITS_THEN_GPT2 = rf"[\p{{N}}]|'(?:[stmd]|re|ve|ll)| ?[\p{{L}}]+|{_OTHERS}|\s+(?![^\s\p{{N}}])|\s+"
_LLAMA3 = rf"{_ENDING}|{_WORD}|[\p{{N}}]{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDING}|{_WORD}|[\p{{N}}]|{_REST}"


def _cased_word(upper: str, lower: str, ended: str = "") -> str:
    """Make a pattern for letters that change from upper to lower case at most once."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}{upper}*{lower}+{ended}|{first}{upper}+{lower}*{ended}"


_CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_AND_HANGUL = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_PUNCTUATED_WORD = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = rf"{_PUNCTUATED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_BLANKS}"
_SPARK = rf"{_PUNCTUATED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_BLANKS}"
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CASCADE = "|".join(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
_DEEPSEEK_LETTERS = (
    r"[A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-"
    r"\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-"
    r"\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    r"\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    r"\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    r"\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    r"\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    r"\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    r"\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    r"\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
_ASIAN_LETTERS = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    r"\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    rf"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_CJK}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Describe one pre-tokenizer."""

    stages: tuple[_Stage, ...]
    ignore_merges: bool = False  # a word that is a token is not taken apart and merged again
    add_bos: bool = False  # when the file does not say
    bos_by_default: bool = True  # False: no bos token unless the file names one
    clean_spaces: bool = True  # decoding drops the spaces before punctuation and contractions
    raw: bool = False  # words are spelled with their own characters, not byte by byte
    escapes_spaces: bool = False  # and spaces as U+2581
    newlines_are_whole: bool = False  # a word of newlines that is a token is not merged
    always_bos: bool = False  # whatever the file says
    lowercase: bool = True  # when the file does not say, and of use to WhitespaceBPE only


_gpt2 = PreTokenizer((_GPT2,))
_digits_then_gpt2 = PreTokenizer((_DIGITS_THEN_GPT2,))
_llama3 = PreTokenizer((_LLAMA3,))
_qwen2 = PreTokenizer((_QWEN2,))


def _exact(*stages: _Stage, **flags: bool) -> PreTokenizer:
    """Describe one whose decoding leaves spaces alone."""
    return PreTokenizer(stages, clean_spaces=False, **flags)


_MEANINGS = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"[\p{N}]+", _THREE_DIGITS)),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code"
    " roberta-bpe mpt olmo jais exaone4": _gpt2,
    "trillion granite-docling": _exact(_GPT2),
    "starcoder refact codeshell exaone minerva-7b mellum2": _digits_then_gpt2,
    "smollm command-r": _exact(_DIGITS_THEN_GPT2),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": replace(
        _llama3, ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe": _llama3,
    "chatglm-bpe": replace(_llama3, bos_by_default=False),
    "glm4 glm5": replace(_llama3, bos_by_default=False, ignore_merges=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2": _exact(_QWEN2),
    "stablelm2 megrez": _qwen2,
    "qwen35": _exact(
        rf"{_ENDING}|{_MARKED_WORD}|[\p{{N}}]| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_BLANKS}"
    ),
    "ufakzeka": _exact(rf"{_WORD}|[\p{{N}}]|{_REST}"),
    "laguna": _exact(_NEWLINES, _QWEN2),
    "minicpm5": PreTokenizer((r"[\p{N}]{1,3}", rf"{_ENDING}|{_WORD}|[\p{{N}}]+|{_REST}"), ignore_merges=True),
    "jais-2": PreTokenizer(
        (rf"{_ENDING}|{_WORD}|[\p{{N}}]{{1,3}}|{_OTHERS}[\r\n]*|\s*[\r\n]+|{_CASCADE}|\s",)
    ),
    "bailingmoe bailingmoe2 llada-moe": _exact(
        rf"{_ENDING}|{_WORD}|[\p{{N}}]|{_OTHERS}[\r\n]*|\s*[\r\n]|{_BLANKS}"
    ),
    "seed-coder": _exact(rf"{_ENDING}|{_WORD}|[\p{{N}}]| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_BLANKS}"),
    "exaone-moe": PreTokenizer(
        (
            rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}][\p{{M}}]*(?: ?[\p{{L}}][\p{{M}}]*)*|[\p{{N}}]"
            rf"|{_OTHERS}[\r\n/]?|\s*[\r\n]|{_BLANKS}",
        )
    ),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, _THREE_DIGITS)),
    "chameleon": _exact(
        "<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"[\p{N}]", r"[\p{P}!-/:-@\[-`{-~]", _GPT2,
        add_bos=True,
    ),
    "deepseek-llm": _exact(
        r"[\r\n]", rf"\s?{_DEEPSEEK_LETTERS}", r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+\Z", _HAN_AND_HANGUL, r"[\p{N}]+",
    ),
    "deepseek-coder": _exact(r"[\r\n]", r"\s?[\p{L}]+", r"\s?[\p{P}]+", _HAN_AND_HANGUL, r"[\p{N}]"),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _exact(r"[\p{N}]{1,3}", _CJK, _DEEPSEEK3),
    "spark2_5": _exact(r"[\p{N}]{1,3}", _CJK, _SPARK, r"[\p{N}]"),
    "afmoe": _exact(_thirds_with_text, _ASIAN_LETTERS, _DEEPSEEK3),
    "youtu": _exact(
        _YOUTU_SCRIPTS, rf"{_MARKED_WORD}{_ENDED}|[\p{{N}}]|{_REST_WITH_SLASH}", ignore_merges=True
    ),
    "tiny_aya cohere2moe": _exact(
        _thirds_with_text, rf"{_MARKED_WORD}{_ENDED}|[\p{{N}}]{{1,3}}|{_REST_WITH_SLASH}"
    ),
    "tekken": _exact(rf"{_cased_word(_UPPER, _LOWER)}|[\p{{N}}]|{_REST_WITH_SLASH}", ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _exact(
        rf"{_cased_word(_UPPER, _LOWER, _ENDED)}|[\p{{N}}]{{1,3}}|{_REST_WITH_SLASH}"
    ),
    "granite-embed-multi-97m": _exact(
        rf"{_cased_word(_MARKED_UPPER, _MARKED_LOWER, _ENDED)}|[\p{{N}}]{{1,3}}|{_REST_WITH_SLASH}", ignore_merges=True
    ),
    "kimi-k2": _exact(
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?(?:(?![\p{{Han}}])[\p{{L}}])+{_ENDED}|[\p{{N}}]{{1,3}}|{_REST}"
    ),
    "superbpe": _exact(r"[\p{N}]+", _thirds),
    "poro-chat": _exact(_BLOOM),
    "bloom gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": _exact(_BLOOM, r"[\p{N}]"),
    "gemma4 granite-embed-multi-311m": PreTokenizer(
        (_NEWLINES,), raw=True, escapes_spaces=True, newlines_are_whole=True, always_bos=True
    ),
    "sarvam-moe": _exact(_NEWLINES, raw=True, escapes_spaces=True),
    "whitespace": PreTokenizer((r"\S+",), raw=True, lowercase=False),
}  # fmt: skip

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for names, pre in _MEANINGS.items() for name in names.split()}


def _compile(pattern: str) -> re.Pattern[str]:
    for name, members in CLASS_SETS.items():
        pattern = pattern.replace(rf"\p{{{name}}}", members)
    return re.compile(pattern, re.ASCII)


@cache
def splitter(stages: tuple[_Stage, ...]) -> Callable[[str], list[str]]:
    """Return the function that cuts a text into words. Joined, the words are the text again."""
    first = stages[0]
    if len(stages) == 1 and isinstance(first, str) and first.endswith(r"|\s+"):  # the pattern matches everything
        return _reshaped(_compile(first).findall)
    on_shape = [not isinstance(stage, str) or r"\p{" in stage for stage in stages]
    cutters = [_compile(f"({stage})").split if isinstance(stage, str) else stage for stage in stages]

    def words(text: str) -> list[str]:
        views = (_FOREIGN_SPACES.sub("\v", text), shape(text))
        pieces = [text]
        for shaped, cut in zip(on_shape, cutters, strict=True):
            pieces = [part for piece in _recut(views[shaped], pieces) for part in cut(piece) if part]
        return _recut(text, pieces)

    return words


def _reshaped(cut: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Make a function that cuts text of a function that cuts shapes."""

    def words(text: str) -> list[str]:
        if text.isascii():
            return cut(text)
        pieces = cut(shape(text))
        foreign = [place for found in _BEYOND_ASCII.finditer(text) for place in range(*found.span())]
        if len(foreign) * 8 > len(pieces):
            return _recut(text, pieces)
        ends = list(accumulate(map(len, pieces)))  # all other pieces are what they look like
        for i in {bisect_right(ends, place) for place in foreign}:
            pieces[i] = text[ends[i] - len(pieces[i]) : ends[i]]
        return pieces

    return words


def _recut(text: str, pieces: list[str]) -> list[str]:
    """Cut `text` into pieces as long as the ones given."""
    return [text[start:end] for start, end in pairwise(accumulate(map(len, pieces), initial=0))]
