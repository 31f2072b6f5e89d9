"""The commands that run a model, on real ones: generate, chat, compare, bench; output, interruption, errors."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ggufpy import Model
from ggufpy.cli import chat as chat_command
from ggufpy.cli import main
from ggufpy.cli.generate import write
from ggufpy.reference import Dump

ROOT = Path(__file__).parents[1]
PROMPT = "The capital of France is"
needs_signals = pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")


@pytest.fixture
def run(capsys):
    """Run the command line in this process; give the code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def start(*arguments: object, **options) -> subprocess.Popen:
    """Start the command line in a process of its own, with pipes."""
    command = [sys.executable, "-m", "ggufpy", *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT}
    return subprocess.Popen(command, **{**pipes, **options})


def greedy(*arguments: object) -> tuple[object, ...]:
    return (*arguments, "--temperature", 0, "--threads", 1)


# generate


def test_generate_prints_prompt_and_text(smollm2_path, run):
    """Standard output is the prompt, the library's text and one newline; standard error is empty."""
    with Model.load(smollm2_path) as model, model.session(n_threads=1) as session:
        text = model.generate(PROMPT, temperature=0, max_tokens=8, session=session).text
    arguments = greedy("generate", PROMPT, "--model", smollm2_path, "--max-tokens", 8)
    assert run(*arguments) == (0, f"{PROMPT}{text}\n", "")


def test_generate_reports_when_asked(smollm2_path, run):
    """--verbose puts figures on standard error and leaves standard output alone."""
    arguments = greedy("generate", PROMPT, "--model", smollm2_path, "--max-tokens", 4, "--seed", 7)
    code, out, err = run(*arguments, "--verbose")
    assert (code, out, "") == run(*arguments)
    figures = err.splitlines()[-1]
    assert figures.startswith("prompt: 5 tokens, ")
    assert "; answer: 4 tokens, " in figures
    assert figures.endswith("ended by: length; seed: 7")


def test_generate_obeys_its_options(smollm2_path, run):
    """Sampling options reach the sampler: a stop text ends the text, and no tokens may be asked for."""
    base = greedy("generate", "One, two, three, four,", "--model", smollm2_path, "--max-tokens", 12)
    code, out, _ = run(*base)
    assert (code, " six" in out) == (0, True)
    assert run(*base, "--stop", "nine", "--stop", " six") == (0, out[: out.index(" six")] + "\n", "")
    assert run(*base, "--max-tokens", 0) == (0, "One, two, three, four,\n", "")


def test_generate_bans_tokens(smollm2_path, run):
    """A biased or banned token is not chosen, and one outside the vocabulary is wrong usage, told by its parameter."""
    base = greedy("generate", PROMPT, "--model", smollm2_path, "--max-tokens", 1)
    with Model.load(smollm2_path) as model:
        (paris,) = model.tokenizer.encode(" Paris")
    assert run(*base) == (0, f"{PROMPT} Paris\n", "")
    assert " Paris" not in run(*base, "--banned-token-id", paris)[1]
    assert " Paris" not in run(*base, "--logit-bias", f"{paris}=-inf")[1]
    code, out, err = run(*base, "--logit-bias", "49152=1")
    assert (code, out) == (2, "")
    assert "logit_bias: 49152 is not below the vocabulary's size, 49152 (see `" in err


def test_generate_guesses_ahead(smollm2_path, gemma3_path, run):
    """The text is the same from right guesses, made with either option; a draft of another vocabulary is refused."""
    base = greedy("generate", "one two three four five six " * 4, "--model", smollm2_path, "--max-tokens", 24)
    code, out, err = run(*base, "--verbose")
    assert (code, "guesses" in err) == (0, False)
    for options in (["--prompt-lookup"], ["--draft", smollm2_path]):
        code, text, err = run(*base, *options, "--verbose")
        assert (code, text) == (0, out)
        assert re.search(r"answer: 24 tokens \([1-9]\d* of \d+ guesses right\), ", err)
    code, out, err = run(*base, "--draft", gemma3_path)
    assert (code, out) == (2, "")
    assert "draft: its vocabulary has 262144 tokens, the model's 49152" in err


def test_generate_goes_on_when_the_context_is_full(smollm2_path, run):
    """With --n-keep the answer is as long as asked for; one that the context has no room for is wrong usage."""
    base = greedy("generate", PROMPT, "--model", smollm2_path, "--max-tokens", 260, "--n-ctx", 256, "--ignore-eos")
    assert "answer: 251 tokens, " in run(*base, "--verbose")[2]
    assert "answer: 260 tokens, 126 tokens dropped, " in run(*base, "--n-keep", 4, "--verbose")[2]
    code, out, err = run(*base, "--n-keep", 256)
    assert (code, out) == (2, "")
    assert "n_keep: expected an integer from 0 to 255, got 256" in err


@pytest.mark.parametrize("prompt", [[], ["-"]])
def test_generate_reads_standard_input(prompt, smollm2_path, run, monkeypatch):
    """Without a prompt, or for -, it is standard input less its last newline, read as UTF-8 whatever the locale."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("né\n\n".encode()), "ascii"))
    arguments = greedy("generate", *prompt, "--model", smollm2_path, "--max-tokens", 0)
    assert run(*arguments) == (0, "né\n\n", "")


def test_generate_wants_a_prompt(run, monkeypatch):
    """At a terminal without a prompt, and for input that is no text, the usage is wrong."""
    stdin = io.TextIOWrapper(io.BytesIO(b"ab\xff"))
    monkeypatch.setattr(sys, "stdin", stdin)
    code, _, err = run("generate")
    assert (code, "standard input: expected UTF-8, found another byte at 2" in err) == (2, True)
    monkeypatch.setattr(sys, "stdin", Terminal())
    code, _, err = run("generate")
    assert (code, "expected a PROMPT" in err) == (2, True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_prompt_that_does_not_fit_is_an_error(smollm2_path, run):
    """A prompt longer than the context is one line and code 1, and nothing is printed for it."""
    code, out, err = run("generate", "word " * 400, "--model", smollm2_path, "--n-ctx", 256)
    assert (code, out) == (1, "")
    assert "the context holds 256" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--type-k", "f17", "type_k: expected one of f16, f32"),
        ("--n-gpu-layers", -1, "n_gpu_layers: expected None (all) or an integer of at least 0, got -1"),
    ],
)
def test_options_out_of_range_are_wrong_usage(option, value, reason, smollm2_path, run):
    """A value that the library refuses is told as wrong usage, in its words."""
    code, out, err = run("generate", "a", "--model", smollm2_path, option, value)
    assert (code, out) == (2, "")
    assert reason in err


def test_a_terminal_gets_no_control_characters_from_a_model(capsys, monkeypatch):
    """Text goes to a pipe as it is; a terminal sees control characters as escapes."""
    write("a\x1b[2J\n")
    assert capsys.readouterr().out == "a\x1b[2J\n"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    write("a\x1b[2J\n")
    assert terminal.getvalue() == "a\\x1b[2J\n"


def test_an_output_that_lacks_letters_is_no_error(smollm2_path):
    """Where the output's encoding cannot express a letter, something else is printed in its place."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    arguments = greedy("generate", "é", "--model", smollm2_path, "--max-tokens", 0)
    process = start(*arguments, env=environment)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.strip(), err) == (0, b"?", b"")


@needs_signals
def test_ctrl_c_ends_generate_quietly(smollm2_path):
    """Ctrl-C ends the text with a newline, code 130 and no traceback."""
    process = start(*greedy("generate", PROMPT, "--model", smollm2_path, "--ignore-eos"))
    assert process.stdout.read(len(PROMPT) + 5).startswith(PROMPT.encode())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out[-1:], err) == (130, b"\n", b"")


@pytest.mark.skipif(os.name == "nt", reason="pipes break otherwise there")
def test_a_reader_that_leaves_ends_generate_quietly(smollm2_path):
    """When nobody reads on, generating ends at once and says nothing."""
    process = start(*greedy("generate", PROMPT, "--model", smollm2_path, "--ignore-eos"))
    process.stdout.read(len(PROMPT))
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert process.stderr.read() == b""


# chat


def chat(*arguments: object, text: str) -> tuple[int, str, str]:
    """Run a whole conversation in a process of its own."""
    process = start(*greedy("chat", *arguments, "--verbose"), text=True)
    out, err = process.communicate(text, timeout=60)
    return process.returncode, out, err


def figures(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("prompt: ")]


def n_prompt(line: str) -> int:
    return int(line.split()[1])


def test_chat_keeps_the_conversation(smollm2_path):
    """Each line is answered; what was said stays in the session, not computed again; /clear forgets it, /help helps."""
    text = "My name is Zoe.\n\n/help\nWhat is my name?\n/clear\nHello!\n/exit\nnever answered\n"
    code, out, err = chat("--model", smollm2_path, "--max-tokens", 24, text=text)
    first, second, third = figures(err)
    assert code == 0
    assert out
    assert "/clear starts anew" in err
    assert "kept" not in first
    kept = int(second.split(" tokens, ")[1].split()[0])
    assert n_prompt(first) <= kept < n_prompt(second)
    assert n_prompt(third) < n_prompt(first) < n_prompt(second)


def test_chat_takes_a_system_message_and_a_template(smollm2_path, tmp_path):
    """--system stands at the beginning, and --chat-template takes the place of the file's own."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}", encoding="utf-8")
    arguments = ("--model", smollm2_path, "--max-tokens", 1, "--chat-template", template)
    code, _, err = chat(*arguments, text="hi\n")
    _, _, longer = chat(*arguments, "--system", "be brief and kind to all", text="hi\n")
    assert code == 0
    assert n_prompt(figures(err)[0]) < 7 < n_prompt(figures(longer)[0])


def test_chat_without_a_template_says_how_to_give_one(gemma3_path):
    """A model that has no chat template is not guessed at: one line says so (case C4)."""
    process = start("chat", "--model", gemma3_path, text=True)
    out, err = process.communicate("hi\n", timeout=60)
    assert (process.returncode, out.strip()) == (1, "")
    assert "template" in err
    assert err.count("\n") == 1


def test_chat_guesses_ahead_and_names_wrong_tokens(smollm2_path):
    """The options are generate's: guesses are made, and a token outside the vocabulary is wrong usage."""
    text = "Say: one two three one two three one two three.\n"
    code, _, err = chat("--model", smollm2_path, "--max-tokens", 16, "--draft", smollm2_path, text=text)
    assert (code, "guesses right" in figures(err)[0]) == (0, True)
    code, _, err = chat("--model", smollm2_path, "--banned-token-id", 50000, text=text)
    assert (code, "banned_token_ids: 50000 is not below the vocabulary's size" in err) == (2, True)


def test_chat_goes_on_when_the_context_is_full(smollm2_path):
    """--n-keep is generate's too: an answer may be longer than the context."""
    options = ("--model", smollm2_path, "--n-ctx", 256, "--max-tokens", 256, "--ignore-eos", "--n-keep", 8)
    code, _, err = chat(*options, text="Hello!\n")
    assert (code, "answer: 256 tokens, 124 tokens dropped, " in figures(err)[0]) == (0, True)


def test_a_full_context_ends_a_piped_chat(smollm2_path):
    """Where nobody can be asked, a conversation that no longer fits is an error."""
    code, _, err = chat("--model", smollm2_path, "--n-ctx", 256, text="word " * 300 + "\n")
    assert code == 1
    assert "the context holds 256" in err


@needs_signals
def test_ctrl_c_stops_an_answer_and_not_the_chat(smollm2_path):
    """Ctrl-C cuts the answer short; the next message is answered in the same conversation, and the end is no error."""
    process = start(*greedy("chat", "--model", smollm2_path, "--ignore-eos", "--verbose"))
    for message in (b"Tell me a long story.\n", b"Another one.\n"):
        process.stdin.write(message)
        process.stdin.flush()
        assert len(process.stdout.read(20)) == 20
        process.send_signal(signal.SIGINT)
        while not (line := process.stderr.readline().decode()).startswith("prompt: "):
            assert line
        assert "ended by: cancelled" in line
    assert " of them kept" in line
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")


class Lines(io.StringIO):
    """Standard input that gives lines, and Ctrl-C for None."""

    def __init__(self, *events: str | None) -> None:
        super().__init__()
        self.events = list(events)

    def readline(self, *_: object) -> str:
        event = self.events.pop(0)
        if event is None:
            raise KeyboardInterrupt
        return event


def test_ctrl_c_while_waiting_takes_the_line_back(monkeypatch, capsys):
    """Between answers one Ctrl-C is a hint, and a second one in a row ends the program."""
    monkeypatch.setattr(sys, "stdin", Lines(None, "hello\n", None, "bye\n", ""))
    assert list(chat_command._lines()) == ["hello", "bye"]
    assert capsys.readouterr().err.count("once more, or Ctrl-D, to end") == 2
    monkeypatch.setattr(sys, "stdin", Lines(None, None))
    with pytest.raises(KeyboardInterrupt):
        list(chat_command._lines())


# compare and bench


@pytest.fixture
def dump(smollm2_path, tmp_path):
    """Write a dump of our own logits: whatever compares with it has to be the same."""
    ids, options = (1, 9690, 198, 2683), {"n_ctx": 256, "n_threads": 1}
    with Model.load(smollm2_path) as model, model.session(**options) as session:
        rows = session.decode(ids, logits="all")
    made = Dump.record(tmp_path / "dump.npz", [("decode", ((0, ids, "all"),))], rows, options=options)
    made.save()
    return made


def test_compare_reports_and_passes(dump, smollm2_path, run):
    """The same logits are reported as such, as a table and as JSON, and are inside every limit."""
    code, out, err = run("compare", smollm2_path, dump.path, "--identical", "--nmse", 0)
    assert (code, err) == (0, "")
    rows = dict(line.split("  ", 1) for line in out.splitlines())
    assert rows["identical rows"].strip() == "4 (all)"
    assert rows["same likeliest token"].strip() == "100.00%"
    code, out, err = run("compare", smollm2_path, dump.path, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["identical_rows"] == 4


def test_compare_fails_outside_a_limit(dump, smollm2_path, run):
    """Other logits are reported too; each limit they exceed is a line on standard error, and the code is 1."""
    logits, digests = dump.logits.copy(), dump.digests.copy()
    logits[2] += 0.5
    digests[2] ^= 1
    Dump(dump.path, dump.n_vocab, dump.steps, logits, dump.columns, digests, dump.log_norm, dump.options).save()
    base = ("compare", smollm2_path, dump.path)
    assert run(*base)[0] == 0
    code, out, err = run(*base, "--identical", "--max-abs-diff", 0.25, "--top1-agreement", 1)
    assert code == 1
    assert "identical rows        3\n" in out
    assert err.splitlines() == [
        "ggufpy compare: identical rows: expected 4, found 3",
        "ggufpy compare: max_abs_diff: expected at most 0.25, found 0.5",
    ]


def test_compare_refuses_what_is_no_dump(smollm2_path, run):
    """A file of another kind is one line and code 1."""
    code, out, err = run("compare", smollm2_path, __file__)
    assert (code, out) == (1, "")
    assert "test_cli_models.py" in err


def test_bench_measures(smollm2_path, run):
    """The table has both speeds, load time and memory; JSON has every run."""
    base = ("bench", smollm2_path, "--n-prompt", 16, "--n-gen", 4, "--repetitions", 2, "--threads", 1)
    code, out, err = run(*base)
    assert (code, err) == (0, "")
    assert "(llama), 1 thread, flash attention, mapped weights\n" in out
    names = [line.split("  ")[0] for line in out.splitlines()[1:] if line]
    assert names[:5] == ["tokens a second", "prefill 16", "decode 4", "load", "first decode"]
    code, out, err = run(*base, "--no-flash-attn", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["flash_attn"], found["n_threads"], found["repack"]) == (False, 1, False)
    assert set(found["tokens_per_s"]) == {"prefill 16", "decode 4"}
    for speed in found["tokens_per_s"].values():
        assert len(speed["runs"]) == 2
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]
    assert found["load_s"] > 0
    assert os.name == "nt" or found["memory"]["peak"] > 10_000_000


@pytest.mark.parametrize("type", ["q4_0", "q4_1"])
def test_bench_says_how_many_tensors_were_repacked(type, tiny, run):
    """Not every type has another layout: how many tensors got one is told."""
    path = tiny("llama", type=type)
    with Model.load(path, repack=True) as model:
        n_tensors = len(model.weights)
        n_repacked = sum(tensor.buffer.type.name not in ("CPU", "CPU_Mapped") for tensor in model.weights.values())
    code, out, err = run("bench", path, "--n-prompt", 8, "--n-gen", 2, "--repetitions", 1, "--repack")
    assert (code, err) == (0, "")
    assert f", {n_repacked} of {n_tensors} tensors repacked\n" in out
    assert n_repacked == 0 if type == "q4_1" else n_repacked > 0 or platform.machine() != "x86_64"
