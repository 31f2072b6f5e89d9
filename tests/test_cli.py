"""The command line: what it prints where, its exit codes, and how it behaves when interrupted or misused."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import time
import warnings
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from helpers.vocabularies import byte_level

from ggufpy import SamplingParams
from ggufpy.cli import main, terminal
from ggufpy.cli.parser import parse
from ggufpy.cli.sampling import sampling_params
from ggufpy.gguf import write_gguf

ROOT = Path(__file__).parents[1]


@pytest.fixture
def small_file(tmp_path):
    """Write a GGUF file with values of every kind, among them some that a terminal would obey."""
    path = tmp_path / "small.gguf"
    metadata = {
        "general.architecture": "llama",
        "evil\x1b[2Jkey": "red \x1b[31m\u202e\nnext line",
        "half": 0.5,
        "infinite": float("inf"),
        "yes": True,
        "long": "x" * 500,
        "many": list(range(1000)),
        "words": ["a\x07", "b"] * 100,
        "nested": [[1, 2], [3]],
    }
    tensors = {"w\x1b[0m": np.zeros((3, 32), np.float32), "q": (bytes(18 * 4), "Q4_0", (4, 32))}
    write_gguf(path, metadata, tensors)
    return path


def run_python(code: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, **options)


def start(*arguments: object, **options) -> subprocess.Popen[bytes]:
    """Start the command line in a process of its own, with pipes."""
    command = [sys.executable, "-m", "ggufpy", *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT}
    return subprocess.Popen(command, **{**pipes, **options})


@pytest.mark.skipif(os.name != "posix", reason="file descriptors are closed")
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("command", ["inspect", "tokenize", "--version"])
def test_a_closed_stream_is_one_that_nobody_reads(command, closed, small_file, vocabulary):
    """`>&-` and its like: no internal error, and no file of ours takes a standard stream's number."""
    arguments = {"inspect": [small_file], "tokenize": [vocabulary], "--version": []}[command]
    process = start(command, *arguments, preexec_fn=lambda: [os.close(number) for number in closed])
    out, err = process.communicate(b"", timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert bool(out) == (1 not in closed)


# Usage and errors


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "expected a COMMAND"),
        ("dance", "invalid choice: 'dance'"),
        ("generate a b", "unrecognized arguments: b"),
        ("generate a --temprature 1", "unrecognized arguments: --temprature"),
        ("generate a --temp 1", "unrecognized arguments: --temp"),
        ("generate a --max-tokens many", "argument --max-tokens: invalid int value: 'many'"),
        ("generate a --threads 0", "argument --threads: expected a positive number, got '0'"),
        ("generate a --top-p 1.5", "top_p: expected a number from 0 to 1, got 1.5"),
        ("generate a --temperature nan", "temperature: expected a number"),
        ("generate a --max-tokens -1", "max_tokens: expected an integer from 0"),
        ("generate a --seed -1", "seed: expected an integer from 0"),
        ("chat --stop=", "stop"),
        ("generate a --typical-p 1.5", "typical_p: expected a number from 0 to 1, got 1.5"),
        ("chat --top-n-sigma -2", "top_n_sigma: expected a number from -1"),
        ("chat --xtc-probability half", "argument --xtc-probability: invalid float value: 'half'"),
        ("chat --mirostat 3", "mirostat: expected an integer from 0 to 2, got 3"),
        ("chat --dry-base 0.5", "dry_base: expected a number from 1 "),
        ("chat --dry-sequence-breaker=", "dry_sequence_breakers: expected strings of at least one character"),
        ("chat --adaptive-decay 1", "adaptive_decay: expected a number from 0 to 0.99, got 1"),
        ("generate a --logit-bias 5", "argument --logit-bias: expected ID=BIAS, such as 42=-1.5 or 42=-inf, got '5'"),
        ("generate a --logit-bias 5=nan", "logit_bias[5]: expected a number"),
        ("generate a --logit-bias 5=1 --logit-bias 5=2", "logit_bias: token 5 is there twice"),
        ("generate a --banned-token-id -1", "banned_token_ids[0]: expected an integer from 0"),
        ("generate a --min-tokens 3 --max-tokens 2", "min_tokens: expected at most max_tokens, 2, got 3"),
        ("generate a --logprobs 3", "unrecognized arguments: --logprobs 3"),
        ("chat --n-keep few", "argument --n-keep: invalid int value: 'few'"),
        ("chat --draft small --prompt-lookup", "argument --prompt-lookup: not allowed with argument --draft"),
        ("compare model", "the following arguments are required: DUMP"),
        ("bench", "the following arguments are required: MODEL"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(line, reason, capsys):
    """Whatever is wrong with a command line is told in one line, before anything is loaded."""
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert reason in err
    assert err.count("\n") == 1
    assert "--help` for" in err or "--help`)" in err


@pytest.mark.parametrize("command", ["inspect", "generate a --model", "bench", "chat --model"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no/such.gguf", "no/such.gguf: No such file or directory"),
        ("nonsense", "'nonsense' is neither a file nor a named model; the named models are gemma-3-270m, smollm2"),
        (__file__, "not a GGUF file"),
    ],
)
def test_errors_are_one_line_and_code_1(command, name, reason, capsys):
    """A file that is missing or is none is one line on standard error, without a traceback."""
    assert main([*command.split(), name]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert reason in err
    assert err.startswith(f"ggufpy {command.split()[0]}: error: ")
    assert err.count("\n") == 1


def test_hostile_names_do_not_reach_the_terminal(capsys, tmp_path):
    """An error that quotes a file's name or content shows control characters as escapes."""
    path = tmp_path / "a\x1b[31m\nb.gguf"
    path.write_bytes(b"nothing")
    assert main(["inspect", str(path)]) == 1
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "a\\x1b[31m" in err
    assert err.count("\n") == 1


def test_a_bug_is_one_line_and_its_traceback_is_for_verbose(capsys, monkeypatch, small_file):
    """An unexpected exception is told to be a bug; --verbose shows where."""
    import ggufpy.cli.inspect as command

    monkeypatch.setattr(command, "run", lambda args: [][1])
    assert main(["inspect", str(small_file)]) == 1
    reason = "internal: IndexError: list index out of range (a bug; --verbose shows where)"
    assert capsys.readouterr().err == f"ggufpy inspect: error: {reason}\n"
    assert main(["inspect", str(small_file), "--verbose"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (MemoryError(), 1)])
def test_interrupts_and_lack_of_memory_have_their_codes(error, code, capsys, monkeypatch, small_file):
    """Ctrl-C is 130 without a word; lack of memory is an error in words."""
    import ggufpy.cli.inspect as command

    def fail(args):
        raise error

    monkeypatch.setattr(command, "run", fail)
    assert main(["inspect", str(small_file)]) == code
    assert capsys.readouterr().err == ("" if code == 130 else "ggufpy inspect: error: out of memory\n")


def test_warnings_and_log_are_single_lines(capsys, monkeypatch, small_file):
    """Python's warnings and the package's log come out as one harmless line each; the process's settings stay."""
    import logging

    import ggufpy.cli.inspect as command

    def warn(args):
        warnings.warn("the context\nis long\x1b", stacklevel=1)
        logging.getLogger("ggufpy.hub").warning("terms %s", "apply")
        logging.getLogger("ggufpy.hub").info("chatter")
        return 0

    before = list(logging.getLogger("ggufpy").handlers)
    monkeypatch.setattr(command, "run", warn)
    assert main(["inspect", str(small_file)]) == 0
    assert capsys.readouterr().err == "ggufpy: warning: the context is long\\x1b\nggufpy: terms apply\n"
    assert logging.getLogger("ggufpy").handlers == before
    main(["inspect", str(small_file), "--verbose"])
    assert "ggufpy: chatter\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {}),
        ("--max-tokens 9 --min-tokens 3 --seed 7", {"max_tokens": 9, "min_tokens": 3, "seed": 7}),
        ("--temperature 1.5 --top-k -1 --top-p 0.5", {"temperature": 1.5, "top_k": -1, "top_p": 0.5}),
        ("--dynatemp-range 0.5 --dynatemp-exponent 2", {"dynatemp_range": 0.5, "dynatemp_exponent": 2}),
        ("--min-p 0.1 --typical-p 0.9 --top-n-sigma 2", {"min_p": 0.1, "typical_p": 0.9, "top_n_sigma": 2}),
        ("--xtc-probability 0.5 --xtc-threshold 0.2", {"xtc_probability": 0.5, "xtc_threshold": 0.2}),
        ("--repeat-penalty 1.1 --repeat-last-n -1", {"repeat_penalty": 1.1, "repeat_last_n": -1}),
        ("--frequency-penalty 0.3 --presence-penalty -0.4", {"frequency_penalty": 0.3, "presence_penalty": -0.4}),
        ("--dry-multiplier 0.8 --dry-base 2", {"dry_multiplier": 0.8, "dry_base": 2}),
        ("--dry-allowed-length 3 --dry-penalty-last-n -1", {"dry_allowed_length": 3, "dry_penalty_last_n": -1}),
        ("--dry-sequence-breaker . --dry-sequence-breaker none", {"dry_sequence_breakers": (".", "none")}),
        ("--mirostat 2 --mirostat-tau 4 --mirostat-eta 0.2", {"mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.2}),
        ("--adaptive-target 0.3 --adaptive-decay 0.5", {"adaptive_target": 0.3, "adaptive_decay": 0.5}),
        ("--logit-bias 5=-1.5 --logit-bias 6=-inf", {"logit_bias": {5: -1.5, 6: -math.inf}}),
        ("--banned-token-id 5 --banned-token-id 6", {"banned_token_ids": (5, 6)}),
        ("--stop a --stop b --include-stop", {"stop": ("a", "b"), "include_stop": True}),
        ("--stop-token-id 5 --stop-token-id 6 --ignore-eos", {"stop_token_ids": (5, 6), "ignore_eos": True}),
    ],
)
def test_options_are_sampling_parameters(command, options, expected):
    """Each is the library's field of the same name; what is not given has the library's default."""
    assert sampling_params(parse([command, *options.split()])) == SamplingParams(**expected)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_sampling_parameter_is_an_option(command, capsys):
    """All but what text has no place for, with the meaning and the default of the dataclass, common ones first."""
    assert main([command, "--help"]) == 0
    common, rest = " ".join(capsys.readouterr().out.split()).split(" more ways to choose tokens: ")
    options = set(re.findall(r"--[a-z-]+", f"{common} {rest}"))
    plural = {"banned_token_ids", "dry_sequence_breakers", "stop_token_ids"}
    names = {field.name.removesuffix("s") if field.name in plural else field.name for field in fields(SamplingParams)}
    missing = {name for name in names if f"--{name.replace('_', '-')}" not in options}
    assert missing == {"n", "logprobs", "prompt_logprobs", "logits_processors"}
    assert "--temperature X divides the logits; 0 or less takes the likeliest token" in common
    assert "are left out; 0 is never (0) --xtc-threshold X a probability; above 0.5 nothing is left out (0.1) -" in rest
    assert "reaches across; may be repeated ('\\n' ':' '\"' '*') -" in rest


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["inspect", "--help"], ["dance"], ["bench"]])
def test_what_computes_nothing_imports_no_numpy(arguments):
    """Help, version and wrong usage answer at once: sampling parameters are looked at by who chooses tokens."""
    code = f"import sys; from ggufpy.cli import main; main({arguments}); sys.exit('numpy' in sys.modules)"
    assert run_python(code).returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["chat", "--help"], ["bench", "--help"]])
def test_help_goes_to_standard_output(arguments, capsys):
    """Help is complete, on standard output, and code 0."""
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: ggufpy ")
    assert err == ""


def test_the_version_names_ggml(capsys):
    """`--version` is one line with both versions."""
    import ggufpy

    assert main(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"ggufpy {ggufpy.__version__}, ggml {ggufpy.build_info()['ggml_version']} (")
    assert out.count("\n") == 1


# inspect


def test_inspect_shows_a_file(small_file, capsys):
    """Metadata with types, the types with sums, the tensors with shapes; what is long is shortened."""
    assert main(["inspect", str(small_file)]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.startswith("  ")}
    assert f"{small_file}: GGUF version 3, " in out
    assert "224 parameters in 2 tensors" in out
    assert lines["general.architecture"] == "str llama"
    assert lines["half"] == "f32 0.5" or lines["half"] == "f64 0.5"
    assert lines["yes"] == "bool true"
    assert lines["long"] == f"str {'x' * 72} … 428 more"
    assert lines["many"].endswith("[1000] [0, 1, 2, 3, 4, 5, … 994 more]")
    assert lines["words"] == 'str[200] ["a\\x07", "b", "a\\x07", "b", "a\\x07", "b", … 194 more]'
    assert lines["nested"] == "arr[2] [[1, 2], [3]]"
    assert lines["Q4_0"] == "1 128 4.50 72 B"
    assert lines["F32"] == "1 96 32.00 384 B"
    assert lines["q"] == "Q4_0 4 x 32 128 72 B"


def test_inspect_is_harmless(small_file, capsys):
    """No control character of the file reaches the terminal, and a value stays on its line."""
    main(["inspect", str(small_file)])
    out = capsys.readouterr().out
    assert not set(out) & {"\x1b", "\x07", "\u202e"}
    assert "evil\\x1b[2Jkey" in out
    assert "red \\x1b[31m\\u202e\\nnext line" in out
    assert "w\\x1b[0m" in out


def test_inspect_json_holds_everything(small_file, capsys):
    """JSON is valid also for infinite numbers, pure ASCII, and gives long arrays in full only when asked."""
    assert main(["inspect", str(small_file), "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert out.isascii()
    assert "\x1b" not in out
    assert found["version"] == 3
    assert found["metadata"]["evil\x1b[2Jkey"]["value"].startswith("red \x1b")
    assert found["metadata"]["infinite"]["value"] == "inf"
    assert found["metadata"]["nested"]["value"] == [[1, 2], [3]]
    many = found["metadata"]["many"]
    assert (many["count"], many["first"], many.get("value")) == (1000, [0, 1, 2, 3, 4, 5], None)
    assert found["types"]["Q4_0"] == {"tensors": 1, "elements": 128, "nbytes": 72}
    q = next(tensor for tensor in found["tensors"] if tensor["name"] == "q")
    assert (q["type"], q["shape"], q["shard"], q["nbytes"]) == ("Q4_0", [4, 32], 0, 72)
    assert q["offset"] % 32 == 0
    main(["inspect", str(small_file), "--json", "--arrays"])
    assert json.loads(capsys.readouterr().out)["metadata"]["many"]["value"] == list(range(1000))


def test_inspect_shows_types_that_ggml_does_not_know(capsys, tmp_path):
    """A tensor type of the future is shown by its number, and the rest of the file as ever."""
    head = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + bytes(8)
    info = (1).to_bytes(8, "little") + b"x" + (1).to_bytes(4, "little") + (4).to_bytes(8, "little")
    data = head + info + (999).to_bytes(4, "little") + bytes(8)
    path = tmp_path / "future.gguf"
    path.write_bytes(data.ljust(64, b"\0") + bytes(64))
    assert main(["inspect", str(path)]) == 0
    assert "type 999" in capsys.readouterr().out


def test_inspect_needs_neither_numpy_nor_the_compiled_part(small_file):
    """Looking into a file imports no NumPy, no cffi and no compiled module."""
    code = (
        "import sys; from ggufpy.cli import main; code = main(['inspect', sys.argv[1]]);"
        "bad = {'numpy', 'cffi', '_cffi_backend', 'ggufpy._ffi', 'ggufpy._ffi.lib'} & set(sys.modules);"
        "sys.exit(code or (f'imported {bad}' if bad else 0))"
    )
    command = [sys.executable, "-c", code, str(small_file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.name == "nt", reason="pipes break otherwise there")
def test_a_reader_that_leaves_is_no_error(tmp_path):
    """When nobody reads on, the command ends quietly."""
    path = tmp_path / "wide.gguf"
    write_gguf(path, {"general.architecture": "llama", "many": list(range(200_000))})
    process = start("inspect", path, "--arrays")
    assert process.stdout is not None
    assert process.stdout.read(4) != b""
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(timeout=30) == 141


# How things look


@pytest.mark.parametrize(
    ("n", "expected"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (98_362_432, "98.4 MB"), (999_999, "1.0 MB"), (5e15, "5000.0 TB")],
)
def test_sizes_are_for_people(n, expected):
    """Bytes are scaled by thousands, to the unit that makes them short."""
    assert terminal.size(n) == expected


def test_visible_escapes_what_a_terminal_obeys():
    """Control characters, direction marks and stray bytes are escaped; letters and joined emoji are not."""
    assert terminal.visible("a\x1b\x9b\u2066\udcff\n") == "a\\x1b\\x9b\\u2066\\udcff\\n"
    assert terminal.visible("é 漢 👩\u200d🚀") == "é 漢 👩\u200d🚀"
    assert terminal.visible("a\n\t\r", keep="\n\t") == "a\n\t\\r"


def test_tables_line_up():
    """Columns are padded, numbers flush right, and no line ends in blanks."""
    assert terminal.table([("a", "1", ""), ("bbb", "22", "x")], right=(1,)) == "a     1\nbbb  22  x"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_status_line_comes_late_and_goes(monkeypatch):
    """On a terminal nothing is drawn for what is quick; else one line is redrawn, and erased at the end."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with terminal.Status("quick"):
        pass
    assert stream.getvalue() == ""
    monkeypatch.setattr(terminal.Status, "DELAY", 0.01)
    with terminal.Status("downloading x") as status:
        status.report(50, 200)
        time.sleep(0.3)
    assert "\r\x1b[Kdownloading x  [##........]   25%  50 B of 200 B  0 s" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_messages_take_the_place_of_the_status_line(monkeypatch):
    """What is said meanwhile begins on a line of its own, and not behind what stands there."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(terminal.Status, "DELAY", 0.01)
    terminal.say("before")
    with terminal.Status("waiting"):
        time.sleep(0.15)
        terminal.say("something")
    terminal.say("after")
    assert stream.getvalue().startswith("before\n\r\x1b[Kwaiting  0 s")
    assert "\r\x1b[Ksomething\n" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[Kafter\n")


def test_without_a_terminal_only_long_downloads_report(monkeypatch, capsys):
    """Elsewhere a download gives a plain line now and then, and nothing else does."""
    monkeypatch.setattr(terminal.Status, "DELAY", 0.0)
    with terminal.Status("loading") as status:
        status.report(50, 200)
    with terminal.Status("downloading x", plain=True) as status:
        status.report(50, 200)
        status.report(51, 200)
    assert capsys.readouterr().err == "downloading x:  25%  50 B of 200 B\n"


# tokenize and template

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im|>{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mood }}"


@pytest.fixture
def vocabulary(tmp_path):
    """Write a byte-level vocabulary with chat templates: byte b is token 2 + b, `<|im|>` is 1."""
    templates = {"": TEMPLATE + "{% if add_generation_prompt %}>{% endif %}", ".tool_use": "{{ tools | length }} tools"}
    metadata = byte_level(special=[("<s>", 3), ("<|im|>", 3)], merges=[("h", "i")], add_bos_token=True)
    metadata |= {f"tokenizer.chat_template{name}": template for name, template in templates.items()}
    write_gguf(tmp_path / "vocabulary.gguf", metadata, {})
    return tmp_path / "vocabulary.gguf"


def feed(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_tokenize_shows_ids_places_and_pieces(vocabulary, capsys):
    """Begin token included, control tokens as text; what a terminal obeys is escaped."""
    assert main(["tokenize", str(vocabulary), "hi\x1b<|im|>"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "9 tokens"
    assert lines[2].split() == ["id", "start", "end", "piece"]
    assert lines[3].split() == ["0", "0", "0", '"<s>"']
    assert lines[4].split() == ["258", "0", "2", '"hi"']
    assert lines[5].split() == [str(2 + 0x1B), "2", "3", '"\\x1b"']


def test_tokenize_takes_standard_input_as_it_is(vocabulary, capsys, monkeypatch):
    """Newlines and bad bytes included; `--json` has the bytes of each token."""
    feed(monkeypatch, b"hi\xff\n")
    assert main(["tokenize", str(vocabulary), "--json", "--no-add-special"]) == 0
    tokens = json.loads(capsys.readouterr().out)
    assert tokens[0] == {"id": 258, "piece": "hi", "hex": "6869", "start": 0, "end": 2}
    assert [(token["hex"], token["start"], token["end"]) for token in tokens[1:]] == [
        ("ef", 2, 3), ("bf", 2, 3), ("bd", 2, 3), ("0a", 3, 4),
    ]  # fmt: skip


def test_tokenize_prints_ids_for_scripts(vocabulary, capsys):
    """On one line; with `--parse-special` names are tokens."""
    assert main(["tokenize", str(vocabulary), "hi<|im|>", "--ids", "--parse-special"]) == 0
    assert capsys.readouterr().out == "0 258 1\n"
    assert main(["tokenize", str(vocabulary), "", "--no-add-special"]) == 0
    assert capsys.readouterr().out == "0 tokens\n"


def test_tokenize_colours_the_text_on_a_terminal(vocabulary, capsys, monkeypatch):
    """Unless NO_COLOR says not to."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(["tokenize", str(vocabulary), "hia", "--no-add-special"])
    line = capsys.readouterr().out.splitlines()[2]
    assert terminal.visible(line).replace("\\x1b[0m", "|").count("|") == 2
    assert "mhi\x1b[0m" in line
    monkeypatch.setenv("NO_COLOR", "1")
    main(["tokenize", str(vocabulary), "hia", "--no-add-special"])
    assert "\x1b" not in capsys.readouterr().out


def test_tokenize_needs_neither_numpy_nor_the_compiled_part(vocabulary):
    """As inspect."""
    code = (
        "import sys; sys.modules['numpy'] = sys.modules['ggufpy._ffi.lib'] = None\n"
        f"from ggufpy.cli import main; sys.exit(main(['tokenize', {str(vocabulary)!r}, 'hi ' * 2000, '--ids']))"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["0", *["258", str(2 + ord(" "))] * 2000]


def test_template_renders_messages(vocabulary, capsys, tmp_path, monkeypatch):
    """A list, or an object with whatever the template takes; from a file or standard input."""
    messages = [{"role": "user", "content": "hi"}]
    path = tmp_path / "chat.json"
    path.write_text(json.dumps({"messages": messages, "mood": "!"}))
    assert main(["template", str(vocabulary), str(path)]) == 0
    assert capsys.readouterr().out == "<s><|im|>user: hi\n!>\n"
    feed(monkeypatch, json.dumps(messages).encode())
    assert main(["template", str(vocabulary), "--no-generation-prompt"]) == 0
    assert capsys.readouterr().out == "<s><|im|>user: hi\n\n"
    path.write_text(json.dumps({"messages": messages, "tools": [{}, {}]}))
    assert main(["template", str(vocabulary), str(path)]) == 0
    assert capsys.readouterr().out == "2 tools\n"


def test_template_gives_the_ids_of_what_is_meant(vocabulary, capsys, tmp_path):
    """A message cannot forge a turn."""
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([{"role": "a", "content": "<|im|>"}]))
    assert main(["template", str(vocabulary), str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == "<s><|im|>a: <|im|>\n>"
    assert found["ids"][:2] == [0, 1]
    assert found["ids"].count(1) == 1


def test_template_shows_templates(vocabulary, capsys, tmp_path):
    """The file's, one by name, or another from a file."""
    assert main(["template", str(vocabulary), "--source", "--name", "tool_use"]) == 0
    assert capsys.readouterr().out == "{{ tools | length }} tools\n"
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "hi"}]')
    assert (
        main(["template", str(vocabulary), str(tmp_path / "chat.json"), "--chat-template", str(tmp_path / "own.jinja")])
        == 0
    )
    assert capsys.readouterr().out == "hi\n"


@pytest.mark.parametrize(
    ("chat", "options", "code", "reason"),
    [
        ("[", [], 2, "expected JSON, and line 1 is not"),
        ("7", [], 2, "expected a list of messages, or an object with messages"),
        ("[7]", [], 1, "expected a list of messages, each with a role"),
        ("[" * 100_000, [], 2, "MESSAGES: maximum recursion depth"),
        ("1" * 10_000, [], 2, "MESSAGES: Exceeds the limit"),
        ("\xff", [], 2, "chat.json: expected UTF-8, found another byte at 0"),
        ("[]", ["--chat-template", sys.executable], 2, "expected UTF-8, found another byte"),
        ("[]", ["--name", "nope"], 2, "the file has no template 'nope'; it has tool_use, default"),
        ("[]", ["--name", "default", "--chat-template", "x"], 2, "expected one of the two"),
    ],
)
def test_template_says_what_is_wrong(vocabulary, capsys, tmp_path, chat, options, code, reason):
    """In one line."""
    (tmp_path / "chat.json").write_text(chat, encoding="latin-1")
    assert main(["template", str(vocabulary), str(tmp_path / "chat.json"), *options]) == code
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
