"""Stand-ins for a session and a vocabulary, with which a test says what is generated."""

from __future__ import annotations

import codecs
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import numpy as np

from ggufpy import engine
from ggufpy.generate import Completion, CompletionChunk
from ggufpy.sampling import SamplingParams

EOS = 256


class Pieces:
    """A vocabulary of byte strings: ids 0 to 255 are the bytes, more are given; the end token would print as `</s>`."""

    def __init__(self, pieces: dict[int, bytes] | None = None, eog: Sequence[int] = (EOS,), n_vocab: int = 257) -> None:
        self.pieces = {**{i: bytes([i]) for i in range(256)}, EOS: b"</s>", **(pieces or {})}
        self.eog_token_ids = frozenset(eog)
        self.n_vocab = n_vocab
        self.pushed = 0

    def decode_stream(self, *, continues: bool = False) -> PieceStream:
        return PieceStream(self)

    def token_to_piece(self, id: int) -> bytes:
        return self.pieces[id]

    def encode(self, text: bytes, *, add_special: bool) -> list[int]:
        return list(text)


class PieceStream:
    """Decode UTF-8 as it comes."""

    def __init__(self, vocabulary: Pieces) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        self._vocabulary.pushed += 1
        return self._utf8.decode(self._vocabulary.pieces[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class Forced:
    """A session whose logits force the next token: `choose` maps the tokens held to it. Records what is decoded."""

    def __init__(
        self,
        choose: Callable[[list[int]], int],
        n_vocab: int = 257,
        n_ctx: int = 4096,
        n_seq_max: int = 4,
        n_ubatch: int = 512,
    ) -> None:
        self._choose = choose
        self._n_vocab = n_vocab
        self.n_ctx_seq = n_ctx
        self.n_seq_max, self.n_ubatch = n_seq_max, n_ubatch
        self.lock = threading.RLock()
        self.held: dict[int, list[int]] = {}
        self.calls: list[list[int]] = []

    def tokens(self, seq_id: int = 0) -> list[int]:
        return self.held.get(seq_id, [])

    def n_past(self, seq_id: int = 0) -> int:
        return len(self.tokens(seq_id))

    def trim(self, seq_id: int, n: int) -> None:
        self.held[seq_id] = self.tokens(seq_id)[:n]

    def fork(self, src: int, dst: int) -> None:
        self.held[dst] = list(self.tokens(src))

    def check_shift(self) -> None: ...

    def shift(self, seq_id: int, n_keep: int, n_discard: int) -> None:
        del self.held[seq_id][n_keep : n_keep + n_discard]

    def decode_batch(self, batch: Iterable[tuple[int, Sequence[int], Any]], *, copy: bool = True) -> list[np.ndarray]:
        return [
            self.decode(ids, seq_id=seq_id) if wanted == "last" else self.rows(seq_id, ids, wanted)
            for seq_id, ids, wanted in batch
        ]

    def argmax(self, rows: Sequence[np.ndarray]) -> list[int]:
        return [int(row.argmax()) for row in rows]

    def decode(self, token_ids: Sequence[int], *, seq_id: int = 0) -> np.ndarray:
        return self.rows(seq_id, token_ids, [len(token_ids) - 1])

    def rows(self, seq_id: int, token_ids: Sequence[int], wanted: Any) -> np.ndarray:
        self.calls.append(list(token_ids))
        indices = range(len(token_ids)) if wanted == "all" else list(wanted)
        rows = np.zeros((len(indices), self._n_vocab), np.float32)
        for i, token in enumerate(token_ids):
            self.held[seq_id] = [*self.tokens(seq_id), token]
            if i in indices:
                rows[indices.index(i), self._choose(self.held[seq_id])] = 1
        return rows


def forced(tokens: Sequence[int], n_prompt: int = 1, **kwargs: int) -> Forced:
    """Force these tokens one after another, then the end token."""
    return Forced(lambda held: [*tokens, *[EOS] * 99][len(held) - n_prompt], **kwargs)


def text_session(text: str) -> Forced:
    return forced(list(text.encode()))


def stream(
    session: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    *,
    seq_id: int = 0,
    **options: Any,
) -> Generator[CompletionChunk, None, None]:
    """Stream the answer to one prompt on one sequence; the request is checked at once."""
    steps = engine.stream(session, tokenizer, [prompt], params, seq_ids=range(seq_id, seq_id + 1), **options)
    return (chunk for step in steps for _, chunk in step)


def complete(*arguments: Any, **options: Any) -> Completion:
    """Return the whole answer to one prompt."""
    return next(chunk.completion for chunk in stream(*arguments, **options) if chunk.completion)


def complete_all(
    session: Any, tokenizer: Any, prompts: Iterable[Sequence[int]], params: SamplingParams, **options: Any
) -> list[Completion]:
    """Return the answers to prompts, in their order."""
    steps = engine.stream(session, tokenizer, prompts, params, **options)
    done = {index: chunk.completion for step in steps for index, chunk in step if chunk.completion}
    return [done[index] for index in sorted(done)]
