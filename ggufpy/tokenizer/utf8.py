"""Bytes that may not be UTF-8, read the way llama.cpp reads them."""

from __future__ import annotations

import codecs
import re

__all__ = ["decode_lenient", "relaxed", "units"]

_REPLACEMENT = "\ufffd"
# A character by what its first byte promises, checked no further (llama.cpp's unicode_len_utf8).
_UNIT = re.compile(rb"[\xc0-\xdf].?|[\xe0-\xef].{0,2}|[\xf0-\xff].{0,3}|.", re.DOTALL)


def _on_error(error: UnicodeError) -> tuple[str, int]:
    """Take what only has the form of UTF-8 (overlong, a surrogate) as what it spells, any other byte as U+FFFD."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    data, start = error.object, error.start
    lead = data[start]
    n = 2 if lead >> 5 == 0b110 else 3 if lead >> 4 == 0b1110 else 4 if lead >> 3 == 0b11110 else 0
    tail = data[start + 1 : start + n]
    if n and len(tail) == n - 1 and all(byte >> 6 == 0b10 for byte in tail):
        code = lead & (0x7F >> n)
        for byte in tail:
            code = code << 6 | byte & 0x3F
        if code < 0x110000:  # llama.cpp dies of a larger one
            return chr(code), start + n
    return _REPLACEMENT, start + 1


codecs.register_error("ggufpy.lenient", _on_error)


def decode_lenient(data: bytes) -> str:
    """Decode as llama.cpp's unicode_cpts_from_utf8: one U+FFFD for each bad byte. May return lone surrogates."""
    return data.decode("utf-8", "ggufpy.lenient")


def relaxed(text: str) -> str:
    """Read a text with surrogate escapes, which came from bytes that are not UTF-8, as llama.cpp reads these bytes."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return decode_lenient(text.encode("utf-8", "surrogateescape"))
    return text


def units(data: bytes) -> list[bytes]:
    """Cut bytes into characters by what the first byte of each promises, whatever follows."""
    return _UNIT.findall(data)
