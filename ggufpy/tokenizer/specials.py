"""Special tokens in a text: those that are matched as a whole, before anything else.

Owns: finding them, in llama.cpp's order, and the spaces that some of them take away. Does not own: which tokens are of
which kind (`vocab.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ggufpy.tokenizer.vocab import TokenAttr, Vocabulary

__all__ = ["Part", "SpecialToken", "Specials"]

Part = tuple[int, int, "int | None"]
"""A part of a text: where it begins and ends, and the special token that it is, or None."""

_HIDDEN = TokenAttr.CONTROL | TokenAttr.UNKNOWN
_SPECIAL = _HIDDEN | TokenAttr.USER_DEFINED
_C_SPACES = " \t\n\v\f\r"
_PREFIX = 4  # tokens that share so many characters are looked for together
_JINA = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
_PHI3 = ("<unk>", "<s>", "<|endoftext|>")  # whose following spaces stay


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """Describe a token that is matched as a whole. `guarded`: what a chat message says must not be taken for it."""

    id: int
    text: str
    control: bool
    guarded: bool
    lstrip: bool = False
    rstrip: bool = False


class Specials:
    """Find the special tokens of a vocabulary in a text (llama.cpp's tokenizer_st_partition)."""

    def __init__(self, vocab: Vocabulary) -> None:
        self.tokens = _special_tokens(vocab)

    def split(self, text: str, shadow: str, *, parse_special: bool) -> list[Part]:
        """Cut a text into special tokens and what is between them.

        User-defined tokens are always matched, control tokens only with `parse_special`. The guarded ones are looked
        for in `shadow`, which is `text` with characters of the parts that must not contain them replaced.
        """
        parts: list[Part] = [(0, len(text), None)] if text else []
        for special in self._found_in(text):
            if parse_special or not special.control:
                where = shadow if special.guarded else text
                parts = [new for old in parts for new in _cut_out(special, old, text, where)]
        return parts

    def _found_in(self, text: str) -> list[SpecialToken]:
        """Give the special tokens that occur in `text`, in their order. There may be thousands that do not."""
        found = [
            order
            for prefix, orders in self._grouped.items()
            if prefix in text
            for order in orders
            if self.tokens[order].text in text
        ]
        return [self.tokens[order] for order in sorted(found)]

    @cached_property
    def _grouped(self) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for order, special in enumerate(self.tokens):
            groups.setdefault(special.text[:_PREFIX], []).append(order)
        return groups


def _special_tokens(vocab: Vocabulary) -> list[SpecialToken]:
    """List the special tokens, the longest first, as they take precedence."""
    texts = vocab.texts
    found = [
        SpecialToken(
            id,
            texts[id].decode("utf-8", "surrogateescape"),
            control=bool(attr & _HIDDEN),
            # Those that llama.cpp shows as if they were text still open and close messages.
            guarded=bool((attr | vocab.attr_in_file(id)) & _HIDDEN),
        )
        for id, attr in vocab.unusual.items()
        if attr & _SPECIAL
    ]
    return sorted(_with_strips(vocab, found), key=lambda special: -len(texts[special.id]))


def _with_strips(vocab: Vocabulary, specials: list[SpecialToken]) -> list[SpecialToken]:
    """Add which tokens take the spaces before or after them, as llama.cpp knows by the names of models."""
    name, arch, pre = vocab.model_names
    mask = ""
    if any(part in pre for part in _JINA) or any(part in arch for part in ("nomic-bert-moe", "jina-bert-v3")):
        mask = "<mask>"
    elif "phi-3" in name or "phi3" in name:
        return [replace(special, rstrip=special.text not in _PHI3) for special in specials]
    elif "modern-bert" in name:
        mask = "[MASK]"
    return [replace(one, lstrip=True) if mask and one.text == mask else one for one in specials]


def _cut_out(special: SpecialToken, part: Part, text: str, where: str) -> Iterator[Part]:
    """Cut a part of the text at each occurrence of a special token."""
    start, end, id = part
    while id is None and (at := where.find(special.text, start, end)) >= 0:
        left = at
        while special.lstrip and left > start and text[left - 1] in _C_SPACES:
            left -= 1
        if left > start:
            yield start, left, None
        start = at + len(special.text)
        yield at, start, special.id
        while special.rstrip and start < end and text[start] in _C_SPACES:
            start += 1
    if start < end:
        yield start, end, id
