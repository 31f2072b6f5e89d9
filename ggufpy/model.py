"""A model: a file, its weights, its architecture and its tokenizer. Immutable, and shared by all its sessions.

This file joins the pieces and owns none of their work. Everything a user starts with is a method here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np

from ggufpy import arch, snapshots
from ggufpy.arch import Config
from ggufpy.backend import Device, cpu_device, devices
from ggufpy.batch import integers
from ggufpy.errors import ClosedError, GGUFError, UnsupportedArchitectureError
from ggufpy.gguf import GGUFFile
from ggufpy.session import MAX_CELLS, MAX_SEQUENCES, Session, SessionOptions, integer, pad
from ggufpy.weights import Layout, Progress, Weights

# Text, sampling and downloads are imported where they are used: loading a model and decoding ids does without them.
if TYPE_CHECKING:
    from ggufpy.engine import Step
    from ggufpy.generate import Completion, CompletionChunk
    from ggufpy.sampling import SamplingParams
    from ggufpy.tokenizer import Tokenizer

__all__ = ["Messages", "Model", "Prompt"]

Prompt = str | Sequence[int]
"""Text, or token ids."""
Messages = Sequence[Mapping[str, Any]]
"""Chat messages as in OpenAI's API: [{"role": "user", "content": "..."}]."""
MAX_NUM_SEQS = 32
"""How many prompts of a list are computed together: enough to make the most of each weight that is read."""


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
        file = GGUFFile(path)
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
        return Session(
            self._declaration, self._config, self.weights, self._layout, SessionOptions(**options), self._fingerprint
        )

    @functools.cached_property
    def _fingerprint(self) -> str:
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
        **overrides: Any,
    ) -> Completion | list[Completion]:
        """Continue a prompt, or each of a list of prompts; returns a Completion, or a list in the same order.

        A prompt is text, in which control tokens are recognized, or token ids. `overrides` are fields of
        SamplingParams; with n above 1 the result is a list that has n completions of each prompt, one after another.
        Of a list, `max_num_seqs` are computed together, each on a sequence of its own. With a `session` a single prompt
        takes its sequence 0, a list all of them, and what they hold already of a prompt is not computed again. Setting
        `cancel`, from any thread, ends the answers before the next token or the prompt's next micro-batch.

        Raises SamplingError, ContextLengthError, TokenizerError, ValueError for what is no prompt, and ClosedError.
        """
        params = _params(params, overrides)
        steps = self._answer(prompt, params, session, cancel, max_num_seqs)
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
        **overrides: Any,
    ) -> Generator[CompletionChunk, None, None] | Generator[tuple[int, CompletionChunk], None, None]:
        """Continue a prompt and yield a chunk for each token; the last chunk holds the whole Completion.

        For a list of prompts, or with n above 1, yields (index, chunk), the index being the completion's in the list
        that `generate` returns. Arguments are those of `generate`, and are checked at once.
        """
        params = _params(params, overrides)
        steps = self._answer(prompt, params, session, cancel, max_num_seqs)
        return _pairs(steps) if _is_many(prompt, params) else _chunks(steps)

    async def agenerate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        session: Session | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
        **overrides: Any,
    ) -> Any:
        """Do what `generate` does in a worker thread; the event loop goes on. Cancel the task to end it.

        A task that is cancelled ends when the micro-batch in computation does.
        """
        from ggufpy.engine import in_threads

        params = _params(params, overrides)
        done: dict[int, Completion] = {}
        async for step in in_threads(lambda: self._answer(prompt, params, session, None, max_num_seqs)):
            done |= {index: chunk.completion for index, chunk in step if chunk.completion}
        return [done[index] for index in sorted(done)] if _is_many(prompt, params) else done[0]

    async def astream(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        session: Session | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
        **overrides: Any,
    ) -> AsyncGenerator[Any, None]:
        """Yield what `stream_generate` yields, computed in worker threads; the event loop goes on meanwhile.

        Arguments are checked with the first chunk. Cancelling the task, or closing the generator, ends the answers.
        """
        from ggufpy.engine import in_threads

        params = _params(params, overrides)
        many = _is_many(prompt, params)
        steps = in_threads(lambda: self._answer(prompt, params, session, None, max_num_seqs))
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
        self._check_can_continue(session)
        ids = self._render(messages, tools, chat_template, chat_template_kwargs)
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
        self._check_can_continue(session)
        ids = self._render(messages, tools, chat_template, chat_template_kwargs)
        return self.stream_generate(ids, params, session=session, cancel=cancel, **overrides)

    def _render(
        self, messages: Messages, tools: Sequence[Any] | None, template: str | None, more: Mapping[str, Any] | None
    ) -> list[int]:
        tokenizer = self.tokenizer
        ids = tokenizer.apply_chat_template(
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
    ) -> Generator[Step, None, None]:
        """Check a request and return what computes it, step by step."""
        from ggufpy import engine

        self._check_can_continue(session)
        ids = [self._encode(p) for p in ([prompt] if _is_single(prompt) else prompt)]  # type: ignore[arg-type]
        n_seq = min(len(ids) * params.n, integer("max_num_seqs", max_num_seqs, 1, MAX_SEQUENCES))
        if session is not None:
            seq_ids = range(min(n_seq, session.n_seq_max))
            return engine.stream(session, self.tokenizer, ids, params, seq_ids=seq_ids, cancel=cancel)
        own = self._session_for(n_seq, max(map(len, ids)), params.max_tokens)
        try:
            return _closing(own, engine.stream(own, self.tokenizer, ids, params, cancel=cancel))
        except BaseException:
            own.close()
            raise

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
        self._weights = None
        self._file.close()

    def _check_open(self) -> None:
        if self._weights is None:
            raise ClosedError("the model is closed")

    def _check_can_continue(self, session: Session | None) -> None:
        """Check that text can be continued token by token, and that a session is not another model's."""
        self._check_open()
        if self._declaration.cacheless and self._declaration.logits:
            raise UnsupportedArchitectureError(
                f"{self._config.architecture} models see all of a text at once and do not continue one: see the "
                "methods of Session"
            )
        if isinstance(session, Session) and session._weights is not self._weights:
            raise ValueError(f"session: expected one of this model, got {session!r:.60} of another")

    def __enter__(self) -> Model:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._weights is None else f"{len(self._weights)} tensors"
        return f"<Model {self._config.architecture} {self._file.path.name!r}: {state}>"


def _gpus(chosen: Sequence[Device] | None, n_gpu_layers: int | None) -> list[Device]:
    """List the GPUs to use: none where no layer is to go there."""
    listed = devices() if chosen is None else list(chosen)
    if not all(isinstance(device, Device) for device in listed):
        raise ValueError(f"devices: expected some of ggufpy.devices(), got {chosen!r:.60}")
    return [] if n_gpu_layers == 0 else [device for device in listed if device.type == "gpu"]


def _is_single(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Tell one prompt (text or ids) from a list of them."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim < 2
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Sequence):
        return True
    return not len(prompt) or isinstance(prompt[0], (int, float, np.number, np.bool_))


def _is_many(prompt: Prompt | Sequence[Prompt], params: SamplingParams) -> bool:
    """Say whether a call has a list of answers."""
    return params.n > 1 or not _is_single(prompt)


def _params(params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
    from ggufpy.sampling import SamplingParams

    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params: expected SamplingParams, got {params!r:.60}")
    return dataclasses.replace(params, **overrides)


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
