"""Compares ggufpy's tokenizer with llama.cpp's on random text: `python tests/fuzz_tokenizer.py FILE … [--count N]`.

Every token's bytes, and for each text the ids (control tokens as text and as tokens), their text, and the streamed text
have to agree. Needs llama-cpp-python. `test_tokenizer_vs_llama_cpp.py` runs a small count.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from helpers.llama_vocabulary import LlamaVocabulary

from ggufpy.tokenizer import Tokenizer

__all__ = ["differences", "random_text"]

SPACES = [" ", "  ", "\n", "\r\n", "\t", "\xa0", "\u3000", "\u2028", "\x85", "   \n ", "\n\n\n", " \r", "\x0b", "\x1c"]
ENDINGS = ["'s", "'S", "'t", "'RE", "'ve", "'ll", "'LL", "'d", "'m", "'x", "'", "'ſ", "can't", "I'M"]
WORDS = [
    "hello",
    " world",
    " The",
    "ABC",
    "fooBar",
    "x",
    " don",
    "IMGIMGABCZ",
    "<sentinel:12>",
    "éa",
    " été",
    "http://a.b",
]
SIGNS = ["🦙", "👩‍👩‍👧", "🇩🇪", "e\u0301", "\u0301\u0300", "ñ", "Việt", "ÀÉ", "\ufeff", "\u200b", "\ufffd", "\0"]
DIGITS = "١٢٣½²Ⅷ०१二三0123456789"
LETTERS = "你好世界こんにちは안녕하세요ไทยภาษาहिन्दी"
PUNCTUATION = "!?.,;:-_=+*/\\|@#$%^&(){}[]<>~`\"'、。！：“…"
BAD_BYTES = [b"\xe6\xad", b"\xff", b"\xf0\x9f\xa6", b"\xc0\x80", b"\xed\xa0\x80", b"\x80", b"\xc3", b"\xe2\x82"]


def random_text(rng: random.Random, specials: list[str], pieces: Callable[[], str]) -> str:
    """Make a text of a few parts of all kinds."""

    def some(letters: str, most: int = 7) -> str:
        return "".join(rng.choice(letters) for _ in range(rng.randint(1, most)))

    def anything() -> str:
        codes = [rng.randrange(32, 127), rng.randrange(0x300), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]
        return chr(rng.choice(codes))

    def special(cut: bool) -> str:
        text = rng.choice(specials or ["<"])
        return text[: rng.randint(0, len(text))] if cut else text

    parts: list[Callable[[], str]] = [
        lambda: "".join(anything() for _ in range(rng.randint(1, 8))),
        lambda: rng.choice(SPACES) * rng.randint(1, 5),
        lambda: str(rng.randrange(10 ** rng.randint(1, 9))),
        lambda: rng.choice(ENDINGS),
        lambda: special(cut=False),
        lambda: special(cut=True),
        lambda: some(DIGITS),
        lambda: some(LETTERS, 9),
        lambda: some(PUNCTUATION),
        lambda: rng.choice(SIGNS),
        lambda: " ",
        pieces,
        lambda: rng.choice(WORDS),
    ]
    return "".join(rng.choice(parts)() for _ in range(rng.randint(1, 12)))


def spoiled(rng: random.Random, text: str) -> bytes:
    """Put bytes into a text that make it bad UTF-8, but none that end llama.cpp (code points beyond U+10FFFF)."""
    data = text.encode()
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        data = data[:at] + rng.choice(BAD_BYTES) + data[at:]
    fatal = any(lead in range(0xF4, 0xF8) and then in range(0x90, 0xC0) for lead, then in pairwise(data))
    return text.encode() if fatal else data


def differences(path: str | Path, count: int, seed: int = 0) -> Iterator[str]:
    """Yield what ggufpy and llama.cpp do not agree about in the vocabulary of a file."""
    ours, theirs, rng = Tokenizer.from_file(path), LlamaVocabulary(path), random.Random(seed)
    facts = {
        "bos": ours.bos_token_id,
        "eos": ours.eos_token_id,
        "size": ours.n_vocab,
        "add_bos": ours.add_bos,
        "add_eos": ours.add_eos,
        "eog": set(ours.eog_token_ids),
    }
    if facts != theirs.facts():
        yield f"facts: {facts}, llama.cpp {theirs.facts()}"
    for id in range(ours.n_vocab):
        if ours.token_to_piece(id) != theirs.piece(id):
            yield f"token {id}: {ours.token_to_piece(id)!r}, llama.cpp {theirs.piece(id)!r}"
    specials = [special.text for special in ours._specials.tokens]
    rng.shuffle(specials)

    def piece() -> str:
        return ours.token_to_piece(rng.randrange(ours.n_vocab)).decode("utf-8", "replace")

    for i in range(count):
        text = random_text(rng, specials[:200], piece)
        yield from _differences_in(spoiled(rng, text) if i % 5 == 0 else text, ours, theirs, rng)
    theirs.close()


def _differences_in(text: str | bytes, ours: Tokenizer, theirs: LlamaVocabulary, rng: random.Random) -> Iterator[str]:
    for add_special, parse_special in ((True, False), (False, True)):
        expected = theirs.encode(text, add_special=add_special, parse_special=parse_special)
        found = ours.encode(text, add_special=add_special, parse_special=parse_special)
        if found != expected:
            yield f"encode({text!r}, {parse_special=}): {found}, llama.cpp {expected}"
        ids = expected + [rng.randrange(ours.n_vocab) for _ in range(rng.choice([0, 0, 5]))]
        for skip in (False, True):
            shown = theirs.decode(ids, skip_special_tokens=skip).decode("utf-8", "replace")
            if ours.decode(ids, skip_special_tokens=skip) != shown:
                yield f"decode({ids}, {skip=}): {ours.decode(ids, skip_special_tokens=skip)!r}, llama.cpp {shown!r}"
        stream = ours.decode_stream()
        streamed = "".join(stream.push(id) for id in ids) + stream.flush()
        if streamed != ours.decode(ids):
            yield f"stream of {ids}: {streamed!r}, at once {ours.decode(ids)!r}"


def main() -> int:
    """Print the differences for each file; exit 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=10_000, help="texts per file")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bad = 0
    for path in args.files:
        found = list(differences(path, args.count, args.seed))
        bad += len(found)
        print(f"{path.name}: {args.count} texts, {len(found)} differences", *found[:5], sep="\n  ")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
