"""Makes small vocabularies as metadata, without a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["byte_level", "character_map", "sentencepiece", "spell"]

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_SPELLING = {**{byte: chr(byte) for byte in _PRINTABLE}, **{byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def spell(text: str | bytes) -> str:
    """Write bytes as byte-level vocabularies do: one printable character each."""
    return "".join(_SPELLING[byte] for byte in (text.encode() if isinstance(text, str) else text))


def byte_level(
    pre: str = "smollm",
    merges: Sequence[tuple[str, str]] = (),
    special: Sequence[tuple[str, int]] = (("<|end|>", CONTROL),),
    **keys: Any,
) -> dict[str, Any]:
    """Make the metadata of a vocabulary: the special tokens, 256 bytes (byte b has id len(special) + b), the merged.

    `merges` are pairs of plain text. `keys` are further or other `tokenizer.ggml` keys; None takes one away.
    """
    merged = list(dict.fromkeys(spell(left + right) for left, right in merges))
    tokens = [text for text, _ in special] + [_SPELLING[byte] for byte in range(256)] + merged
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [kind for _, kind in special] + [NORMAL] * (len(tokens) - len(special)),
        "merges": [f"{spell(left)} {spell(right)}" for left, right in merges],
        "bos_token_id": 0,
        "eos_token_id": 0,
        **keys,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def sentencepiece(
    scores: Mapping[str, float],
    special: Sequence[tuple[str, int]] = (),
    *,
    model: str = "llama",
    with_bytes: bool = True,
    **keys: Any,
) -> dict[str, Any]:
    """Make the metadata of a vocabulary: `<unk>`, `<s>`, `</s>`, the special tokens, 256 bytes, the scored pieces.

    Spaces in `scores` are written as in the file. `keys` are further or other `tokenizer.ggml` keys; None removes one.
    """
    first = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *special]
    byte_tokens = [(f"<0x{byte:02X}>", BYTE) for byte in range(256 if with_bytes else 0)]
    pieces = [(piece.replace(" ", "\u2581"), NORMAL) for piece in scores]
    tokens = [*first, *byte_tokens, *pieces]
    metadata = {
        "model": model,
        "tokens": [text for text, _ in tokens],
        "token_type": [kind for _, kind in tokens],
        "scores": [0.0] * (len(first) + len(byte_tokens)) + list(scores.values()),
        **keys,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def character_map(replacements: Mapping[str, str]) -> bytes:
    """Make a precompiled character map, its trie spread out: 256 nodes for the children of each node."""
    prefixes = {key.encode()[:end] for key in replacements for end in range(1, len(key.encode()) + 1)}
    block_of = {prefix: 256 * (i + 1) for i, prefix in enumerate([b"", *sorted(prefixes)])}
    nodes, texts = [0] * (256 * (len(block_of) + 1)), b""
    nodes[0] = block_of[b""] << 10
    for prefix in prefixes:
        place = block_of[prefix[:-1]] + prefix[-1]
        nodes[place] = (place ^ block_of[prefix]) << 10 | prefix[-1]
    for key, replacement in replacements.items():
        nodes[block_of[key.encode()[:-1]] + key.encode()[-1]] |= 1 << 8
        nodes[block_of[key.encode()]] = 1 << 31 | len(texts)
        texts += replacement.encode() + b"\0"
    trie = b"".join(node.to_bytes(4, "little") for node in nodes)
    return len(trie).to_bytes(4, "little") + trie + texts
