"""Embeddings, and models that keep nothing: what comes back, what stays, and that the bits are llama.cpp's.

The variants of encoders and diffusion models are compared in test_parity.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rewrite import Entry, rewrite
from helpers.rows import ids, near, same

from ggufpy import ClosedError, ContextLengthError, GGUFError, Model, Session, UnsupportedArchitectureError, arch
from ggufpy.gguf import GGMLType

Tiny = Callable[..., Path]
Rows = np.ndarray
SMALL: dict[str, Any] = {"n_ctx": 256, "n_threads": 1}
POOLINGS = (None, "mean", "last", "cls")
CACHELESS = [name for name in arch.names() if arch.find(name).cacheless]
EMBEDDING_ONLY = [name for name in CACHELESS if not arch.find(name).logits]
DIFFUSION = [name for name in CACHELESS if arch.find(name).logits]
FLASH = pytest.mark.parametrize("flash_attn", [True, False], ids=["flash", "plain"])
LIVE = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")


@pytest.fixture(scope="module")
def bert(tiny: Tiny) -> Iterator[Model]:
    with Model.load(tiny("bert")) as model:
        yield model


# ------------------------------------------------------------------------------------------------ what comes back


@pytest.mark.parametrize("name", ["llama", "gemma3", "bert", "modern-bert", "llada"])
def test_pooled_embeddings_are_made_of_the_tokens(name: str, tiny: Tiny) -> None:
    """One row a token; the last, the first or the mean of them where that is asked for."""
    with Model.load(tiny(name)) as model, model.session(**SMALL) as session:
        rows = session.embed(ids(30))
        assert (30, model.config.n_embd) == rows.shape
        assert rows.dtype == np.float32
        assert same(rows[-1], session.embed(ids(30), pooling="last"))
        assert same(rows[0], session.embed(ids(30), pooling="cls"))
        assert near(rows.mean(axis=0), session.embed(ids(30), pooling="mean"))


def test_rows_are_the_callers(llama: Model) -> None:
    """A later computation does not change what was returned."""
    with llama.session(**SMALL) as session:
        for pooling in (None, "mean", "last"):
            rows = session.embed(ids(5), pooling=pooling)
            before = rows.copy()
            session.embed(ids(5, seed=1), pooling=pooling)
            assert same(before, rows)
            assert rows.flags.owndata
            assert rows.flags.writeable


def test_embeddings_are_what_logits_are_made_of(llama: Model) -> None:
    """The rows times the output matrix are the logits."""
    with llama.session(**SMALL) as session:
        logits = session.embed(ids(9)) @ llama.weights["output.weight"].get().T
        assert np.allclose(session.decode(ids(9), logits="all"), logits, atol=1e-3)


def test_causal_models_embed_prefixes_alike(llama: Model, bert: Model) -> None:
    """A decoder's tokens do not know what follows; an encoder's do."""
    for model, causal in ((llama, True), (bert, False)):
        with model.session(**SMALL) as session:
            whole, part = session.embed(ids(20)), session.embed(ids(20)[:10])
            assert causal is near(whole[:10], part)


def test_long_texts_are_cut_into_micro_batches(llama: Model) -> None:
    """A decoder's rows do not depend on the cuts; pooled ones have to be computed together."""
    with llama.session(**SMALL) as whole, llama.session(**SMALL, n_ubatch=16) as cut:
        assert near(whole.embed(ids(100)), cut.embed(ids(100)))
        assert near(whole.embed(ids(16), pooling="mean"), cut.embed(ids(16), pooling="mean"))
        for pooling in ("mean", "last", "cls"):
            with pytest.raises(ContextLengthError, match=r"17 tokens .* micro-batch of 16"):
                cut.embed(ids(17), pooling=pooling)
        assert cut.n_past() == 0


def test_the_second_dense_matrices_follow_the_pooling(tiny: Tiny) -> None:
    """EmbeddingGemma's result is the pooled rows times two matrices."""
    with Model.load(tiny("gemma-embedding")) as model, model.session(**SMALL) as session:
        dense = [model.weights[f"dense_{i}.weight"].get() for i in (2, 3)]
        with Model.load(tiny("gemma-embedding", dense_2_out=0, dense_3_in=0)) as plain:
            assert "dense_2.weight" not in plain.weights
        assert (256, 128) == dense[0].shape
        assert (128,) == session.embed(ids(5), pooling="mean").shape
        assert near(session.embed(ids(5)).mean(axis=0), session.embed(ids(5), pooling="mean"))


# --------------------------------------------------------------------------------------------- what stays as it was


def test_embedding_leaves_the_session_as_it_was(llama: Model) -> None:
    """No token stays, and what is decoded afterwards has the bits it has without."""
    with llama.session(**SMALL) as session, llama.session(**SMALL) as other:
        for pooling in POOLINGS:
            session.embed(ids(50), pooling=pooling)
            assert session.n_past() == 0
            assert [] == session.tokens()
        for _ in range(2):
            assert same(other.decode(ids(20, seed=3), logits="all"), session.decode(ids(20, seed=3), logits="all"))
            session.clear()
            other.clear()


def test_another_sequence_is_not_touched(llama: Model) -> None:
    """Embedding in one sequence does not change what another one goes on with."""
    for unified in (False, True):
        options = {**SMALL, "n_seq_max": 2, "kv_unified": unified}
        with llama.session(**options) as session, llama.session(**options) as other:
            for s in (session, other):
                s.decode(ids(20))
            rows = session.embed(ids(30, seed=1), seq_id=1)
            assert near(rows, other.embed(ids(30, seed=1), seq_id=1))
            assert same(other.decode([5]), session.decode([5]))
            assert (21, 0) == (session.n_past(0), session.n_past(1))


def test_the_sequence_has_to_be_empty(llama: Model) -> None:
    """What a sequence holds would change the embeddings, so it is refused and kept."""
    with llama.session(**SMALL) as session:
        session.decode(ids(3))
        with pytest.raises(ValueError, match="seq_id: expected an empty sequence, 0 has 3 tokens"):
            session.embed(ids(5))
        assert session.n_past() == 3


@pytest.mark.parametrize("name", CACHELESS)
def test_nothing_is_kept_between_calls(name: str, tiny: Tiny) -> None:
    """The same tokens give the same bits however often and after whatever; there is no cache to pay for."""
    with Model.load(tiny(name)) as model, model.session(**SMALL) as session:
        first = session.embed(ids(12))
        session.embed(ids(30, seed=1), pooling="mean")
        assert same(first, session.embed(ids(12)))
        assert not near(first, session.embed(ids(12, seed=1)))
        assert (0, 0) == (session.n_past(), session.memory_nbytes)
        for manage in (session.clear, lambda: session.trim(0, 0), lambda: session.fork(0, 0)):
            manage()


@pytest.mark.parametrize("name", DIFFUSION)
def test_diffusion_models_see_the_whole_call(name: str, tiny: Tiny) -> None:
    """The last token changes the first one's logits; the rows asked for are cut from all of them."""
    with Model.load(tiny(name)) as model, model.session(**SMALL, n_ubatch=32) as session:
        tokens = ids(20)
        rows = session.decode(tokens, logits="all")
        assert same(rows[-1:], session.decode(tokens))
        assert same(rows[[7, 0]], session.decode(tokens, logits=[7, 0]))
        assert (0, 64) == session.decode(tokens, logits=[]).shape
        assert not near(rows[:1], session.decode([*tokens[:-1], tokens[-1] ^ 1], logits=[0]))
        assert session.n_past() == 0
        with pytest.raises(ContextLengthError, match=r"33 tokens .* micro-batch of 32"):
            session.decode(ids(33))


def test_sequences_of_one_call_do_not_see_each_other(tiny: Tiny) -> None:
    """Two sequences in one batch have the rows that each has alone."""
    with Model.load(tiny("llada")) as model, model.session(**SMALL, n_seq_max=2, n_ubatch=32) as session:
        a, b = ids(11), ids(17, seed=1)
        together = session.decode_batch([(1, a, "all"), (0, b, [3, 1])])
        assert near(session.decode(a, logits="all"), together[0])
        assert near(session.decode(b, logits=[3, 1]), together[1])
        with pytest.raises(ContextLengthError, match="micro-batch"):
            session.decode_batch([(0, ids(30), "all"), (1, ids(3), "all")])


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("pooling", ["max", "", "none", 0, True, ["mean"], b"mean"])
def test_unknown_poolings_are_refused(pooling: Any, llama: Model) -> None:
    """Only the documented names stand for a pooling."""
    with llama.session(**SMALL) as session, pytest.raises(ValueError, match="pooling: expected None, "):
        session.embed([1, 2], pooling=pooling)


@pytest.mark.parametrize("tokens", [[], [64], [-1], [1.5], "ab", [[1]], None])
def test_unsound_tokens_are_refused(tokens: Any, llama: Model, bert: Model) -> None:
    """Tokens are checked as for decoding, before anything is computed."""
    for model in (llama, bert):
        with model.session(**SMALL) as session:
            for pooling in POOLINGS:
                with pytest.raises(ValueError, match="token_ids"):
                    session.embed(tokens, pooling=pooling)


@pytest.mark.parametrize("name", EMBEDDING_ONLY)
def test_models_without_an_output_matrix_give_no_logits(name: str, tiny: Tiny) -> None:
    """Decoding names the architecture and the way to embeddings, and leaves the session usable."""
    with Model.load(tiny(name)) as model, model.session(**SMALL) as session:
        with pytest.raises(UnsupportedArchitectureError, match=rf"{name} models give no logits, see Session\.embed"):
            session.decode([1, 2])
        with pytest.raises(UnsupportedArchitectureError, match="no logits"):
            model.generate([1, 2], max_tokens=1)
        assert np.isfinite(session.embed([1, 2])).all()
        assert "output.weight" not in model.weights


def test_positions_behind_the_table_are_refused(tiny: Tiny) -> None:
    """Learned positions end with the table, whatever the context: 1024 of them here, for decoders and encoders."""
    for name in ("gpt2", "bert"):
        model = Model.load(tiny(name))
        with pytest.warns(UserWarning, match="trained on 1024"):
            session = model.session(n_ctx=2048, n_ubatch=2048, n_threads=1)
        with model, session:
            assert (1024, 128) == session.embed(ids(1024)).shape
            with pytest.raises(ContextLengthError, match="1025 more do not fit its context of 1024"):
                session.embed(ids(1025))


def test_a_closed_session_embeds_nothing(bert: Model) -> None:
    """As for any other use."""
    session = bert.session(**SMALL)
    session.close()
    with pytest.raises(ClosedError):
        session.embed([1])


def test_faults_of_encoders_files_are_named(tiny: Tiny, tmp_path: Path) -> None:
    """Missing counts, tables of another shape and types that cannot be added are found when the file is opened."""
    bert, gemma = tiny("bert"), tiny("gemma-embedding")

    def as_f16(tensors: dict[str, Entry]) -> None:
        tensors["token_types.weight"] = Entry((2, 128), GGMLType.F16, bytes(512))

    cases: list[tuple[Path, dict[str, Any], Any, str]] = [
        (bert, {"tokenizer.ggml.token_type_count": 0}, None, "tokenizer.ggml.token_type_count: expected at least 1"),
        (bert, {"tokenizer.ggml.token_type_count": 3}, None, r"token_types.weight: expected \[128, 3\], file has"),
        (bert, {"bert.context_length": 512}, None, r"position_embd.weight: expected \[128, 512\], file has"),
        (bert, {}, as_f16, "token_types.weight: expected type f32, file has f16"),
        (gemma, {"gemma-embedding.dense_2_feat_in": 64}, None, "dense_2_feat_in 64"),
        (gemma, {"gemma-embedding.dense_3_feat_in": 64}, None, "dense_2_feat_out 256 and dense_3_feat_in 64"),
    ]
    for path, keys, edit, message in cases:
        with pytest.raises(GGUFError, match=message):
            Model.load(rewrite(path, tmp_path / "x.gguf", keys, edit))


# ------------------------------------------------------------------------------------------------ against llama.cpp


@LIVE
@pytest.mark.parametrize("name", arch.names())
def test_embeddings_have_llama_cpps_bits(name: str, tiny: Tiny) -> None:
    """Every architecture's rows and all poolings of many tokens and of one, flash attention on and off."""
    from reference.llama import ReferenceModel

    with ReferenceModel(tiny(name)) as theirs, Model.load(tiny(name)) as ours:
        for flash_attn in (True, False):
            settings = {**SMALL, "flash_attn": flash_attn}
            with ours.session(**settings) as session:
                for pooling in POOLINGS:
                    with theirs.session(**settings, embeddings=True, pooling=pooling) as reference:
                        for n in (40, 1):
                            expected = reference.embed(ids(n))
                            assert np.isfinite(expected).all()
                            assert expected.std() > 0.01
                            assert same(expected, session.embed(ids(n), pooling=pooling)), (flash_attn, pooling, n)


@LIVE
@FLASH
@pytest.mark.parametrize("options", [{}, {"n_swa": 16}], ids=["full", "window"])
def test_decoders_that_look_ahead_have_llama_cpps_bits(options: dict[str, Any], flash_attn: bool, tiny: Tiny) -> None:
    """A file with attention.causal = false keeps its cache, and its tokens see those of their call behind them too."""
    from reference.llama import ReferenceModel

    path = tiny("gemma3" if options else "llama", causal_attn=False, **options)
    settings = {**SMALL, "flash_attn": flash_attn}
    theirs, ours = ReferenceModel(path), Model.load(path)
    with theirs, ours, theirs.session(**settings) as reference, ours.session(**settings) as session:
        for part in (ids(40), ids(9, seed=1), ids(1, seed=2)):
            assert same(reference.decode(part, logits="all"), session.decode(part, logits="all"))


def test_a_session_of_an_encoder_shows_itself(bert: Model) -> None:
    """Its size is that of the context, as for all sessions."""
    with bert.session(**SMALL) as session:
        assert isinstance(session, Session)
        assert "<Session bert: 1 x 256 tokens>" == repr(session)
