"""Models: what a prompt may be, that answers do not depend on what came before, and a clean life from load to exit."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.forced import Forced
from helpers.rewrite import rewrite
from helpers.scripts import IN_THREADS, run

from ggufpy import (
    ClosedError,
    Completion,
    GGUFError,
    GgufpyError,
    Model,
    SamplingError,
    TemplateError,
    TokenizerError,
    UnsupportedArchitectureError,
)
from ggufpy.session import SessionOptions

Tiny = Callable[..., Path]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}


def answer(completion: Completion) -> tuple[list[int], str, str]:
    """What of a completion has to be reproducible."""
    return completion.token_ids, completion.text, completion.finish_reason


# --------------------------------------------------------------------------------------------------------- prompts

BAD_PROMPTS = [
    5, None, 1.5, b"ab", {"a": 1}, iter([1]), [1.5], [True], [[1.5]], [b"ab"], [None], ["a", 5], ["a", None], [5, "a"],
    [[1], [None]], [[[1]], [[2, 3]]], np.array([1.5]), np.array([True]), np.zeros((1, 1, 1), int), np.array(3),
]  # fmt: skip


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=repr)
def test_what_is_no_prompt_is_refused(prompt: Any, llama: Model) -> None:
    """Neither text nor ids, nor a list of them: a ValueError that shows it, and nothing is computed."""
    with pytest.raises(ValueError, match="prompt: expected text or a sequence of token ids"):
        llama.generate(prompt, **GREEDY)
    with pytest.raises(ValueError, match="prompt: expected text or a sequence of token ids"):
        llama.stream_generate(prompt, **GREEDY)


@pytest.mark.parametrize("prompt", ["", [[]], np.zeros(0, int)], ids=repr)
def test_an_empty_prompt_has_nothing_to_continue(prompt: Any, llama: Model) -> None:
    """There are no logits to choose from."""
    with pytest.raises(SamplingError, match="the prompt has no tokens"):
        llama.generate(prompt, **GREEDY)


@pytest.mark.parametrize("prompts", [[], ()], ids=repr)
def test_a_list_of_no_prompts_has_no_answers(prompts: Any, llama: Model) -> None:
    """As `embed` gives none of no texts."""
    with llama.session() as session:
        assert [] == llama.generate(prompts) == llama.generate(prompts, session=session, n=2)
    assert [] == list(llama.stream_generate(prompts)) == asyncio.run(llama.agenerate(prompts))


def test_the_name_of_a_model_is_no_path() -> None:
    """Who loads a named model by its name is told how; another missing file is just missing."""
    with pytest.raises(FileNotFoundError, match="from_pretrained"):
        Model.load("smollm2-135m-instruct")
    with pytest.raises(FileNotFoundError, match="No such file"):
        Model.load("no-such-model")


@pytest.mark.parametrize("token", [-1, 64, 2**31, 2**62])
def test_ids_outside_the_vocabulary_are_named(token: int, llama: Model) -> None:
    """With their place in the prompt."""
    with pytest.raises(ValueError, match=rf"token_ids\[1\]: expected an id from 0 to 63, got {token}"):
        llama.generate([3, token], **GREEDY)


def test_one_prompt_in_many_forms(llama: Model) -> None:
    """Text, lists, tuples, ranges and arrays of any integer type; a list of prompts gives a list of answers."""
    expected = answer(llama.generate("abc", **GREEDY))
    ids = llama.tokenizer.encode("abc")
    forms: list[Any] = [ids, tuple(ids), np.array(ids), np.array(ids, np.uint8), [np.int64(i) for i in ids]]
    for form in forms:
        assert expected == answer(llama.generate(form, **GREEDY))
    for several in (["abc", ids], [ids, ids], ("abc", "abc"), np.array([ids, ids]), [np.array(ids), np.array(ids)]):
        assert [expected, expected] == [answer(completion) for completion in llama.generate(several, **GREEDY)]
    chunks = list(llama.stream_generate("abc", **GREEDY))
    assert expected == answer(chunks[-1].completion)  # type: ignore[arg-type]
    assert expected[:2] == ([token for c in chunks for token in c.token_ids], "".join(c.text for c in chunks))


def test_each_prompt_of_a_list_is_answered_as_alone(llama: Model) -> None:
    """The order and the neighbours make no difference; one bad prompt stops all before any is computed."""
    prompts = ["the cat", "a", [5, 6, 7], "the cat sat"]
    alone = [answer(llama.generate(prompt, **GREEDY)) for prompt in prompts]
    assert alone == [answer(completion) for completion in llama.generate(prompts, **GREEDY)]
    assert alone[::-1] == [answer(completion) for completion in llama.generate(prompts[::-1], **GREEDY)]
    with pytest.raises(ValueError, match="prompt: expected"):
        llama.generate([*prompts, None], **GREEDY)


def test_parameters_and_overrides_are_checked(llama: Model) -> None:
    """Unknown names and impossible values are refused before anything is computed."""
    with pytest.raises(TypeError, match="temprature"):
        llama.generate("a", temprature=0)
    with pytest.raises(SamplingError, match="top_p"):
        llama.generate("a", top_p=2)
    with pytest.raises(SamplingError, match="max_tokens"):
        llama.stream_generate("a", max_tokens=-1)
    with pytest.raises(TypeError, match="n_gqa"):
        Model.load("nowhere.gguf", n_gqa=8)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="one file each"):
        Model.from_pretrained("smollm2-135m-instruct", "other.gguf")
    with pytest.raises(OSError, match="no model is named 'nobody'"):
        Model.from_pretrained("nobody")


@pytest.mark.parametrize("name", ["use_mmap", "repack", "devices"])
def test_options_of_loading_are_checked(name: str, llama: Model) -> None:
    """A word is not a switch, and a name is not a device."""
    with pytest.raises(ValueError, match=f"{name}: expected"):
        Model.load("nowhere.gguf", **{name: ["no"]})


def test_a_dict_is_not_sampling_parameters(llama: Model) -> None:
    """Nor is anything else, empty or not."""
    for params in ({}, {"top_k": 1}, SessionOptions()):
        with pytest.raises(ValueError, match="params: expected SamplingParams, got"):
            llama.generate("a", params)  # type: ignore[call-overload]


def test_a_session_of_another_model_is_refused(tiny: Tiny, llama: Model) -> None:
    """Its tokens and weights are not this model's: the answer would be nonsense."""
    with Model.load(tiny("llama", bias=True)) as other, other.session(n_ctx=64) as session:
        for call in (llama.generate, llama.stream_generate):
            with pytest.raises(ValueError, match="session: expected one of this model"):
                call("a", session=session)
        with pytest.raises(ValueError, match="session: expected one of this model"):
            llama.chat([{"role": "user", "content": "a"}], chat_template="a", session=session)


def test_diffusion_models_do_not_continue_texts(tiny: Tiny) -> None:
    """They keep nothing from call to call, which generation would notice only in the middle."""
    with Model.load(tiny("llada")) as model:
        with pytest.raises(UnsupportedArchitectureError, match="llada models see all of a text at once"):
            model.generate("a")
        with pytest.raises(UnsupportedArchitectureError, match="llada"):
            model.stream_generate("a")


def test_a_chat_needs_a_template(llama: Model) -> None:
    """The file's, or one given; nothing is guessed."""
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(TemplateError, match="no chat template"):
        llama.chat(messages, **GREEDY)
    with pytest.raises(TemplateError, match="no chat template"):
        llama.stream_chat(messages, **GREEDY)
    template = "{% for m in messages %}{{ m.content }}{{ extra }}{% endfor %}"
    completion = llama.chat(messages, chat_template=template, chat_template_kwargs={"extra": "abc"}, **GREEDY)
    assert answer(llama.generate("hiabc", **GREEDY)) == answer(completion)


def test_a_model_without_a_known_vocabulary_runs_on_ids(tiny: Tiny, tmp_path: Path) -> None:
    """Its logits are there; asking for text names what is missing."""
    path = rewrite(tiny("llama"), tmp_path / "x.gguf", {"tokenizer.ggml.model": "runes"})
    with Model.load(path) as model:
        with model.session(n_ctx=256, n_threads=1) as session:
            assert np.isfinite(session.decode([2, 7])).all()
        with pytest.raises(TokenizerError, match="runes"):
            model.generate("hello")


# ------------------------------------------------------------------------------- case E1: what came before is no matter


def test_prompts_after_each_other_are_answered_as_if_alone(smollm2: Model) -> None:
    """The same prompt again, shorter, edited, continued, and another: token for token a fresh model's answers.

    With a session, tokens that it holds already are not computed again, and the last of the prompt always is.
    """
    prompt = "The quick brown fox jumps over the lazy dog. The sun rises in the east and"
    edited = prompt.replace("lazy", "sleepy")

    def alone(p: Any) -> Completion:
        with smollm2.session(n_ctx=256, n_threads=1) as session:
            return smollm2.generate(p, session=session, temperature=0, max_tokens=8)

    first = alone(prompt)
    n, ids = first.usage.prompt_tokens, smollm2.tokenizer.encode(prompt)
    common = next(i for i, (a, b) in enumerate(zip(ids, smollm2.tokenizer.encode(edited), strict=False)) if a != b)
    prompts: list[Any] = [prompt, prompt, ids[:-1], edited, prompt, prompt + first.text + " What then?", "One, two,"]
    with smollm2.session(n_ctx=256, n_threads=1) as session:
        for p, cached in zip(prompts, [0, n - 1, n - 2, common, common, n - 1, 0], strict=True):
            completion = smollm2.generate(p, session=session, temperature=0, max_tokens=8)
            assert answer(alone(p)) == answer(completion)
            assert cached <= completion.usage.cached_tokens < completion.usage.prompt_tokens


@pytest.mark.parametrize("options", [{}, {"swa_full": False, "n_ubatch": 16}], ids=str)
def test_a_windowed_model_reuses_what_it_still_has(options: dict[str, Any], tiny: Tiny) -> None:
    """Where a window's cache has dropped what a shorter prompt needs, the prompt is computed anew."""
    with (
        Model.load(tiny("gemma3", n_swa=16, n_layer=3, swa_pattern=3)) as model,
        model.session(n_ctx=512, n_threads=1, **options) as session,
    ):
        rng = np.random.default_rng(0)
        ids = rng.integers(2, 64, 400).tolist()
        params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
        for prompt in (ids, ids, ids[:399], ids[:100], [*ids[:100], 7], ids[50:200]):
            with model.session(n_ctx=512, n_threads=1, **options) as fresh:
                expected = model.generate(prompt, session=fresh, **params)
            found = model.generate(prompt, session=session, **params)
            assert (len(prompt), 8) == (found.usage.prompt_tokens, found.usage.completion_tokens)
            assert expected.token_ids == found.token_ids


# -------------------------------------------------------------------------------------------- cases D2 and D8: endings


def test_one_seed_gives_one_answer(tiny: Tiny, llama: Model) -> None:
    """Twice on one model, on another, after an unrelated call and as a stream; the seed used is reported."""
    params: dict[str, Any] = {"max_tokens": 24, "temperature": 1.5, "top_p": 1.0, "seed": 7, "ignore_eos": True}
    first = llama.generate("the cat", **params)
    assert 7 == first.seed
    assert answer(first) == answer(llama.generate("the cat", **params))
    llama.generate("another", max_tokens=3)
    assert answer(first) == answer(llama.generate("the cat", **params))
    assert answer(first) == answer(list(llama.stream_generate("the cat", **params))[-1].completion)  # type: ignore[arg-type]
    with Model.load(tiny("llama")) as fresh:
        assert answer(first) == answer(fresh.generate("the cat", **params))
    assert answer(first) != answer(llama.generate("the cat", **{**params, "seed": 0}))
    assert answer(llama.generate("the cat", **{**params, "seed": 0})) == answer(
        llama.generate("the cat", **{**params, "seed": 0})
    )


def test_without_a_seed_one_is_drawn_and_reported(llama: Model) -> None:
    """Two answers differ, and each can be had again with the seed it reports."""
    params: dict[str, Any] = {"max_tokens": 24, "temperature": 2.0, "top_k": 0, "top_p": 1.0, "ignore_eos": True}
    one, two = (llama.generate("the cat", **params) for _ in range(2))
    assert one.seed != two.seed
    assert one.token_ids != two.token_ids
    assert one.token_ids == llama.generate("the cat", seed=one.seed, **params).token_ids


def forced(*tokens: int, n_vocab: int) -> Any:
    """Stand in for a session: after the prompt of one token these follow, whatever was asked."""
    return Forced(lambda held: tokens[len(held) - 1], n_vocab=n_vocab)


@pytest.mark.parametrize("end", [0, 2])
def test_smollm2s_end_tokens_end_the_answer(end: int, smollm2: Model) -> None:
    """Case D8: end of text and end of message both do, and neither's text is given out."""
    session = forced(504, 36588, end, 504, n_vocab=49152)
    completion = smollm2.generate([100], session=session, max_tokens=10, temperature=0)
    assert ([504, 36588], "stop", end) == (completion.token_ids, completion.finish_reason, completion.stop_reason)
    assert smollm2.tokenizer.decode([504, 36588]) == completion.text


@pytest.mark.parametrize("end", [1, 106])
def test_gemmas_end_tokens_end_the_answer(end: int, gemma3_path: Path) -> None:
    """Case D8: both the end of the text and the end of a turn."""
    with Model.load(gemma3_path) as model:
        session = forced(818, 4083, end, 818, n_vocab=262144)
        completion = model.generate([2], session=session, max_tokens=10, temperature=0)
        assert ([818, 4083], "stop", end) == (completion.token_ids, completion.finish_reason, completion.stop_reason)
        assert model.tokenizer.decode([818, 4083]) == completion.text


def test_a_broken_forward_pass_does_not_look_like_text(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN among the logits is an error that names it."""
    with llama.session(n_ctx=256, n_threads=1) as session:
        decode = session.decode_batch

        def broken(batch: Any, **options: Any) -> list[np.ndarray]:
            (row,) = decode(batch)
            row[0, 5] = np.nan
            return [row]

        monkeypatch.setattr(session, "decode_batch", broken)
        with pytest.raises(SamplingError, match=r"logits\[5\] is NaN"):
            llama.generate("a", session=session, **GREEDY)


# --------------------------------------------------------------------------------------- case E6: from load to exit


def test_a_closed_model_refuses_everything_but_closing(tiny: Tiny) -> None:
    """A second close does nothing; what the file said stays readable; any other use names the fault."""
    model = Model.load(tiny("llama"))
    session = model.session(n_ctx=256, n_threads=1)
    model.generate("a", max_tokens=1)
    model.close()
    model.close()
    messages = [{"role": "user", "content": "x"}]
    calls: list[Callable[[], object]] = [
        model.session, lambda: model.generate("a"), lambda: model.generate([1], session=session), model.__enter__,
        lambda: model.stream_generate("a"), lambda: model.chat(messages), lambda: model.stream_chat(messages),
        lambda: model.weights,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ClosedError, match="the model is closed"):
            call()
    assert "closed" in repr(model)
    assert "llama" == model.metadata["general.architecture"] == model.config.architecture
    assert [3] == model.tokenizer.encode("b")
    assert (1, 64) == session.decode([1]).shape
    session.close()


def test_a_stream_survives_the_closing_of_its_model(tiny: Tiny) -> None:
    """It has a session of its own, which keeps what it needs."""
    params = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
    with Model.load(tiny("llama")) as model:
        expected = model.generate("the", **params)
        chunks = model.stream_generate("the", **params)
        next(chunks)
    assert expected.text == list(chunks)[-1].completion.text  # type: ignore[union-attr]


def test_a_stream_that_is_dropped_frees_its_session(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, whether it was begun or not, and whether closed or forgotten."""
    with Model.load(tiny("llama")) as model:
        made: list[weakref.ref[Any]] = []
        make = model.session

        def session(**options: Any) -> Any:
            made.append(weakref.ref(one := make(n_ctx=256, n_threads=1)))
            return one

        monkeypatch.setattr(model, "session", session)
        gc.disable()
        try:
            begun, not_begun, closed = (model.stream_generate("the", max_tokens=20) for _ in range(3))
            next(begun)
            next(closed)
            closed.close()
            del begun, not_begun, closed
            assert [None] * 3 == [ref() for ref in made]
        finally:
            gc.enable()


def test_a_failed_load_leaves_nothing_behind(tiny: Tiny, tmp_path: Path) -> None:
    """A file that is no model is refused over and over without a trace."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(tiny("llama").read_bytes()[:-1000])
    for _ in range(3):
        with pytest.raises(GGUFError):
            Model.load(path)
        gc.collect()
        if Path("/proc/self/maps").exists():
            assert str(path) not in Path("/proc/self/maps").read_text()


def test_freed_without_the_garbage_collector(tiny: Tiny, tmp_path: Path) -> None:
    """Nothing of a model, its tokenizer, sessions or streams is part of a circle: `del` is enough."""
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny("llama").read_bytes())
    gc.collect()
    gc.disable()
    try:
        model = Model.load(path)
        session = model.session(n_ctx=256, n_threads=1, n_seq_max=2)
        session.decode([1, 2, 3])
        session.decode([4], logits="all")
        session.fork(0, 1)
        model.generate("the cat", max_tokens=3)
        chunks = model.stream_generate("the", max_tokens=9)
        next(chunks)
        refs = [weakref.ref(thing) for thing in (model, session, model.tokenizer, model.weights, session._scheduler)]
        del model, session, chunks
        assert [None] * len(refs) == [ref() for ref in refs]
        if Path("/proc/self/maps").exists():
            assert str(path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("close", [True, False])
def test_loading_again_and_again_stays_flat(close: bool, smollm2_path: Path) -> None:
    """Sixty loads of SmolLM2 with a few tokens each: files and mappings stay, and memory swings but does not grow."""
    script = """
import gc, os, sys
from ggufpy import Model
gc.disable()
def state():
    status = open("/proc/self/status").read()
    anon = int(status.split("RssAnon:")[1].split()[0]) if "RssAnon:" in status else 0
    maps = sum(1 for _ in open("/proc/self/maps"))
    return anon, len(os.listdir("/proc/self/fd")), maps, sum("SmolLM2" in line for line in open("/proc/self/maps"))
states = []
for i in range(60):
    model = Model.load(sys.argv[1])
    session = model.session(n_ctx=256, n_threads=1)
    session.decode([1, 2, 3])
    model.tokenizer.eog_token_ids
    if sys.argv[2] == "True":
        session.close()
        model.close()
    del model, session
    states.append(state())
print(*states[2:], sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", script, str(smollm2_path), str(close)], capture_output=True, text=True)
    assert (0, "") == (done.returncode, done.stderr)
    states = [eval(line) for line in done.stdout.splitlines()]
    assert 58 == len(states)
    assert {0} == {state[3] for state in states}
    assert {states[0][1]} == {state[1] for state in states}
    assert max(state[2] for state in states) <= states[0][2] + 3
    early, late = (max(state[0] for state in half) for half in (states[:28], states[28:]))
    assert late <= early + 4000  # kB, so 133 a load; a copy of the weights would be 96,000


ENDINGS = {
    "just ends": "model.generate('the', max_tokens=3); session.decode([1, 2])",
    "inside a generator": "next(chunks)",
    "inside a generator on a session": "c = model.stream_generate('the', session=session); next(c)",
    "with a generator not begun": "pass",
    "with a view of a weight": "view = model.weights['output_norm.weight'].numpy_view()",
    "by an exit": "next(chunks); sys.exit(0)",
    "with everything closed": "model.close(); session.close(); chunks.close()",
    "in a circle": "next(chunks); circle = [model, session, chunks]; circle.append(circle)",
    "after a thread that computes": "threading.Thread(target=compute).start(); started.wait(); session.close()",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_that_ends_ends_quietly(ending: str, tiny: Tiny) -> None:
    """However it ends, with everything open: exit code 0 and not a word on standard error, in development mode too."""
    script = f"""
import sys, threading
from ggufpy import ClosedError, Model
model = Model.load(sys.argv[1])
session = model.session(n_threads=2)
started = threading.Event()
def compute():
    while True:
        try:
            session.trim(0, 0)
            session.decode([5] * 1000)
        except ClosedError:
            break
        started.set()
chunks = model.stream_generate("the", max_tokens=200, temperature=0, ignore_eos=True)
{ENDINGS[ending]}
"""
    run(script, tiny("llama"))


def test_a_script_that_ends_while_a_thread_computes(smollm2_path: Path) -> None:
    """The computation of a daemon thread is stopped before the libraries go; the thread says nothing either."""
    script = """
import sys, threading, time
from ggufpy import Model
session = Model.load(sys.argv[1]).session(n_threads=2)
def compute():
    while True:
        session.clear()
        session.decode(range(1000, 1500))
threading.Thread(target=compute, daemon=True).start()
time.sleep(0.3)
"""
    run(script, smollm2_path)


def test_an_exit_handler_may_still_use_a_session(tiny: Tiny) -> None:
    """One that was registered before ggufpy was imported is called after ggufpy's own."""
    script = """
import atexit, sys
atexit.register(lambda: print(session.decode([3]).shape, session.close()))
from ggufpy import Model
session = Model.load(sys.argv[1]).session(n_threads=1)
"""
    assert "(1, 64) None\n" == run(script, tiny("llama"))


# --------------------------------------------------------------------------------------------------- case E4: threads

THREADS = IN_THREADS + "GREEDY = dict(temperature=0, max_tokens=8, ignore_eos=True)"


def test_threads_generate_on_one_model(smollm2_path: Path) -> None:
    """Four threads of eight tokens each on one SmolLM2 get what each gets alone."""
    script = """
prompts = ["The capital of France is", "Once upon a time", "1, 2, 3,", "def main():"]
expected = [model.generate(p, **GREEDY).token_ids for p in prompts]
found = [None] * 4
def job(i):
    found[i] = model.generate(prompts[i], **GREEDY).token_ids
assert in_threads(*(lambda i=i: job(i) for i in range(4))) == []
assert found == expected, (found, expected)
"""
    run(THREADS + script, smollm2_path)


def test_threads_open_the_tokenizer_once(tiny: Tiny) -> None:
    """Whoever comes first reads it; all get the same."""
    script = """
found = []
barrier = threading.Barrier(8)
def job():
    barrier.wait(30)
    found.append(model.tokenizer)
assert in_threads(*[job] * 8) == []
assert len({id(t) for t in found}) == 1
"""
    run(THREADS + script, tiny("llama"))


def test_closing_a_model_during_anothers_call(tiny: Tiny) -> None:
    """The call goes on to its end, or is refused before it began; nothing crashes."""
    script = """
expected = model.generate("the", **GREEDY).token_ids
for _ in range(20):
    one = Model.load(sys.argv[1])
    started = threading.Event()
    def work():
        while True:
            started.set()
            assert one.generate("the", **GREEDY).token_ids == expected
    def close():
        started.wait(30)
        one.close()
    errors = in_threads(work, close)
    assert [type(e) for e in errors] == [ClosedError], errors
"""
    run(THREADS + script, tiny("llama"))


def test_answers_do_not_mix(tiny: Tiny) -> None:
    """An answer whose sequence another took over ends in an error; the other goes on undisturbed."""
    with Model.load(tiny("llama")) as model, model.session(n_threads=1) as session:
        options = {"session": session, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        first, second = (model.stream_generate([2, 3, token], **options) for token in (4, 5))
        next(first), next(second)
        with pytest.raises(GgufpyError, match="expected 3 tokens, found those of another prompt"):
            next(first)
        *_, last = second
        assert model.generate([2, 3, 5], **{**options, "session": None}).token_ids == last.completion.token_ids


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_computes_too(tiny: Tiny) -> None:
    """With one thread, as the others stay behind: on what it inherited and on a session of its own."""
    script = """
import os, signal, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about forking with threads
ids, options = [2, 3, 4], {"n_threads": 2, "n_ctx": 256}
session = model.session(**options)
expected = session.decode(ids)
session.clear()
child = os.fork()
if not child:
    signal.alarm(30)
    assert session.argmax([*expected, *expected]) == [*expected.argmax(1)] * 2
    with model.session(**options) as fresh:
        found = session.decode(ids), fresh.decode(ids)
    os._exit(not all((rows == expected).all() for rows in found))
assert os.waitpid(child, 0)[1] == 0
assert (session.decode(ids) == expected).all()
"""
    run(THREADS + script, tiny("llama"))


def test_a_session_shared_by_two_answers_is_a_clean_error(tiny: Tiny) -> None:
    """Two threads that generate on the same sequence: right answers or an error that says so, never a crash."""
    script = """
expected = {p: model.generate(p, **GREEDY).token_ids for p in ("the", "cat")}
session = model.session(n_threads=1)
def job(p):
    for _ in range(10):
        try:
            found = model.generate(p, session=session, **GREEDY).token_ids
        except GgufpyError as error:
            assert "was changed while it was being generated" in str(error), error
        else:
            right.append(found == expected[p])
right = []
assert in_threads(lambda: job("the"), lambda: job("cat")) == []
assert all(right)
session.clear()
assert model.generate("the", session=session, **GREEDY).token_ids == expected["the"]
"""
    run(THREADS + script, tiny("llama"))


def test_one_stream_advanced_from_two_threads(tiny: Tiny) -> None:
    """Python's own "generator already executing", or each token once."""
    script = """
expected = model.generate("the", temperature=0, max_tokens=200, ignore_eos=True).token_ids
for _ in range(5):
    chunks = model.stream_generate("the", temperature=0, max_tokens=200, ignore_eos=True)
    found = []
    def job():
        for chunk in chunks:
            found.append(chunk.token_ids)
    errors = in_threads(job, job)
    assert all(type(e) is ValueError and "already executing" in str(e) for e in errors), errors
    assert sorted(sum(found, [])) == sorted(expected)
"""
    run(THREADS + script, tiny("llama"))


def test_cancelling_from_another_thread(llama: Model) -> None:
    """An event that is set ends the answer and says so."""
    cancel = threading.Event()
    completion = None
    for i, chunk in enumerate(llama.stream_generate("the", temperature=0, ignore_eos=True, cancel=cancel)):
        completion = chunk.completion
        if i == 4:
            cancel.set()
    assert completion is not None
    assert ("cancelled", 5) == (completion.finish_reason, len(completion.token_ids))


def test_the_first_token_waits_for_nothing_it_does_without(tiny: Tiny) -> None:
    """Text, sampling, sessions on disk, and the libraries they need, are imported when they are used."""
    late = {"ggufpy.tokenizer", "ggufpy.sampling", "ggufpy.snapshots", "hashlib", "jinja2", "shutil", "tempfile"}
    script = (
        "import sys, ggufpy; ggufpy.Model.load(sys.argv[1]).session(n_ctx=256, n_threads=1).decode([5]); "
        f"print(*sorted({late} & set(sys.modules)))"
    )
    assert run(script, tiny("llama")).strip() == ""


def test_a_session_outlives_its_model_and_can_be_saved(tiny: Tiny, tmp_path: Path) -> None:
    """What says whose file it is was noted when the model closed."""
    model = Model.load(tiny("llama"))
    with model.session(n_ctx=256, n_threads=1) as session:
        session.decode([5, 6, 7])
        model.close()
        session.save(tmp_path / "held")
    with Model.load(tiny("llama")) as again, again.session(n_ctx=256, n_threads=1) as session:
        session.load(tmp_path / "held")
        assert [5, 6, 7] == session.tokens()


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"session": 3}, ValueError, "^session: expected a Session, got 3"),
        ({"cancel": 3}, ValueError, "^cancel: expected a threading.Event, got 3"),
        ({"temprature": 1}, TypeError, r"^temprature: an unexpected keyword argument \(did you mean temperature\?\)"),
        ({"n_ctx": 512}, TypeError, r"^n_ctx: .*\(an option of Model.session"),
        ({"zzz": 1}, TypeError, "^zzz: an unexpected keyword argument$"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], error: type[Exception], named: str, llama: Model) -> None:
    """Before anything is computed, with what was probably meant."""
    for call in (llama.generate, llama.stream_generate):
        with pytest.raises(error, match=named):
            call([5, 6], **options)
