"""The options of every command. Names are the library's (`--n-ctx` is `n_ctx`), and what is not given is left to it.

Nothing but argparse is imported here, so that `ggufpy --help` and `--version` answer at once; what `sampling` tells
from SamplingParams is asked for by the commands that have those options.
"""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

__all__ = ["DEFAULT_MODEL", "LOAD", "SESSION", "UsageError", "given", "parse"]

DEFAULT_MODEL = "smollm2-135m-instruct"

LOAD = ("n_gpu_layers", "use_mmap", "repack")
SESSION = (
    *("n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch"),
    *("flash_attn", "type_k", "type_v", "swa_full"),
)


class UsageError(Exception):
    """The command line asks for something that cannot be; found after the options were read."""


def given(args: Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return those of the options that stand on the command line."""
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def parse(argv: Sequence[str] | None) -> Namespace:
    """Read a command line; SystemExit after `--help`, or after one line about what is wrong with it."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser(argv)
    args = parser.parse_args(argv)
    if args.version:
        args.command = "version"
    if args.command is None:
        parser.error("expected a COMMAND")
    return args


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see `{self.prog} --help`)\n")


def _parser(argv: Sequence[str]) -> ArgumentParser:
    """Return the parser of every command, with the options of those that a command line names."""
    parser = _Parser(prog="ggufpy", description="Run, look into and measure GGUF language models.", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="show the versions of ggufpy and of ggml")
    parser.set_defaults(verbose=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, takes, add, summary in (
        ("generate", "[PROMPT] [options]", _add_generate, "continue a text"),
        ("chat", "[options]", _add_chat, "talk with a model"),
        ("inspect", "FILE [options]", _add_inspect, "show what is in a GGUF file"),
        ("tokenize", "[options] FILE [TEXT]", _add_tokenize, "show the tokens of a text"),
        ("template", "[options] FILE [MESSAGES]", _add_template, "show the prompt that a chat becomes"),
        ("compare", "MODEL DUMP [options]", _add_compare, "compare logits with those llama.cpp computed"),
        ("perplexity", "MODEL FILE [options]", _add_perplexity, "measure how well a model foresees a text"),
        ("bench", "MODEL [options]", _add_bench, "measure speed, load time and memory"),
    ):
        usage = f"ggufpy {name} {takes}"
        command = commands.add_parser(name, help=summary, description=add.__doc__, usage=usage, allow_abbrev=False)
        if name in argv:
            add(command)
        command.add_argument("--verbose", action="store_true", help="say more, on standard error")
    return parser


def _add_generate(parser: ArgumentParser) -> None:
    """Print a prompt and, as it comes, its continuation. Standard output ends with that text and one newline."""
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the text to continue; read from standard input if absent or -"
    )
    _add_model(parser)
    _add_answering(parser)


def _add_chat(parser: ArgumentParser) -> None:
    """Talk with a model. Each line is a message. Ctrl-C stops an answer; end of input or /exit ends the talk."""
    _add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument("--chat-template", metavar="FILE", help="a jinja template in place of the model's own")
    _add_answering(parser)


def _add_inspect(parser: ArgumentParser) -> None:
    """Show the metadata, tensors, types and sizes of a GGUF file. Shapes are in NumPy order."""
    parser.add_argument("file", metavar="FILE", help="a GGUF file (the first, if split), or the name of a model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--arrays", action="store_true", help="give long arrays and texts in full")


def _add_tokenize(parser: ArgumentParser) -> None:
    """Show the tokens of a text: ids, pieces and places. The file may hold a vocabulary only."""
    parser.add_argument("file", metavar="FILE", help="a GGUF file, or the name of a model")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="read from standard input if absent or -")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--ids", action="store_true", help="print the ids only, on one line")
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--add-special", action=switch, default=True, help="add begin and end tokens, if the file says")
    parser.add_argument(
        "--parse-special", action=switch, default=False, help="take the names of control tokens for them"
    )


def _add_template(parser: ArgumentParser) -> None:
    """Show the prompt that the chat template of a file makes of messages, or the template itself."""
    parser.add_argument("file", metavar="FILE", help="a GGUF file, or the name of a model")
    parser.add_argument(
        "messages",
        nargs="?",
        metavar="MESSAGES",
        help="a JSON file: a list of messages, or an object with messages and what else the template takes (tools, "
        "enable_thinking …); read from standard input if absent or -",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="a jinja template in place of the file's own")
    parser.add_argument("--name", metavar="NAME", help="one of the file's named templates")
    parser.add_argument("--source", action="store_true", help="print the template and render nothing")
    parser.add_argument("--json", action="store_true", help="print JSON: the text and its token ids")
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--generation-prompt", action=switch, default=True, help="end where the answer begins")


def _add_compare(parser: ArgumentParser) -> None:
    """Compute the logits that a file of reference logits asks for, and compare. Exit code 1 outside the limits."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or the name of a model")
    parser.add_argument(
        "dump", metavar="DUMP", help="a dump of ours (.npz) or of llama-results, llama-debug, llama-perplexity"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--identical", action="store_true", help="every row has to be the same, bit for bit")
    limits.add_argument("--max-abs-diff", type=float, metavar="X", help="largest difference of two logits")
    limits.add_argument("--nmse", type=float, metavar="X", help="largest normalized mean squared error")
    limits.add_argument("--mean-kl", type=float, metavar="X", help="largest mean KL divergence, in nats")
    limits.add_argument(
        "--top1-agreement", type=float, metavar="X", help="smallest share of rows with the same likeliest token"
    )
    _add_session(parser)


def _add_perplexity(parser: ArgumentParser) -> None:
    """Compute the perplexity of a text, with llama-perplexity's windows: --n-ctx is one's size (512)."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or the name of a model")
    parser.add_argument("file", metavar="FILE", help="the text, UTF-8; - is standard input")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--n-chunks", type=_positive, default=argparse.SUPPRESS, metavar="N", help="at most so many windows (all)"
    )
    _add_session(parser)


def _add_bench(parser: ArgumentParser) -> None:
    """Measure load time, prefill and decode speed, and memory."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or the name of a model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--n-prompt", type=_positive, default=512, metavar="N", help="tokens of a prefill (512)")
    parser.add_argument("--n-gen", type=_positive, default=128, metavar="N", help="tokens decoded one by one (128)")
    parser.add_argument("--repetitions", type=_positive, default=5, metavar="N", help="times each is measured (5)")
    _add_session(parser)


def _add_model(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME_OR_PATH",
        help=f"a GGUF file, or the name of a model ({DEFAULT_MODEL})",
    )


def _add_answering(parser: ArgumentParser) -> None:
    from ggufpy.cli.sampling import add_common_options, add_other_options

    meaning = "go on when the context is full: keep its first N tokens, drop half of the others, as often as needed"
    parser.add_argument("--n-keep", type=int, metavar="N", help=meaning)
    add_common_options(parser)
    _add_session(parser)
    group = parser.add_argument_group("guessing ahead (faster where guesses are right)")
    ways = group.add_mutually_exclusive_group()
    ways.add_argument("--prompt-lookup", action="store_true", help="guess that text goes on as it did before")
    ways.add_argument("--draft", metavar="NAME_OR_PATH", help="guess with a small model, which has the same vocabulary")
    add_other_options(parser)


def _add_session(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("running the model", argument_default=argparse.SUPPRESS)
    switch = argparse.BooleanOptionalAction
    group.add_argument("--n-ctx", type=_positive, metavar="N", help="tokens the context has room for")
    group.add_argument("--n-batch", type=_positive, metavar="N", help="most tokens of one decode call")
    group.add_argument("--n-ubatch", type=_positive, metavar="N", help="most tokens computed at once")
    group.add_argument(
        "--threads", type=_positive, dest="n_threads", metavar="N", help="threads (one per physical core)"
    )
    group.add_argument(
        "--threads-batch", type=_positive, dest="n_threads_batch", metavar="N", help="threads while reading a prompt"
    )
    group.add_argument("--flash-attn", action=switch, help="use flash attention")
    group.add_argument("--type-k", metavar="TYPE", help="type of the cached keys: f16, f32, bf16, q8_0 …")
    group.add_argument("--type-v", metavar="TYPE", help="type of the cached values")
    group.add_argument("--swa-full", action=switch, help="keep the whole context for layers that see only a window")
    group.add_argument("--n-gpu-layers", type=int, metavar="N", help="layers to run on a GPU (all, where there is one)")
    group.add_argument("--mmap", action=switch, dest="use_mmap", help="map the file instead of reading it")
    group.add_argument(
        "--repack", action=switch, help="copy the weights into the layout that this CPU computes fastest"
    )


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return number
