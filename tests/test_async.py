"""Asynchronous calls: the answers of the plain ones, an event loop that goes on, and tasks that end when cancelled."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rows import ids, near

from ggufpy import Model, Session, Tokenizer
from ggufpy.backend import Scheduler
from ggufpy.engine import Stop
from ggufpy.errors import SamplingError, StoppedError, TemplateError
from ggufpy.threads import in_threads

Tiny = Callable[..., Path]
FIXED: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
ENDLESS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
TEXTS = ["the an", "in on it", "a", "where is the rain", "0123", "on the rock, in the sea"]
MESSAGES = [{"role": "user", "content": "the rain"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ extra }}{% endfor %}"
CHAT: dict[str, Any] = {"chat_template": TEMPLATE, "chat_template_kwargs": {"extra": "abc"}, **FIXED}


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine; nothing may go wrong unseen."""

    async def watched() -> Any:
        unseen: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        try:
            return await main
        finally:
            gc.collect()
            await asyncio.sleep(0)
            assert [] == unseen

    return asyncio.run(watched())


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# ----------------------------------------------------------------------------------------------- the same answers


def test_async_calls_give_the_same_and_run_beside_each_other(llama: Model) -> None:
    """agenerate and astream, a prompt and a list, several at a time."""
    alone = [llama.generate(text, **FIXED) for text in TEXTS]

    async def streamed(prompt: Any) -> list[Any]:
        return [chunk async for chunk in llama.astream(prompt, **FIXED)]

    async def main() -> list[Any]:
        return await asyncio.gather(
            llama.agenerate(TEXTS[0], **FIXED), llama.agenerate(TEXTS, **FIXED), streamed(TEXTS[1]),
            streamed(TEXTS[:2]),
        )  # fmt: skip

    one, many, chunks, pairs = run(main())
    assert alone[0].token_ids == one.token_ids
    assert [a.token_ids for a in alone] == [a.token_ids for a in many]
    assert alone[1].text == "".join(chunk.text for chunk in chunks)
    assert alone[1].token_ids == [token for i, chunk in pairs if i == 1 for token in chunk.token_ids]


def test_async_chats_give_the_same(llama: Model) -> None:
    """Whole and streamed, with the template given and what it asks for, on a session that keeps the prompt."""
    expected = llama.chat(MESSAGES, **CHAT)

    async def main() -> None:
        with llama.session(n_threads=1) as session:
            answer = await llama.achat(MESSAGES, session=session, **CHAT)
            chunks = [chunk async for chunk in llama.astream_chat(MESSAGES, session=session, **CHAT)]
        assert expected.token_ids == answer.token_ids == [token for chunk in chunks for token in chunk.token_ids]
        assert expected.text == answer.text == "".join(chunk.text for chunk in chunks)
        assert chunks[-1].completion is not None
        assert answer.usage.prompt_tokens - 1 == chunks[-1].completion.usage.cached_tokens

    run(main())


def test_async_errors_are_the_callers(llama: Model) -> None:
    """What is wrong with a request is raised where it is awaited."""
    with pytest.raises(SamplingError, match="no tokens"):
        run(llama.agenerate("", **FIXED))
    with pytest.raises(TypeError, match="temprature"):
        run(llama.agenerate("a", temprature=1))
    with pytest.raises(TemplateError, match="no chat template"):
        run(llama.achat(MESSAGES))
    with pytest.raises(TemplateError, match="no chat template"):
        run(anext(llama.astream_chat(MESSAGES)))
    with pytest.raises(TypeError, match="cancel"):
        run(llama.achat(MESSAGES, chat_template=TEMPLATE, cancel=threading.Event()))


# --------------------------------------------------------------------------------------------------- the event loop


def test_the_event_loop_goes_on(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """While micro-batches are computed, here slowly, the loop turns several times for each of them."""
    compute, n_computed = Scheduler.compute, 0

    def slow(*arguments: Any) -> bool:
        nonlocal n_computed
        n_computed += 1
        time.sleep(0.03)  # without Python's lock, as in ggml
        return compute(*arguments)

    monkeypatch.setattr(Scheduler, "compute", slow)

    async def main() -> int:
        n_turns = 0
        task = asyncio.create_task(llama.agenerate(TEXTS, **FIXED))
        while not task.done():
            await asyncio.sleep(0.001)
            n_turns += 1
        await task
        return n_turns

    n_turns = run(main())
    assert n_turns > 3 * n_computed > 24


def test_nothing_that_takes_long_happens_in_the_loops_thread(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a vocabulary, filling a template, tokenizing, opening, computing with and closing a session."""
    seen: dict[str, set[int]] = {}

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            seen.setdefault(name, set()).add(threading.get_ident())
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in (
        (Tokenizer, "from_metadata"), (Tokenizer, "encode"), (Tokenizer, "apply_chat_template"),
        (Session, "__init__"), (Session, "decode_batch"), (Session, "close"),
    ):  # fmt: skip
        watch(owner, name)

    async def main(model: Model) -> None:
        await model.agenerate("the rain", **FIXED)
        await model.achat(MESSAGES, **CHAT)
        async for _ in model.astream_chat(MESSAGES, **CHAT):
            break

    with Model.load(tiny("llama")) as model:
        run(main(model))
    assert 6 == len(seen)
    assert all(threading.get_ident() not in threads for threads in seen.values())


# ---------------------------------------------------------------------------------------------------- cancelled tasks


def test_a_cancelled_task_gives_its_session_back(llama: Model) -> None:
    """Whenever it is cancelled, nothing computes afterwards; a session given is free for the next call."""
    expected = llama.generate(TEXTS[0], **FIXED).token_ids

    async def main() -> list[int]:
        with llama.session(n_threads=1) as session:
            for delay in (0, 0.01, 0.05):
                task = asyncio.create_task(llama.agenerate(TEXTS[1], session=session, **ENDLESS))
                await asyncio.sleep(delay)
                await cancelled(task)
                n_past = session.n_past()
                await asyncio.sleep(0.02)
                assert n_past == session.n_past()
            async for chunk in llama.astream(TEXTS[1], session=session, **ENDLESS):
                if chunk.token_ids:
                    break
            return (await llama.agenerate(TEXTS[0], session=session, **FIXED)).token_ids

    assert expected == run(main())


def test_a_task_is_cancelled_in_the_middle_of_a_graph(smollm2_path: Path) -> None:
    """A micro-batch of 512 tokens is not waited for: none of it stays, and the session goes on as a new one would."""

    async def main(model: Model, session: Session) -> None:
        prompt = np.random.default_rng(0).integers(2, 40000, 512).tolist()
        for calls in (model.agenerate, lambda *a, **o: anext(model.astream(*a, **o))):
            task = asyncio.ensure_future(calls(prompt, session=session, **ENDLESS))
            while not session._runs:  # nothing computes yet
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            await cancelled(task)
            assert 0 == session.n_past()
        answer = await model.agenerate("The capital of France is", session=session, temperature=0, max_tokens=1)
        assert " Paris" == answer.text

    with Model.load(smollm2_path) as model, model.session(n_ctx=1024, n_threads=1) as session:
        run(main(model, session))


def test_others_on_the_session_are_never_stopped(llama: Model) -> None:
    """While tasks are cancelled at any moment, another thread's calls on another sequence go on undisturbed."""
    done, wrong, n_calls = threading.Event(), list[BaseException](), 0

    def decode(session: Session, expected: Any) -> None:
        nonlocal n_calls
        while not done.is_set():
            try:
                session.trim(1, 0)
                assert near(expected, session.decode(ids(9), seq_id=1))
                n_calls += 1
            except BaseException as error:  # StoppedError above all
                wrong.append(error)
                return

    async def main(session: Session) -> None:
        rng = random.Random(0)
        for _ in range(100):
            task = asyncio.create_task(llama.agenerate(TEXTS[3] * 9, session=session, **ENDLESS))
            await asyncio.sleep(rng.random() * 0.01)
            await cancelled(task)

    with llama.session(n_ctx=512, n_seq_max=2, n_threads=1) as session:
        other = threading.Thread(target=decode, args=(session, session.decode(ids(9), seq_id=1)))
        other.start()
        try:
            run(main(session))
        finally:
            done.set()
            other.join()
        assert [] == wrong
        assert n_calls > 100


class Pausing:
    """A session whose computation lasts until somebody cancels it."""

    def __init__(self) -> None:
        self.lock, self.n_cancelled = threading.RLock(), 0
        self.began, self.stopped = threading.Event(), threading.Event()

    def compute(self) -> None:
        self.began.set()
        assert self.stopped.wait(10)
        raise StoppedError("stopped")

    def cancel(self) -> None:
        self.n_cancelled += 1
        self.stopped.set()


def test_a_stop_stops_its_own_step_and_no_other() -> None:
    """Before it, behind it and while it waits for its turn, the session's computation is somebody else's."""
    stop, session = Stop(), Pausing()
    stop.set()
    assert 3 == stop.step(session, lambda: 3)  # type: ignore[arg-type]
    stop.set()
    with session.lock:
        waiting = threading.Thread(target=stop.step, args=(session, lambda: 3))
        waiting.start()
        time.sleep(0.02)
        stop.set()
        assert 0 == session.n_cancelled
    waiting.join()
    stop.set()
    assert 0 == session.n_cancelled
    raised: list[StoppedError] = []

    def compute() -> None:
        try:
            stop.step(session, session.compute)  # type: ignore[arg-type]
        except StoppedError as error:
            raised.append(error)

    computing = threading.Thread(target=compute)
    computing.start()
    session.began.wait()
    stop.set()
    computing.join()
    stop.set()
    assert (1, 1) == (session.n_cancelled, len(raised))


def test_a_cancel_that_a_step_overlooks_comes_again() -> None:
    """Also where the task is cancelled once more meanwhile; the generator is closed before the task ends."""
    events: list[str] = []

    class Deaf(Stop):
        def set(self) -> None:
            super().set()
            events.append("set")

    def steps(stop: Stop) -> Generator[int, None, None]:
        try:
            yield 1
            while events.count("set") < 3:
                time.sleep(0.001)
            events.append("stopped")
            raise StoppedError("stopped")
        finally:
            events.append("closed")

    async def main(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ggufpy.threads.Stop", Deaf)
        found: list[int] = []

        async def consume() -> None:
            async for step in in_threads(steps):
                found.append(step)

        task = asyncio.create_task(consume())
        while not found:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0)
        await cancelled(task)
        assert ["stopped", "closed"] == [event for event in events if event != "set"]

    with pytest.MonkeyPatch.context() as monkeypatch:
        run(main(monkeypatch))


def test_what_others_stop_is_an_error_of_the_call(llama: Model) -> None:
    """`Session.cancel` is no cancelled task."""

    async def main(session: Session) -> None:
        task = asyncio.create_task(llama.agenerate(TEXTS[1], session=session, **ENDLESS))
        while not task.done():
            await asyncio.sleep(0.001)
            session.cancel()
        with pytest.raises(StoppedError):
            await task

    with llama.session(n_threads=1) as session:
        run(main(session))


def test_a_timeout_is_a_timeout(llama: Model) -> None:
    """asyncio.wait_for cancels, and says so in its own way."""
    with pytest.raises(asyncio.TimeoutError):
        run(asyncio.wait_for(llama.achat(MESSAGES, chat_template=TEMPLATE, **ENDLESS), 0.05))
