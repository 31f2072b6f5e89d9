"""Scores, perplexity, embeddings in batches and ranks: against rows computed one by one, and against llama.cpp."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rows import ids, near, same
from reference.cases import machine

from ggufpy import (
    ClosedError,
    ContextLengthError,
    Model,
    SamplingError,
    Session,
    Tokenizer,
    TokenizerError,
    UnsupportedArchitectureError,
    arch,
    scoring,
)
from ggufpy.cli import main
from ggufpy.reference import read_dump

Tiny = Callable[..., Path]
Rows = np.ndarray
TEXT = Path(__file__).parent / "data" / "perplexity.txt"
ONE_THREAD: dict[str, Any] = {"n_threads": 1}
EXACT: dict[str, Any] = {"n_threads": 1, "flash_attn": False, "type_k": "f32", "type_v": "f32"}
"""Nothing is rounded to 16 bits, so that the order of sums hardly matters."""
RERANKERS = [name for name in arch.names() if arch.find(name).classifier]
LIVE = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")

# What llama-perplexity printed for tests/data/perplexity.txt after each window, and its final estimate. Made with the
# tool of the pinned llama.cpp on the machine of the committed dumps:
#   llama-perplexity -m MODEL -f tests/data/perplexity.txt --no-repack, with nothing more (-c 512 -b 2048),
#   with -c 256 -b 512 --chunks 3, and with -c 256 -b 128 --chunks 2
# --no-repack: weights as they are in the file, as ours are when they are mapped.
MADE_ON = read_dump(Path(__file__).parent / "reference" / "dumps" / "real" / "smollm2-fa1.npz").meta["machine"]
PRINTED: list[tuple[str, dict[str, int], str, str]] = [
    ("smollm2", {}, "22.1506 22.5226 28.7507", "28.7507 +/- 3.06417"),
    ("smollm2", {"n_ctx": 256, "n_batch": 512, "n_chunks": 3}, "40.8433 33.0635 39.6549", "39.6549 +/- 5.91477"),
    ("smollm2", {"n_ctx": 256, "n_batch": 128, "n_chunks": 2}, "40.8433 33.0635", "33.0635 +/- 5.99713"),
    ("gemma3", {}, "20.8078 21.5611 30.1528", "30.1528 +/- 3.37759"),
    ("gemma3", {"n_ctx": 256, "n_batch": 512, "n_chunks": 3}, "46.1275 31.1852 33.2320", "33.2320 +/- 4.91992"),
    ("gemma3", {"n_ctx": 256, "n_batch": 128, "n_chunks": 2}, "46.1275 31.1852", "31.1852 +/- 5.74836"),
]


def expected_score(model: Model, before: Sequence[int], after: Sequence[int]) -> tuple[list[float], bool]:
    """Log-probabilities of a continuation from whole rows, computed alone and in double precision."""
    with model.session(**EXACT) as session:
        rows = session.decode([*before, *after[:-1]], logits="all")[len(before) - 1 :].astype(np.float64)
    normalized = rows - np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    normalized -= rows.max(axis=1, keepdims=True)
    return normalized[np.arange(len(after)), after].tolist(), bool((rows.argmax(axis=1) == after).all())


def check_scores(model: Model, pairs: Sequence[tuple[list[int], list[int]]], found: Sequence[scoring.Score]) -> None:
    """Every pair has the score that it has alone."""
    assert len(pairs) == len(found)
    for (before, after), score in zip(pairs, found, strict=True):
        logprobs, is_greedy = expected_score(model, before, after)
        assert score.token_ids == after
        assert score.logprobs == pytest.approx(logprobs, abs=1e-3)
        assert score.sum == pytest.approx(math.fsum(score.logprobs))
        assert score.is_greedy == is_greedy


# --------------------------------------------------------------------------------------------- log-probabilities

HEAD = ids(40, seed=9)
PAIRS: dict[str, list[tuple[list[int], list[int]]]] = {
    "one": [(ids(5), ids(4, 1))],
    "pairs": [(ids(3 + i, i), ids(1 + i % 5, i + 50)) for i in range(20)],
    "one prompt": [(ids(30), ids(1 + i % 4, i)) for i in range(20)],
    "single tokens": [(ids(30), [i]) for i in range(64)],
    "a shared beginning": [(HEAD + ids(3 + i % 4, i), ids(1 + i % 3, j)) for i in range(9) for j in range(4)],
    "prompts in prompts": [(HEAD[:n], ids(3, n)) for n in (40, 1, 20, 39, 20)],
    "more than sequences": [(HEAD + ids(2, i), ids(2, j)) for i in range(80) for j in range(2)],
    "the same twice": [(ids(8), ids(3, 1))] * 2 + [(ids(8), ids(3, 1)[:2])],
}


@pytest.mark.parametrize("name", PAIRS)
def test_scores_are_those_of_each_pair_alone(name: str, llama: Model) -> None:
    """Whatever is shared and batched, each continuation has the log-probabilities that it has alone."""
    pairs = PAIRS[name]
    found = llama.score([before for before, _ in pairs], [after for _, after in pairs], **EXACT)
    assert isinstance(found, list)
    check_scores(llama, pairs, found)


@pytest.mark.parametrize(
    ("name", "options"),
    [("gemma3", {"n_swa": 16, "n_layer": 7}), ("lfm2", {}), ("qwen35", {}), ("deepseek2", {}), ("mpt", {})],
)
def test_every_kind_of_memory_can_be_scored_with(name: str, options: dict[str, Any], tiny: Tiny) -> None:
    """Windows, states, compressed keys, ALiBi: what is shared is forked or, where that cannot be, computed again."""
    pairs = PAIRS["a shared beginning"] + PAIRS["pairs"][:4]
    with Model.load(tiny(name, **options)) as model:
        found = model.score([before for before, _ in pairs], [after for _, after in pairs], **EXACT)
        check_scores(model, pairs, found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 256}, {"n_ubatch": 7}, {"n_seq_max": 3}, {"n_seq_max": 4, "n_ctx": 256, "n_ubatch": 16},
        {"kv_unified": False, "n_ctx": 64 * 256}, {"swa_full": False},
    ],
    ids=str,
)  # fmt: skip
def test_scores_do_not_depend_on_the_session(options: dict[str, Any], llama: Model) -> None:
    """Small contexts, few sequences, small micro-batches and separate caches only change how work is cut."""
    pairs = PAIRS["a shared beginning"] + PAIRS["one prompt"] + [(ids(200), ids(50, 3)), (ids(1), ids(250, 4))]
    found = llama.score([before for before, _ in pairs], [after for _, after in pairs], **(EXACT | options))
    check_scores(llama, pairs, found)  # type: ignore[arg-type]


class Counting:
    """A session that counts tokens computed and rows asked for."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.n_tokens = self.n_rows = self.most_rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def decode_batch(self, batch: Any, **options: Any) -> list[Rows]:
        self.n_tokens += sum(len(ids) for _, ids, _ in batch)
        rows = self.session.decode_batch(batch, **options)
        self.n_rows += sum(map(len, rows))
        self.most_rows = max(self.most_rows, sum(map(len, rows)))
        return rows


def counted(model: Model, pairs: Sequence[tuple[list[int], list[int]]], **options: Any) -> Counting:
    with model.session(**{"n_seq_max": 64, "kv_unified": True, **ONE_THREAD, **options}) as session:
        counting = Counting(session)
        scoring.score(counting, pairs)  # type: ignore[arg-type]
        assert [session.n_past(i) for i in range(session.options.n_seq_max)] == [0] * session.options.n_seq_max
    return counting


def test_what_is_shared_is_computed_once_and_only_wanted_rows_are(llama: Model) -> None:
    """Four continuations of a prompt cost one prompt; those of one token nothing more, not even a row."""
    assert (30, 1) == ((c := counted(llama, PAIRS["single tokens"])).n_tokens, c.n_rows)
    pairs = [(ids(30), [*ids(3, i)]) for i in range(4)]
    assert (30 + 4 * 2, 1 + 4 * 2) == ((c := counted(llama, pairs)).n_tokens, c.n_rows)
    prompts = [[*HEAD, i, *ids(2)] for i in range(5)]
    pairs = [(prompt, after) for prompt in prompts for after in ([5], [6])]
    assert (len(HEAD) + 5 * 3, 5) == ((c := counted(llama, pairs)).n_tokens, c.n_rows)
    c = counted(llama, [(ids(2), ids(900, 1))], n_ubatch=32)
    assert (901, 900) == (c.n_tokens, c.n_rows)
    assert c.most_rows <= 32


def test_a_beginning_is_kept_from_wave_to_wave(llama: Model) -> None:
    """More prompts than sequences: what they share is computed for the first ones only."""
    pairs = [(HEAD + ids(2, i), [5]) for i in range(40)]
    distinct = {tuple(before) for before, _ in pairs}
    c = counted(llama, pairs, n_seq_max=9)
    assert len(HEAD) + 2 * len(distinct) >= c.n_tokens


def test_greedy_continuations_are_known_as_such(smollm2: Model) -> None:
    """What greedy decoding gives is the likeliest at each place; with another end it is not."""
    prompt = smollm2.tokenizer.encode("The capital of France is")
    completion = smollm2.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
    other = [*completion.token_ids[:-1], completion.token_ids[-1] ^ 1]
    greedy, changed = smollm2.score(prompt, [completion.token_ids, other])  # type: ignore[misc]
    assert (True, False) == (greedy.is_greedy, changed.is_greedy)
    assert completion.logprobs is not None
    assert greedy.logprobs == pytest.approx([entry.logprob for entry in completion.logprobs], abs=0.05)
    assert greedy.sum > changed.sum


def test_texts_are_scored_as_one_text(smollm2: Model) -> None:
    """Where the caller cuts makes no difference, and likelier words have higher scores."""
    answers = [" Paris", " Rome", " cheese"]
    paris, rome, cheese = smollm2.score("The capital of France is", answers)  # type: ignore[misc]
    assert paris.sum > rome.sum > cheese.sum
    assert paris.is_greedy
    moved = smollm2.score("The capital of France is ", "Paris")
    assert isinstance(moved, scoring.Score)
    assert paris == moved
    both = smollm2.score(["The capital of France is", "The capital of Italy is"], " Rome")
    assert both[0].sum < both[1].sum  # type: ignore[index]


def test_one_or_several_prompts_and_continuations(llama: Model) -> None:
    """One with one gives a score, all else a list; one goes with each of several."""
    a, b = ids(3), ids(4, 1)
    one = llama.score(a, b, **ONE_THREAD)
    assert isinstance(one, scoring.Score)
    assert [one] == llama.score([a], [b], **ONE_THREAD) == llama.score(a, [b], **ONE_THREAD)
    assert 2 == len(llama.score(a, [b, b[:1]], **ONE_THREAD))  # type: ignore[arg-type]
    assert 2 == len(llama.score([a, b], b, **ONE_THREAD))  # type: ignore[arg-type]
    assert one == llama.score(np.array(a), np.array(b), **ONE_THREAD)


def test_misused_scores_are_refused(llama: Model) -> None:
    """Lengths that do not match, nothing to score, nothing to score it after, and what does not fit."""
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        ([[1], [2]], [[3]] * 3, ValueError, r"continuations: expected 2, one for each prompt, got 3"),
        ([[1], 2.5], [[3], [4]], ValueError, r"prompts\[1\]: expected text or a sequence of token ids, got 2.5"),
        ("a", "", ValueError, "continuation: expected at least one token, got ''"),
        ([1], [], ValueError, "continuation: expected at least one token"),
        ("", "a", ValueError, r"pairs\[0\]: the prompt has no tokens"),
        ([1], [2, 99], ValueError, r"pairs\[0\]: expected ids from 0 to 63, got 99"),
        ([64], [2], ValueError, r"token_ids\[0\]: expected an id from 0 to 63, got 64"),
        (ids(200), ids(58), ContextLengthError, r"pairs\[0\]: 257 tokens do not fit a context of 256"),
        ("a", "\ud800", TokenizerError, "lone surrogate"),
    ]
    for prompts, continuations, error, message in cases:
        with pytest.raises(error, match=message):
            llama.score(prompts, continuations, n_ctx=256, **ONE_THREAD)
    with llama.session(n_ctx=256) as session, pytest.raises(ValueError, match="session: expected 3 sequences"):
        scoring.score(session, [([1], [2])])
    closed = Model.load(llama._file.path)
    closed.close()
    with pytest.raises(ClosedError):
        closed.score([1], [2])


@pytest.mark.parametrize("name", ["bert", "llada"])
def test_models_that_continue_nothing_have_no_scores(name: str, tiny: Tiny) -> None:
    """Encoders and diffusion models see what comes; they have neither scores nor a perplexity."""
    with Model.load(tiny(name)) as model:
        with pytest.raises(UnsupportedArchitectureError, match=name):
            model.score([1], [2])
        with pytest.raises(UnsupportedArchitectureError, match=name):
            model.perplexity(ids(40), n_ctx=16)


def test_rows_with_nan_are_no_scores(llama: Model) -> None:
    """A computation gone wrong is an error, not a number."""
    rows = np.zeros((1, 64), np.float32)
    rows[0, 7] = np.nan

    def broken(batch: Any, **_: Any) -> list[Rows]:
        return [rows for _ in batch]

    with llama.session(n_ctx=256, n_seq_max=3) as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "decode_batch", broken)
        with pytest.raises(SamplingError, match=r"logits\[7\] is NaN"):
            scoring.score(session, [([1], [2])])


# ------------------------------------------------------------------------------------------ where a prompt ends


def test_the_border_is_that_of_the_whole_text(smollm2: Model, gemma3_path: Path) -> None:
    """Tokens are those of prompt and continuation read as one text, with one begin token where there is any."""
    for tokenizer in (smollm2.tokenizer, Tokenizer.from_file(gemma3_path)):
        for prompt, continuation in [
            ("Question: 1+1? Answer:", " 2"), ("Question: 1+1? Answer: ", "2"), ("Hel", "lo world"), ("a\n", "\nb"),
            ("Grüß ", "Gott"), ("灯", "台"), ("<|im_start|>user", "\n"), ("x", "   y"),
        ]:  # fmt: skip
            before, after = scoring.encode_pair(tokenizer, prompt, continuation)
            assert [*before, *after] == tokenizer.encode(prompt + continuation, parse_special=True)
            alone = tokenizer.encode(prompt, parse_special=True)
            assert before == alone[: len(before)]
            assert after
            assert len(before) == len(alone) or after[0] != alone[len(before)]


def test_spaces_and_split_words_go_to_the_continuation(smollm2: Model) -> None:
    """A space at the prompt's end belongs to the word behind it, a word cut in two to the continuation."""
    encode = smollm2.tokenizer.encode
    assert (encode("Answer:"), encode(" yes")) == scoring.encode_pair(smollm2.tokenizer, "Answer: ", "yes")
    assert ([], encode("Hello")) == scoring.encode_pair(smollm2.tokenizer, "Hel", "lo")


def test_ids_stay_as_they_are(smollm2: Model) -> None:
    """Token ids are not changed, and a text behind ids is tokenized by itself, without a begin token."""
    encode = smollm2.tokenizer.encode
    assert ([1, 2], [3]) == scoring.encode_pair(smollm2.tokenizer, [1, 2], [3])
    assert (encode("a"), [3]) == scoring.encode_pair(smollm2.tokenizer, "a", [3])
    assert ([1, 2], encode(" b", add_special=False)) == scoring.encode_pair(smollm2.tokenizer, [1, 2], " b")


def test_an_end_token_does_not_come_between(tiny: Tiny) -> None:
    """A vocabulary that ends texts with a token: neither the prompt nor the whole has it."""
    extra = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    with Model.load(tiny("llama", extra=extra)) as model:
        assert [0, *model.tokenizer.encode("ab", add_special=False), 1] == model.tokenizer.encode("ab")
        before, after = scoring.encode_pair(model.tokenizer, "ab", "c")
        assert [0, *model.tokenizer.encode("abc", add_special=False)] == [*before, *after]
        assert 1 == len(model.score("", "a", **ONE_THREAD).token_ids)
        with pytest.raises(TokenizerError, match="texts end with a token of their own"):
            model.perplexity("a" * 99, n_ctx=16)


# ---------------------------------------------------------------------------------------------------- perplexity


@pytest.mark.parametrize(("name", "sizes", "running", "final"), PRINTED, ids=[f"{p[0]}-{p[1]}" for p in PRINTED])
def test_perplexity_is_what_llama_perplexity_prints(
    name: str, sizes: dict[str, int], running: str, final: str, request: pytest.FixtureRequest
) -> None:
    """To the last digit on the machine the tool ran on; elsewhere within what instructions change (test_dumps.py)."""
    reports: list[tuple[int, int, float]] = []
    with Model.load(request.getfixturevalue(f"{name}_path")) as model:
        found = model.perplexity(TEXT.read_text("utf-8"), progress=lambda *report: reports.append(report), **sizes)
    n = len(running.split())
    assert [(i + 1, n, value) for i, value in enumerate(found.running)] == reports
    if machine() == MADE_ON:
        assert running == " ".join(f"{value:.4f}" for value in found.running)
        assert final == f"{found.value:.4f} +/- {found.error:.5f}"
    else:
        assert found.running == pytest.approx([float(value) for value in running.split()], rel=0.03)


def test_perplexity_is_that_of_the_second_halves(llama: Model) -> None:
    """Each window by itself, its first token replaced by bos: from whole rows, in double precision."""
    tokens, n_ctx, negative = ids(70), 16, []
    with llama.session(n_ctx=256, n_threads=1) as session:
        for start in range(0, 64, n_ctx):
            window = tokens[start : start + n_ctx]
            session.clear()
            rows = session.decode([0, *window[1:]], logits="all").astype(np.float64)
            rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
            negative += [-rows[i, window[i + 1]] for i in range(8, 15)]
        for n_seq_max in (1, 2, 3):
            with llama.session(n_ctx=n_seq_max * 256, n_seq_max=n_seq_max, n_threads=1) as many:
                found = scoring.perplexity(many, tokens, n_ctx=n_ctx, bos=0)
                assert found.value == pytest.approx(math.exp(np.mean(negative)), rel=1e-3)
                error = np.std(negative) / math.sqrt(len(negative) - 1) * found.value
                assert found.error == pytest.approx(error, rel=1e-2)
                assert (4, 4 * 7) == (len(found.running), found.n_tokens)
                assert 2 == len(scoring.perplexity(many, tokens, n_ctx=n_ctx, bos=0, n_chunks=2).running)


def test_unsound_windows_are_refused(llama: Model) -> None:
    """Sizes that the tool refuses too, each named."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"n_ctx": 512}, "the text has 70 tokens: expected 1024 at least, two windows of 512"),
        ({"n_ctx": 3}, "n_ctx: expected an integer from 4 on, got 3"),
        ({"n_ctx": 16.0}, "n_ctx: expected an integer"),
        ({"n_ctx": 16, "n_batch": 40}, "n_batch: expected a multiple of n_ctx, 16, or less than that, got 40"),
        ({"n_ctx": 16, "n_batch": 0}, "n_batch: expected an integer from 1 on, got 0"),
        ({"n_ctx": 16, "n_chunks": 0}, "n_chunks: expected an integer from 1 on, got 0"),
    ]
    for sizes, message in cases:
        with pytest.raises(ValueError, match=message):
            llama.perplexity(ids(70), **sizes)


def test_the_command_prints_perplexity(smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The running values on one line, then the final estimate with its error, as the tool does; or JSON."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT.read_text("utf-8")[:3000], "utf-8")
    arguments = ["perplexity", str(smollm2_path), str(text), "--n-ctx", "256", "--n-chunks", "2", "--n-batch", "256"]
    assert main(arguments) == 0
    out = capsys.readouterr().out.splitlines()
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert out[0] == f"[1]{report['running'][0]:.4f},[2]{report['running'][1]:.4f},"
    assert out[1] == f"Final estimate: PPL = {report['perplexity']:.4f} +/- {report['error']:.5f}"
    assert (2, 254, 256) == (report["n_chunks"], report["n_tokens"], report["n_ctx"])
    text.write_text("short", "utf-8")
    assert main(arguments) == 2
    assert "two windows of 256" in capsys.readouterr().err
    assert main([*arguments[:2], str(tmp_path / "missing"), *arguments[3:]]) == 1
    assert "No such file" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- embeddings

TEXTS = [ids(n, n) for n in (5, 30, 1, 17, 30, 300, 2)]


@pytest.mark.parametrize("name", ["llama", "bert", "modern-bert", "gemma-embedding", "lfm2", "gemma3"])
@pytest.mark.parametrize("pooling", [None, "mean", "last", "cls"])
def test_texts_together_have_the_embeddings_they_have_alone(name: str, pooling: Any, tiny: Tiny) -> None:
    """Whatever their lengths, in one order, and of one length if so wanted."""
    with Model.load(tiny(name)) as model:
        with model.session(n_ctx=512, n_threads=1) as session:
            alone = [session.embed(text, pooling=pooling) for text in TEXTS]
        for options in ({}, {"n_seq_max": 2}, {"n_seq_max": 7, "kv_unified": False, "n_ctx": 7 * 512}):
            found = model.embed(TEXTS, pooling=pooling or "none", normalize=False, **ONE_THREAD, **options)
            assert all(near(a, b) for a, b in zip(found, alone, strict=True))
        for rows, expected in zip(model.embed(TEXTS, pooling=pooling or "none", **ONE_THREAD), alone, strict=True):
            assert np.linalg.norm(rows, axis=-1) == pytest.approx(1.0)
            assert near(rows, expected / np.linalg.norm(expected, axis=-1, keepdims=True))


def test_one_text_or_several(llama: Model) -> None:
    """One gives its row, several a matrix, or a list of matrices without pooling; text and ids mean the same."""
    n_embd = llama.config.n_embd
    assert (n_embd,) == llama.embed("the", **ONE_THREAD).shape
    assert (1, n_embd) == llama.embed(["the"], **ONE_THREAD).shape
    assert same(llama.embed("the", **ONE_THREAD), llama.embed(llama.tokenizer.encode("the"), **ONE_THREAD))
    assert (2, n_embd) == llama.embed(["the", "other"], **ONE_THREAD).shape
    assert [(3, n_embd), (2, n_embd)] == [rows.shape for rows in llama.embed([ids(3), ids(2)], pooling="none")]


def test_no_texts_have_no_embeddings(llama: Model, tiny: Tiny) -> None:
    """An empty list gives what a list gives, of length 0; empty ids are one text without tokens, which is refused."""
    for nothing in ([], (), np.empty((0, 0), int)):
        assert (0, llama.config.n_embd) == llama.embed(nothing).shape
        assert [] == llama.embed(nothing, pooling="none")
    with Model.load(tiny("bert", classifier=True)) as model:
        assert (0, model.config.n_labels) == model.embed([], pooling="rank").shape
        assert [] == model.rerank("where", [])
    for empty in (np.empty(0, int), "", [[]]):
        with pytest.raises(ValueError, match="token_ids: expected a non-empty sequence"):
            llama.embed(empty)


def test_the_file_says_how_to_pool(tiny: Tiny) -> None:
    """pooling_type counts unless the caller says something else; without either it is the mean."""
    for kind, pooling in ((None, "mean"), (1, "mean"), (2, "cls"), (3, "last")):
        extra = {} if kind is None else {"bert.pooling_type": kind}
        with Model.load(tiny("bert", extra=extra)) as model:
            assert kind == model.config.pooling
            assert same(model.embed(ids(9), **ONE_THREAD), model.embed(ids(9), pooling=pooling, **ONE_THREAD))
    with Model.load(tiny("bert", extra={"bert.pooling_type": 0})) as model:
        assert (9, model.config.n_embd) == model.embed(ids(9), **ONE_THREAD).shape


def test_misused_embeddings_are_refused(llama: Model) -> None:
    """Unknown poolings, no tokens, too many of them, and a rank without a classifier."""
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ("a", {"pooling": "max"}, ValueError, "pooling: expected None or one of none, mean, cls, last, rank"),
        ("a", {"normalize": 1}, ValueError, "normalize: expected True or False"),
        ("a", {"pooling": "rank"}, UnsupportedArchitectureError, "no classifier"),
        ([[1], []], {}, ValueError, "token_ids: expected a non-empty sequence"),
        ([[1], ids(300)], {"n_ctx": 256}, ContextLengthError, "300"),
        ([[1], 3.5], {}, ValueError, "expected text or a sequence of token ids"),
    ]
    for texts, options, error, message in cases:
        with pytest.raises(error, match=message):
            llama.embed(texts, **options)
    with llama.session(n_seq_max=2) as session, pytest.raises(ValueError, match="each sequence may appear once"):
        session.embed_batch([(0, [1]), (0, [2])])


def test_zeros_have_no_direction() -> None:
    """A row of zeros stays one, as in llama.cpp."""
    rows = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    assert np.allclose([[0.6, 0.8], [0.0, 0.0]], scoring.normalized(rows))


# --------------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("name", RERANKERS)
def test_a_classifier_scores_what_is_pooled(name: str, tiny: Tiny) -> None:
    """One score for each label, alone and in a batch; without a classifier there is none."""
    labels = 1 if name == "jina-bert-v2" else 3
    extra = {f"{name}.classifier.output_labels": [f"label {i}" for i in range(labels)]}
    with Model.load(tiny(name, classifier=True, bias=True, extra=extra)) as model:
        rows = model.embed(TEXTS, pooling="rank", **ONE_THREAD)
        assert (len(TEXTS), labels) == rows.shape
        alone = np.stack([model.embed(text, pooling="rank", **ONE_THREAD) for text in TEXTS])
        assert np.allclose(alone, rows, atol=2e-2)
        assert rows.std() > 1e-3
        if name.startswith("qwen3"):
            assert rows.sum(axis=1) == pytest.approx(1.0)
    with Model.load(tiny(name)) as plain, pytest.raises(UnsupportedArchitectureError, match="no classifier"):
        plain.embed([1], pooling="rank")


def test_documents_are_ranked(tiny: Tiny) -> None:
    """The best first, with its place among those given; ids are those of the pair."""
    with Model.load(tiny("bert", classifier=True, extra={"tokenizer.ggml.add_bos_token": True})) as model:
        documents = ["the other", "a", "in the end", "the other"]
        ranks = model.rerank("where", documents, **ONE_THREAD)
        assert [0, 1, 2, 3] == sorted(rank.index for rank in ranks)
        assert sorted((rank.score for rank in ranks), reverse=True) == [rank.score for rank in ranks]
        for rank in ranks:
            pair = scoring.encode_rank(model.tokenizer, "where", documents[rank.index])
            assert rank.score == pytest.approx(float(model.embed(pair, pooling="rank", **ONE_THREAD)[0]), abs=1e-4)
        assert [] == model.rerank("where", [])
        for query, given, message in (
            ("q", "one text", "documents: expected a sequence of texts"),
            ("q", [1], r"documents\[0\]: expected text, got 1"),
            (None, ["a"], "query: expected text, got None"),
        ):
            with pytest.raises(ValueError, match=message):
                model.rerank(query, given)  # type: ignore[arg-type]


def test_query_and_document_are_put_together_as_by_llama_cpps_server(tiny: Tiny) -> None:
    """Bos, query, eos, sep, document, eos, as far as the vocabulary adds them."""
    keys = {f"tokenizer.ggml.add_{name}_token": True for name in ("bos", "eos", "sep")}
    sep, no_sep = {"tokenizer.ggml.seperator_token_id": 5}, {"tokenizer.ggml.add_sep_token": False}
    cases: list[tuple[dict[str, Any], list[int | str]]] = [
        (keys | sep, [0, "q", 1, 5, "d", 1]),
        (keys | sep | no_sep, [0, "q", 1, "d", 1]),
        (sep, ["q", "d"]),
        ({"tokenizer.ggml.pre": "roberta-bpe"} | sep, ["q", 5, "d"]),
    ]
    for extra, expected in cases:
        with Model.load(tiny("llama", extra=extra)) as model:
            q, d = (model.tokenizer.encode(text, add_special=False) for text in ("the query", "it is"))
            found = scoring.encode_rank(model.tokenizer, "the query", "it is")
            assert [id for part in expected for id in {"q": q, "d": d}.get(part, [part])] == found  # type: ignore[arg-type]
    with Model.load(tiny("llama", extra=keys)) as model, pytest.raises(TokenizerError, match="between bos, eos or sep"):
        scoring.encode_rank(model.tokenizer, "the", "it")


def test_a_template_for_ranks_is_filled(tiny: Tiny) -> None:
    """The template's control tokens are such, those that query and document spell are text."""
    template = "<|bos|>{query}!<|eos|>{document}<|bos|>"
    with Model.load(tiny("llama", extra={"tokenizer.chat_template.rerank": template})) as model:
        encode = model.tokenizer.encode
        found = scoring.encode_rank(model.tokenizer, "the {document}", "it")
        assert [0, *encode("the {document}!"), 1, *encode("it"), 0] == found
        assert [0, *encode("<|eos|>!"), 1, *encode("<|bos|>"), 0] == scoring.encode_rank(
            model.tokenizer, "<|eos|>", "<|bos|>"
        )


# ------------------------------------------------------------------------------------------------ against llama.cpp


@LIVE
@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "bert", "modern-bert", "jina-bert-v2", "nomic-bert", "qwen3"])
def test_batches_of_embeddings_have_llama_cpps_bits(name: str, pooling: Any, tiny: Tiny) -> None:
    """Several texts in one micro-batch, as in one llama_decode call."""
    from reference.llama import ReferenceModel

    # with fewer sequences than tokens llama.cpp aborts for the mean, as it reserves graphs that drop rows before it
    options = {"n_ctx": 256, "n_seq_max": 64, "n_ubatch": 64, "kv_unified": True, "n_threads": 1}
    theirs, ours = ReferenceModel(tiny(name)), Model.load(tiny(name))
    reference = theirs.session(**options, embeddings=True, pooling=pooling)
    with theirs, ours, reference, ours.session(**options) as session:
        for texts in ([ids(20), ids(7, 1), ids(1, 2)], [ids(5, 3), ids(30, 4)], [ids(1)]):
            expected = reference.embed_batch(texts)
            found = session.embed_batch(enumerate(texts), pooling=pooling)
            assert all(same(a, b) for a, b in zip(expected, found, strict=True))


@LIVE
@pytest.mark.parametrize("name", RERANKERS)
def test_ranks_have_llama_cpps_bits(name: str, tiny: Tiny) -> None:
    """Every architecture with a classifier, one text and several, with labels and biases and without."""
    from reference.llama import ReferenceModel

    options = {"n_ctx": 256, "n_seq_max": 64, "n_ubatch": 64, "kv_unified": True, "n_threads": 1}
    two = {f"{name}.classifier.output_labels": ["yes", "no"]} if name != "jina-bert-v2" else {}
    mean = {f"{name}.classifier.pooling_type": 1}
    for variant in ({}, {"bias": True, "extra": two}, {"extra": two | mean}):
        path = tiny(name, classifier=True, **variant)
        theirs, ours = ReferenceModel(path), Model.load(path)
        reference = theirs.session(**options, embeddings=True, pooling="rank")
        with theirs, ours, reference, ours.session(**options) as session:
            for texts in ([ids(20), ids(7, 1), ids(1, 2)], [ids(30, 4)]):
                expected = reference.embed_batch(texts)
                found = session.embed_batch(enumerate(texts), pooling="rank")
                assert all(same(a, b) for a, b in zip(expected, found, strict=True)), variant


@LIVE
def test_scores_are_those_of_llama_cpps_logits(smollm2_path: Path, smollm2: Model) -> None:
    """Log-probabilities from llama.cpp's rows of the same text, to rounding."""
    from reference.llama import ReferenceModel

    prompt, answers = "Water freezes at", [" zero degrees Celsius", " noon", " 32 degrees Fahrenheit"]
    pairs = [scoring.encode_pair(smollm2.tokenizer, prompt, answer) for answer in answers]
    scores = smollm2.score(prompt, answers)
    with ReferenceModel(smollm2_path) as theirs, theirs.session(n_ctx=256) as reference:
        for (before, after), score in zip(pairs, scores, strict=True):  # type: ignore[call-overload]
            reference.clear()
            rows = reference.decode([*before, *after[:-1]], logits="all")[len(before) - 1 :].astype(np.float64)
            rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
            assert score.logprobs == pytest.approx([rows[i, id] for i, id in enumerate(after)], abs=0.05)
