"""`ggufpy generate`: the prompt and its continuation on standard output, as they come."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Generator
from typing import TYPE_CHECKING

from ggufpy.cli.loading import drafting, find, load, open_session, read_text, refusals_are_wrong_usage
from ggufpy.cli.parser import UsageError
from ggufpy.cli.sampling import sampling_params
from ggufpy.cli.terminal import Status, say, tolerant, visible

if TYPE_CHECKING:
    from ggufpy.generate import Completion, CompletionChunk

__all__ = ["run", "show", "statistics", "write"]


def run(args: Namespace) -> int:
    """Continue the prompt. Standard output holds the prompt, the text and one newline, and nothing else."""
    params = sampling_params(args)
    prompt = _read_prompt(args.prompt)
    with load(find(args.model), args) as model, drafting(args) as draft, open_session(model, args) as session:
        with refusals_are_wrong_usage():
            chunks = model.stream_generate(prompt, params, session=session, draft=draft, n_keep=args.n_keep)
        write(prompt)
        completion = show(chunks, "reading the prompt")
    if args.verbose:
        say(statistics(completion))
    return 0


def _read_prompt(given: str | None) -> str:
    """Return the prompt of the command line, or else standard input without its last newline."""
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise UsageError("expected a PROMPT, or one on standard input")
    return read_text(None).removesuffix("\n").removesuffix("\r")


def show(chunks: Generator[CompletionChunk, None, None], waiting_for: str) -> Completion:
    """Write an answer as it comes and a newline after it, also when it is torn off; return the whole of it."""
    try:
        with Status(waiting_for):
            chunk = next(chunks)
        write(chunk.text)
        for chunk in chunks:
            write(chunk.text)
    finally:
        write("\n")
    assert chunk.completion is not None
    return chunk.completion


def write(text: str) -> None:
    """Write text to standard output at once; a terminal gets no control characters from a model."""
    tolerant(sys.stdout).write(visible(text, keep="\n\t") if sys.stdout.isatty() else text)
    sys.stdout.flush()


def statistics(completion: Completion) -> str:
    """Return one line of figures about a completion."""
    usage, timings = completion.usage, completion.timings
    cached = f", {usage.cached_tokens} of them kept" if usage.cached_tokens else ""
    dropped = f", {usage.discarded_tokens} tokens dropped" if usage.discarded_tokens else ""
    guesses = f" ({usage.accepted_tokens} of {usage.draft_tokens} guesses right)" if usage.draft_tokens else ""
    ended: str = completion.finish_reason
    if completion.stop_reason is not None:
        ended += f" ({completion.stop_reason!r})"
    return (
        f"prompt: {usage.prompt_tokens} tokens{cached}, {timings.prompt_s:.2f} s, {timings.prompt_tokens_per_s:.1f}/s; "
        f"answer: {usage.completion_tokens} tokens{guesses}{dropped}, "
        f"{timings.decode_s:.2f} s, {timings.decode_tokens_per_s:.1f}/s; "
        f"ended by: {ended}; seed: {completion.seed}"
    )
