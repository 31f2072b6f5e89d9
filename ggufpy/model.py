"""A model: a file, its weights, its architecture and its tokenizer. Immutable, and shared by all its sessions.

This file joins the pieces and owns none of their work. Everything a user starts with is a method here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np

from ggufpy import arch
from ggufpy.arch import Config
from ggufpy.backend import Device, cpu_device, devices
from ggufpy.batch import integers
from ggufpy.errors import ClosedError, GGUFError, TokenizerError, UnsupportedArchitectureError
from ggufpy.gguf import GGUFFile
from ggufpy.session import MAX_CELLS, MAX_SEQUENCES, Session, SessionOptions, integer, pad
from ggufpy.weights import Layout, Progress, Weights

# Text, sampling and downloads are imported where they are used: loading a model and decoding ids does without them.
if TYPE_CHECKING:
    from ggufpy.batch import FloatArray
    from ggufpy.engine import Step
    from ggufpy.generate import Completion, CompletionChunk
    from ggufpy.sampling import SamplingParams
    from ggufpy.scoring import Perplexity, Rank, Score
    from ggufpy.speculation import Drafting
    from ggufpy.tokenizer import Tokenizer

__all__ = ["Messages", "Model", "Prompt"]

Prompt = str | Sequence[int]
"""Text, or token ids."""
Messages = Sequence[Mapping[str, Any]]
"""Chat messages as in OpenAI's API: [{"role": "user", "content": "..."}]."""
MAX_NUM_SEQS = 32
"""How many prompts of a list are computed together: enough to make the most of each weight that is read."""

_POOLINGS: tuple[Literal["none", "mean", "cls", "last", "rank"], ...] = ("none", "mean", "cls", "last", "rank")
"""In the order of `enum llama_pooling_type`."""


class Model:
    """A GGUF model that is ready to run. Made by `Model.load` or `Model.from_pretrained`; a context manager."""

    def __init__(
        self, file: GGUFFile, declaration: type[arch.Decoder], config: Config, weights: Weights, layout: Layout
    ):
        self._file = file
        self._declaration = declaration
        self._config = config
        self._weights: Weights | None = weights
        self._layout = layout
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._tokenizer_lock = threading.Lock()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int | None = None,
        devices: Sequence[Device] | None = None,
        use_mmap: bool = True,
        repack: bool = False,
        progress: Progress | None = None,
    ) -> Model:
        """Open a GGUF file and bind its weights; on the CPU nothing of them is read until it is used.

        n_gpu_layers  how many layers, the output counted as one, the GPUs get; None: all, where there is a GPU
        devices       the GPUs to use; None: all that ggml finds
        use_mmap      False reads the weights into memory of our own, which a change of the file cannot touch
        repack        copy weights into the layouts ggml computes fastest with, as llama.cpp does by default;
                      bits then differ a little from those of mapped weights
        progress      called with (bytes done, bytes in all) while weights are copied

        Raises OSError where the file cannot be opened, GGUFError where it is not a sound model (all faults in one
        message), UnsupportedArchitectureError, BackendError where a device or memory is missing, and ValueError for
        an option of the wrong type.
        """
        for name, value in (("use_mmap", use_mmap), ("repack", repack)):
            if not isinstance(value, bool):
                raise ValueError(f"{name}: expected True or False, got {value!r:.60}")
        gpus = _gpus(devices, n_gpu_layers)
        file = _open_file(path)
        try:
            if "general.architecture" not in file.metadata:
                raise GGUFError(f"{file.path}: general.architecture: the key is missing")
            declaration = arch.find(file.metadata["general.architecture"])
            config = declaration.config(file.metadata, path=str(file.path))
            table = list(declaration(config).tensors(file.tensors))
            arch.check_tensors(file, table)
            layout = Layout.of(config.n_layer, cpu_device(), gpus, n_gpu_layers)
            stand_ins = declaration.stand_ins if declaration.logits else None
            weights = Weights.load(
                file, table, layout, stand_ins=stand_ins, use_mmap=use_mmap, repack=repack, progress=progress
            )
        except BaseException:
            file.close()
            raise
        return cls(file, declaration, config, weights, layout)

    @classmethod
    def from_pretrained(cls, name: str, filename: str | None = None, **options: Any) -> Model:
        """Load a named model ("smollm2-135m-instruct", "gemma-3-270m"), fetched once and kept in a cache.

        `options` are those of `load`. Raises what `hub.fetch` and `load` raise.
        """
        if filename is not None:
            raise ValueError(f"filename: named models are one file each, got {filename!r}")
        from ggufpy import hub

        return cls.load(hub.fetch(name, progress=options.get("progress")), **options)

    # ---------------------------------------------------------------------------------------------------- properties

    @property
    def config(self) -> Config:
        """The hyper-parameters."""
        return self._config

    @property
    def is_recurrent(self) -> bool:
        """Whether layers keep a state, which knows no way back: such sequences cannot be cut short (Session.trim)."""
        return bool(self._declaration(self._config).states())

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's metadata, as `GGUFFile.metadata`."""
        return self._file.metadata

    @property
    def devices(self) -> list[Device]:
        """The devices that compute, the CPU last."""
        return self._layout.devices

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, read from the file on first use. TokenizerError where the vocabulary is unsound."""
        with self._tokenizer_lock:
            return self._tokenizer

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        from ggufpy.tokenizer import Tokenizer

        return Tokenizer.from_metadata(self._file.metadata)

    @property
    def weights(self) -> Weights:
        """The weights by name. ClosedError after `close`."""
        self._check_open()
        return cast(Weights, self._weights)

    # ------------------------------------------------------------------------------------------------------ sessions

    def session(self, **options: Any) -> Session:
        """Open a context with a memory of its own. Keywords, meanings and limits are those of `SessionOptions`."""
        self._check_open()
        settings = SessionOptions(**options)
        session = Session(
            self._declaration, self._config, self.weights, self._layout, settings, lambda: self._fingerprint
        )
        self._sessions.add(session)
        return session

    @functools.cached_property
    def _fingerprint(self) -> str:
        from ggufpy import snapshots

        return snapshots.fingerprint(self._file)

    # ---------------------------------------------------------------------------------------------------- generation

    @overload
    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> list[Completion]: ...
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        session: Session | None = None,
        cancel: threading.Event | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
        draft: Model | Drafting | None = None,
        n_keep: int | None = None,
        **overrides: Any,
    ) -> Completion | list[Completion]:
        """Continue a prompt, or each of a list; returns a Completion, or a list of as many in the same order.

        A prompt is text, in which control tokens are recognized, or token ids. `overrides` are fields of
        SamplingParams; with n above 1 the result is a list that has n completions of each prompt, one after another.
        Of a list, `max_num_seqs` are computed together, each on a sequence of its own. With a `session` a single prompt
        takes its sequence 0, a list all of them, and what they hold already of a prompt is not computed again. `draft`
        guesses tokens ahead (`PromptLookup`, `DraftModel`, a small Model): faster where it is right often. Setting
        `cancel`, from any thread, ends the answers before the next token or the prompt's next micro-batch. An answer
        ends where the context does, but with `n_keep` it goes on: half of what stands behind the first n_keep tokens
        is dropped (`Session.shift`), each time the context is full, without `max_tokens` perhaps for ever.

        Raises SamplingError, ContextLengthError, TokenizerError, UnsupportedArchitectureError for what a model cannot
        do, ValueError for what is no prompt, and ClosedError.
        """
        params = _params(params, overrides)
        steps = self._answer(prompt, params, session, cancel, max_num_seqs, draft, n_keep)
        with contextlib.nullcontext() if session is None else session.lock:  # other threads' calls wait for the end
            done = {index: chunk.completion for step in steps for index, chunk in step if chunk.completion}
        return [done[index] for index in sorted(done)] if _is_many(prompt, params) else done[0]

    @overload
    def stream_generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Generator[CompletionChunk, None, None]: ...
    @overload
    def stream_generate(
        self, prompt: Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> Generator[tuple[int, CompletionChunk], None, None]: ...
    def stream_generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        session: Session | None = None,
        cancel: threading.Event | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
        draft: Model | Drafting | None = None,
        n_keep: int | None = None,
        **overrides: Any,
    ) -> Generator[CompletionChunk, None, None] | Generator[tuple[int, CompletionChunk], None, None]:
        """Continue a prompt and yield a chunk for each token; the last chunk holds the whole Completion.

        For a list of prompts, or with n above 1, yields (index, chunk), the index being the completion's in the list
        that `generate` returns. Arguments are those of `generate`, and are checked at once.
        """
        params = _params(params, overrides)
        steps = self._answer(prompt, params, session, cancel, max_num_seqs, draft, n_keep)
        return _pairs(steps) if _is_many(prompt, params) else _chunks(steps)

    @overload
    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion: ...
    @overload
    async def agenerate(
        self, prompt: Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> list[Completion]: ...
    async def agenerate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        session: Session | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
        draft: Model | Drafting | None = None,
        n_keep: int | None = None,
        **overrides: Any,
    ) -> Completion | list[Completion]:
        """Do what `generate` does, tokenizing too, in worker threads; the event loop goes on meanwhile.

        Cancel the task to end it, in the middle of a graph (CPU). A `session` given is free when the CancelledError
        arrives, and other calls on it are not stopped.
        """
        from ggufpy.threads import in_threads

        params = _params(params, overrides)
        done: dict[int, Completion] = {}
        steps = in_threads(lambda stop: self._answer(prompt, params, session, stop, max_num_seqs, draft, n_keep))
        async for step in steps:
            done |= {index: chunk.completion for index, chunk in step if chunk.completion}
        return [done[index] for index in sorted(done)] if _is_many(prompt, params) else done[0]

    @overload
    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[CompletionChunk, None]: ...
    @overload
    def astream(
        self, prompt: Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[tuple[int, CompletionChunk], None]: ...
    async def astream(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        session: Session | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
        draft: Model | Drafting | None = None,
        n_keep: int | None = None,
        **overrides: Any,
    ) -> AsyncGenerator[Any, None]:
        """Yield what `stream_generate` yields, computed in worker threads; the event loop goes on meanwhile.

        Arguments are checked with the first chunk. Cancelling the task, or closing the generator, ends the answers.
        """
        from ggufpy.threads import in_threads

        params = _params(params, overrides)
        many = _is_many(prompt, params)
        steps = in_threads(lambda stop: self._answer(prompt, params, session, stop, max_num_seqs, draft, n_keep))
        async with contextlib.aclosing(steps):
            async for step in steps:
                for index, chunk in step:
                    yield (index, chunk) if many else chunk

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        session: Session | None = None,
        cancel: threading.Event | None = None,
        **overrides: Any,
    ) -> Completion:
        """Answer a conversation with the file's chat template, or with the one given.

        Text in messages stays text: it cannot forge control tokens. `chat_template` is a template or the name of one
        in the file; `tools` and `chat_template_kwargs` (such as enable_thinking) are what it may ask for; the rest are
        `generate`'s. TemplateError where there is no template, or where it refuses the messages.
        """
        ids = self._render(messages, tools, chat_template, chat_template_kwargs, session)
        return self.generate(ids, params, session=session, cancel=cancel, **overrides)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        session: Session | None = None,
        cancel: threading.Event | None = None,
        **overrides: Any,
    ) -> Generator[CompletionChunk, None, None]:
        """Answer a conversation and yield a chunk for each token. Arguments are those of `chat`."""
        ids = self._render(messages, tools, chat_template, chat_template_kwargs, session)
        return self.stream_generate(ids, params, session=session, cancel=cancel, **overrides)

    async def achat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        session: Session | None = None,
        **overrides: Any,
    ) -> Completion:
        """Do what `chat` does as `agenerate` does it."""
        ids = await self._arender(messages, tools, chat_template, chat_template_kwargs, session)
        return await self.agenerate(ids, params, session=session, **overrides)

    async def astream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        session: Session | None = None,
        **overrides: Any,
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Yield what `stream_chat` yields as `astream` does it."""
        ids = await self._arender(messages, tools, chat_template, chat_template_kwargs, session)
        async with contextlib.aclosing(self.astream(ids, params, session=session, **overrides)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _arender(self, *arguments: Any) -> list[int]:
        import asyncio

        return await asyncio.to_thread(self._render, *arguments)

    def _render(
        self,
        messages: Messages,
        tools: Sequence[Any] | None,
        template: str | None,
        more: Mapping[str, Any] | None,
        session: Session | None,
    ) -> list[int]:
        """Turn a conversation into a prompt, sure that it can be continued."""
        self._check_can_continue(session)
        ids = self.tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, tokenize=True, **(more or {})
        )
        return cast("list[int]", ids)

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, parse_special=True)
        return cast("list[int]", integers(prompt, "prompt: expected text or a sequence of token ids").tolist())

    def _answer(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams,
        session: Session | None,
        cancel: threading.Event | None,
        max_num_seqs: int,
        draft: Model | Drafting | None,
        n_keep: int | None,
    ) -> Generator[Step, None, None]:
        """Check a request and return what computes it, step by step."""
        from ggufpy import engine

        self._check_can_continue(session)
        if not (cancel is None or isinstance(cancel, threading.Event)):
            raise ValueError(f"cancel: expected a threading.Event, got {cancel!r:.60}")
        drafting = None if draft is None else self._drafting(draft)
        ids = [self._encode(p) for p in ([prompt] if _is_single(prompt) else prompt)]  # type: ignore[arg-type]
        n_seq = min(max(1, len(ids) * params.n), integer("max_num_seqs", max_num_seqs, 1, MAX_SEQUENCES))
        own = self._session_for(n_seq, max(map(len, ids), default=0), params.max_tokens) if session is None else None
        used = cast(Session, session or own)
        seq_ids = range(min(n_seq, used.n_seq_max))
        try:
            drafter = None if drafting is None else functools.partial(drafting.start, self, used.n_ctx_seq)
            n_keep = None if n_keep is None else integer("n_keep", n_keep, 0, used.n_ctx_seq - 1)
            steps = engine.stream(
                used, self.tokenizer, ids, params, seq_ids=seq_ids, cancel=cancel, drafter=drafter, n_keep=n_keep
            )
        except BaseException:
            if own is not None:
                own.close()
            raise
        return steps if own is None else _closing(own, steps)

    def _drafting(self, draft: Model | Drafting) -> Drafting:
        """Return how to guess what follows, sure that this model can take wrong guesses back."""
        from ggufpy.speculation import Drafting, DraftModel, check_trimmable

        check_trimmable(self, "the model")
        if isinstance(draft, Model):
            return DraftModel(draft)
        if not isinstance(draft, Drafting):
            raise ValueError(f"draft: expected PromptLookup(), a Model or DraftModel(…), got {draft!r:.60}")
        return draft

    # ------------------------------------------------------------------------------------------------------- scoring

    @overload
    def score(self, prompts: Prompt, continuations: Prompt, **options: Any) -> Score: ...
    @overload
    def score(
        self, prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt], **options: Any
    ) -> Score | list[Score]: ...
    def score(
        self, prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt], **options: Any
    ) -> Score | list[Score]:
        """Compute the log-probabilities of continuations behind their prompts; a list of them gives a list.

        Two lists are taken pair by pair; one prompt goes with each of several continuations, and the other way round.
        Each may be text, in which control tokens are recognized, or token ids; `scoring.encode_pair` says where the
        prompt's tokens end. Everything is computed in batches, a prompt once however many continuations it has.
        `options` are those of `session`.

        Raises ValueError for lists of different lengths and for an empty prompt or continuation (an empty text is no
        prompt where the vocabulary adds no bos), ContextLengthError, TokenizerError, SamplingError and ClosedError.
        """
        from ggufpy import scoring

        self._check_can_continue(None)
        pairs = [scoring.encode_pair(self.tokenizer, *pair) for pair in _side_by_side(prompts, continuations)]
        n_seq_max = min(max(scoring.MIN_SEQUENCES, 1 + 2 * len(pairs)), scoring.MAX_SEQUENCES)
        with self.session(**{"n_seq_max": n_seq_max, "kv_unified": True, **options}) as session:
            scores = scoring.score(session, pairs)
        return scores[0] if _is_single(prompts, empty=True) and _is_single(continuations, empty=True) else scores

    def perplexity(
        self,
        text: Prompt,
        *,
        n_ctx: int = 512,
        n_batch: int = 2048,
        n_chunks: int | None = None,
        progress: Callable[[int, int, float], None] | None = None,
        **options: Any,
    ) -> Perplexity:
        """Compute a text's perplexity, the figure that llama-perplexity prints for it with the same sizes.

        The text, in which names of control tokens are text, is cut into windows of `n_ctx` tokens, and those behind a
        window's middle are scored; n_batch / n_ctx windows are computed side by side. `scoring.perplexity` says more.
        `options` are those of `session`.

        Raises ValueError for sizes out of range and for a text of less than two windows, TokenizerError where the
        vocabulary ends texts with a token of its own, and what `session` raises.
        """
        from ggufpy import scoring

        self._check_can_continue(None)
        for name, value, low in (("n_ctx", n_ctx, 4), ("n_batch", n_batch, 1), ("n_chunks", n_chunks, 1)):
            if not (isinstance(value, int) and value >= low) and not (name == "n_chunks" and value is None):
                raise ValueError(f"{name}: expected an integer from {low} on, got {value!r:.60}")
        n_seq_max = max(1, n_batch // n_ctx)
        if n_batch > n_ctx and n_batch % n_ctx:
            raise ValueError(f"n_batch: expected a multiple of n_ctx, {n_ctx}, or less than that, got {n_batch}")
        if self.tokenizer.add_eos:
            raise TokenizerError("texts end with a token of their own here, which a window in the middle does not have")
        ids = self.tokenizer.encode(text) if isinstance(text, str) else self._encode(text)
        bos = self.tokenizer.bos_token_id if self.tokenizer.add_bos else None
        sizes = {"n_ctx": n_seq_max * n_ctx, "n_seq_max": n_seq_max, "n_batch": n_batch, "swa_full": False}
        with self.session(**{**sizes, **options}) as session:
            return scoring.perplexity(session, ids, n_ctx=n_ctx, bos=bos, n_chunks=n_chunks, progress=progress)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: Literal["none", "mean", "last", "cls", "rank"] | None = None,
        normalize: bool = True,
        **options: Any,
    ) -> FloatArray | list[FloatArray]:
        """Compute the embeddings of texts: float32 [n_embd] for one, [n_texts, n_embd] for a list, empty or not.

        pooling     how tokens' embeddings become one: "mean", "last", "cls" (the first token's), or "rank", a
                    classifier's scores, [n_labels]; "none" keeps one for each token, [n_tokens, n_embd], and gives
                    a list of arrays for a list. None: as the file says, or else "mean"
        normalize   scale embeddings (not scores) to a length of one

        In a text the names of control tokens are text. Texts are computed together, each by itself. `options` are
        those of `session`. Raises ValueError, ContextLengthError, TokenizerError, UnsupportedArchitectureError for
        "rank" where the model has no classifier, and ClosedError.
        """
        from ggufpy import scoring

        self._check_open()
        if pooling is None:
            pooling = _POOLINGS[self._config.pooling] if self._config.pooling is not None else "mean"
        if pooling not in _POOLINGS:
            raise ValueError(f"pooling: expected None or one of {', '.join(_POOLINGS)}, got {pooling!r:.60}")
        if not isinstance(normalize, bool):
            raise ValueError(f"normalize: expected True or False, got {normalize!r:.60}")
        single = _is_single(texts)
        given = [cast(Prompt, texts)] if single else cast("Sequence[Prompt]", texts)
        ids = [self.tokenizer.encode(text) if isinstance(text, str) else self._encode(text) for text in given]
        with self._session_for_texts(ids, options) as session:
            found = scoring.embed(session, ids, None if pooling == "none" else pooling, normalize=normalize)
        if single:
            return found[0]
        if pooling == "none":
            return found
        width = self._config.n_labels if pooling == "rank" else self._config.n_embd
        return np.stack(found) if found else np.empty((0, width), np.float32)

    def rerank(self, query: str, documents: Sequence[str], **options: Any) -> list[Rank]:
        """Score how relevant documents are to a query with a reranker; returns their ranks, the best first.

        Query and document are put together as llama.cpp's server does (`scoring.encode_rank`). The score is the
        classifier's first, as it comes: mostly a logit, higher is better. `options` are those of `session`.

        Raises UnsupportedArchitectureError where the model has no classifier, ValueError for what is no text,
        ContextLengthError for a pair longer than the context, TokenizerError and ClosedError.
        """
        from ggufpy import scoring

        self._check_open()
        if isinstance(documents, (str, bytes)) or not isinstance(documents, Sequence):
            raise ValueError(f"documents: expected a sequence of texts, got {documents!r:.60}")
        for name, text in (("query", query), *((f"documents[{i}]", text) for i, text in enumerate(documents))):
            if not isinstance(text, str):
                raise ValueError(f"{name}: expected text, got {text!r:.60}")
        ids = [scoring.encode_rank(self.tokenizer, query, document) for document in documents]
        with self._session_for_texts(ids, options) as session:
            scores = scoring.embed(session, ids, "rank")
        ranks = [scoring.Rank(i, float(row[0])) for i, row in enumerate(scores)]
        return sorted(ranks, key=lambda rank: -rank.score)

    def _session_for_texts(self, texts: Sequence[Sequence[int]], options: Mapping[str, Any]) -> Session:
        """Open a session that computes any of the texts in one micro-batch, and short ones together."""
        from ggufpy import scoring

        n = max(map(len, texts), default=0)
        most = SessionOptions().n_ubatch
        sizes = {"n_ubatch": max(n, most), "n_batch": max(n, SessionOptions().n_batch)}
        n_seq_max = min(max(1, len(texts)), scoring.MAX_SEQUENCES)
        return self.session(**{**sizes, "n_seq_max": n_seq_max, "kv_unified": True, **options})

    def _session_for(self, n_seq: int, n_prompt: int, max_tokens: int | None) -> Session:
        """Open a session for so many answers at a time; each has the room it needs, up to what the model can use."""
        n_ctx = self._config.n_ctx_train
        if n_seq == 1:
            return self.session()
        if max_tokens is not None:  # as much as an answer alone would have, where that decides how it is computed
            original = self._config.n_ctx_orig_yarn
            n_ctx = min(n_ctx, max(n_prompt + max_tokens, original + 1 if original < n_ctx else 0))
        n_ctx = pad(n_ctx)
        n_seq = min(n_seq, max(1, MAX_CELLS // n_ctx))
        return self.session(n_ctx=n_seq * n_ctx, n_seq_max=n_seq)

    # ------------------------------------------------------------------------------------------------------ lifetime

    def close(self) -> None:
        """Let go of the weights and the file; open sessions keep what they need. A second call does nothing."""
        if self._weights is not None and self._sessions:
            _ = self._fingerprint  # they may still be saved
        self._weights = None
        self._file.close()

    def _check_open(self) -> None:
        if self._weights is None:
            raise ClosedError("the model is closed")

    def _check_can_continue(self, session: Session | None) -> None:
        """Check that text can be continued token by token, and that a session is not another model's."""
        self._check_open()
        if not self._declaration.logits:
            raise UnsupportedArchitectureError(f"{self._config.architecture} models give no logits, see Session.embed")
        if self._declaration.cacheless:
            raise UnsupportedArchitectureError(
                f"{self._config.architecture} models see all of a text at once and do not continue one: see the "
                "methods of Session"
            )
        if session is not None and not hasattr(session, "decode_batch"):
            raise ValueError(f"session: expected a Session, got {session!r:.60}")
        if isinstance(session, Session) and session._weights is not self._weights:
            raise ValueError(f"session: expected one of this model, got {session!r:.60} of another")

    def __enter__(self) -> Model:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._weights is None else f"{len(self._file.tensors)} tensors"
        return f"<Model {self._config.architecture} {self._file.path.name!r}: {state}>"


def _open_file(path: str | os.PathLike[str]) -> GGUFFile:
    try:
        return GGUFFile(path)
    except FileNotFoundError as error:
        from ggufpy import hub

        if os.fspath(path) not in hub.NAMED_MODELS:
            raise
        raise FileNotFoundError(error.errno, "no such file: Model.from_pretrained takes names", path) from None


def _gpus(chosen: Sequence[Device] | None, n_gpu_layers: int | None) -> list[Device]:
    """List the GPUs to use: none where no layer is to go there."""
    listed = devices() if chosen is None else list(chosen)
    if not all(isinstance(device, Device) for device in listed):
        raise ValueError(f"devices: expected some of ggufpy.devices(), got {chosen!r:.60}")
    return [] if n_gpu_layers == 0 else [device for device in listed if device.type == "gpu"]


def _is_single(prompt: Prompt | Sequence[Prompt], *, empty: bool = False) -> bool:
    """Tell one prompt (text or ids) from a list of them; `empty` says which of the two an empty list is."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim < 2
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Sequence):
        return True
    return isinstance(prompt[0], (int, float, np.number, np.bool_)) if len(prompt) else empty


def _side_by_side(
    prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt]
) -> Iterator[tuple[Prompt, Prompt]]:
    """Pair prompts and continuations: one with one, or one of either with all of the other."""
    lists: list[list[Prompt]] = []
    single = [_is_single(given, empty=True) for given in (prompts, continuations)]
    for name, given, is_one in zip(("prompts", "continuations"), (prompts, continuations), single, strict=True):
        lists.append([cast(Prompt, given)] if is_one else list(cast("Sequence[Prompt]", given)))
        for i, one in enumerate(lists[-1]):
            if not isinstance(one, str):
                integers(one, f"{name}[{i}]: expected text or a sequence of token ids")
    before, after = lists
    if single[0]:
        before *= len(after)
    elif single[1]:
        after *= len(before)
    if len(before) != len(after):
        raise ValueError(f"continuations: expected {len(before)}, one for each prompt, got {len(after)}")
    return zip(before, after, strict=True)


def _is_many(prompt: Prompt | Sequence[Prompt], params: SamplingParams) -> bool:
    """Say whether a call has a list of answers."""
    return params.n > 1 or not _is_single(prompt)


def _params(params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
    from ggufpy.sampling import SamplingParams

    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params: expected SamplingParams, got {params!r:.60}")
    names = [field.name for field in dataclasses.fields(params)]
    if unknown := [name for name in overrides if name not in names]:
        raise TypeError(f"{unknown[0]}: an unexpected keyword argument{_hint(unknown[0], names)}")
    return dataclasses.replace(params, **overrides)


def _hint(name: str, names: Sequence[str]) -> str:
    """Say what a keyword that is no parameter may have been meant for."""
    from difflib import get_close_matches

    if name in {field.name for field in dataclasses.fields(SessionOptions)}:
        return " (an option of Model.session: open one and pass it as session=)"
    near = get_close_matches(name, names, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _closing(session: Session, steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
    """Close a call's own session when its steps end or are dropped."""
    with session:
        yield from steps


def _chunks(steps: Generator[Step, None, None]) -> Generator[CompletionChunk, None, None]:
    for step in steps:
        for _, chunk in step:
            yield chunk


def _pairs(steps: Generator[Step, None, None]) -> Generator[tuple[int, CompletionChunk], None, None]:
    for step in steps:
        yield from step
