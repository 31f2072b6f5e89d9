"""What a type checker makes of calls, as a user's would: mypy checks this file, nobody runs it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING

from ggufpy import Completion, CompletionChunk, Model

if TYPE_CHECKING:
    from typing_extensions import assert_type

Chunk = CompletionChunk
Indexed = tuple[int, CompletionChunk]


def plain(model: Model, ids: list[int], texts: list[str], lists: list[list[int]]) -> None:
    """A prompt gives an answer, a list of them a list."""
    assert_type(model.generate("a", max_tokens=1), Completion)
    assert_type(model.generate(ids), Completion)
    assert_type(model.generate(texts), list[Completion])
    assert_type(model.generate(lists, n=2), list[Completion])
    assert_type(model.stream_generate("a"), Generator[Chunk, None, None])
    assert_type(model.stream_generate(texts), Generator[Indexed, None, None])
    assert_type(model.chat([{"role": "user", "content": "a"}]), Completion)
    assert_type(model.stream_chat([{"role": "user", "content": "a"}]), Generator[Chunk, None, None])


async def asynchronous(model: Model, ids: list[int], texts: list[str], lists: list[list[int]]) -> None:
    """The same."""
    assert_type(await model.agenerate("a", max_tokens=1), Completion)
    assert_type(await model.agenerate(ids), Completion)
    assert_type(await model.agenerate(texts), list[Completion])
    assert_type(await model.agenerate(lists, n=2), list[Completion])
    assert_type(model.astream("a"), AsyncGenerator[Chunk, None])
    assert_type(model.astream(texts), AsyncGenerator[Indexed, None])
    assert_type(await model.achat([{"role": "user", "content": "a"}]), Completion)
    assert_type(model.astream_chat([{"role": "user", "content": "a"}]), AsyncGenerator[Chunk, None])
