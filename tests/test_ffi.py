"""The compiled part: what it declares, how it is loaded beside another ggml, its log, and the check of the CPU."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ggufpy._ffi import cpu, lib
from ggufpy._ffi.lib import C, build_info, check_status, ffi
from ggufpy.errors import BackendError, BuildError

PACKAGE = Path(lib.__file__).parent.parent
VENDOR = Path(__file__).parent.parent / "vendor" / "ggml"


def python(code: str, *before: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, through a command such as an emulator if one is given."""
    command = [*before, sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


# --- declarations ---


def test_a_tensor_can_be_made_and_read() -> None:
    """Structures, enumerations and functions of the declarations are ggml's own."""
    context = ffi.gc(C.ggml_init({"mem_size": 1 << 16, "mem_buffer": ffi.NULL, "no_alloc": True}), C.ggml_free)
    tensor = C.ggml_new_tensor_2d(context, C.GGML_TYPE_Q4_0, 64, 3)
    assert [64, 3, 1, 1] == list(tensor.ne)
    assert [18, 36, 108, 108] == list(tensor.nb)
    assert C.GGML_TYPE_Q4_0 == tensor.type == 2
    C.ggml_set_name(tensor, b"weight")
    assert b"weight" == ffi.string(tensor.name)
    C.ggml_set_input(tensor)
    assert C.GGML_TENSOR_FLAG_INPUT == tensor.flags


def test_every_forward_operation_of_the_header_is_declared() -> None:
    """A moved pin shows what it adds: each operation that takes a context is in ops.h, or is left out here."""
    header = VENDOR / "src" / "ggml" / "include" / "ggml.h"
    if not header.is_file():
        pytest.skip("the ggml source is not unpacked here")
    left_out = {"rope", "rope_custom", "win_part", "win_unpart", "get_rel_pos", "add_rel_pos", "conv_1d_ph"}
    left_out |= {"conv_1d_dw_ph", "map_custom1", "map_custom2", "map_custom3"}  # ggml_custom_4d stands for these
    left_out |= {"cross_entropy_loss", "opt_step_adamw", "opt_step_sgd"}  # training
    left_out |= {"add1", "upscale_ext"}  # deprecated
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(encoding="utf-8"), flags=re.S)
    text = text[text.index("ggml_dup(") - 100 : text.index("ggml_build_forward_select")]
    pattern = r"struct ggml_tensor \*\s*ggml_(\w+)\s*\(\s*struct ggml_context\s*\*\s*ctx"
    operations = {name for name in re.findall(pattern, text) if not re.search(r"_inplace|_back\b|_backward", name)}
    assert 100 < len(operations)
    assert not {name for name in operations - left_out if not hasattr(C, f"ggml_{name}")}


def test_a_status_becomes_an_exception() -> None:
    """check_status says what was tried and how ggml calls the outcome."""
    check_status(C.GGML_STATUS_SUCCESS, "computing")
    with pytest.raises(BackendError, match=r"computing: .*alloc"):
        check_status(C.GGML_STATUS_ALLOC_FAILED, "computing")


def test_the_registry_procedures_of_the_cpu_are_there() -> None:
    """What a separately loaded CPU backend offers is reachable through the shim."""
    device = C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_CPU)
    backend = ffi.gc(C.ggml_backend_dev_init(device, ffi.NULL), C.ggml_backend_free)
    assert C.ggufpy_backend_set_n_threads(backend, 2)
    assert C.ggufpy_backend_set_abort_callback(backend, ffi.NULL, ffi.NULL)
    assert C.ggufpy_backend_set_use_ref(backend, False)
    parameters = ffi.new("struct ggml_threadpool_params *", C.ggml_threadpool_params_default(2))
    pool = C.ggufpy_threadpool_new(device, parameters)
    assert pool
    assert C.ggufpy_backend_set_threadpool(backend, pool)
    assert C.ggufpy_backend_set_threadpool(backend, ffi.NULL)
    assert C.ggufpy_threadpool_free(device, pool)


# --- what was built ---


def test_build_info_tells_the_pin_and_this_machine() -> None:
    """build_info names version, commit, options, CPU features needed and found, and the backends."""
    info = build_info()
    pin = (VENDOR / "UPSTREAM.toml").read_text(encoding="utf-8")
    assert f'version = "{info["ggml_version"]}"' in pin
    assert info["ggml_commit"] in pin
    assert info["ggml_commit"].startswith(ffi.string(C.ggml_commit()).decode())
    assert "ON" == info["options"]["GGML_LLAMAFILE"] == info["options"]["GGML_BACKEND_DL"]
    assert info["options"]["GGUFPY_LONG_RUNS"] in ("ON", "OFF")
    assert set(info["cpu_features_needed"]) <= set(info["cpu_features_found"])
    assert "CPU" in info["backends"]["CPU"]["devices"]
    assert info["cuda"] == (info["options"]["GGML_CUDA"] == "ON")
    assert info is not build_info()


def test_loading_needs_no_numpy_and_says_nothing() -> None:
    """Loading costs little: nothing heavy is imported, and nothing is printed, at start or at exit."""
    code = "import sys, ggufpy._ffi.lib; print('numpy' in sys.modules)"
    done = python(code, PYTHONWARNINGS="error", PYTHONDEVMODE="1")
    assert ("False\n", "", 0) == (done.stdout, done.stderr, done.returncode)


# --- the CPU ---


def fake_cpuid(*features: str) -> Any:
    """Return a cpuid function of a CPU that has just these features."""

    def cpuid(leaf: int, subleaf: int) -> list[int]:
        registers = [0, 0, 0, 0]
        for name in features:
            its_leaf, its_subleaf, register, bit, _ = cpu.FEATURES[name]
            if (its_leaf, its_subleaf) == (leaf, subleaf):
                registers[register] |= 1 << bit
        return registers

    return cpuid


def test_features_are_found_where_cpu_and_system_have_them() -> None:
    """A register set that the operating system does not save counts as missing."""
    cpuid = fake_cpuid("SSE4_2", "AVX2", "AVX512F", "AMX_TILE")
    asked = ["SSE4_2", "AVX", "AVX2", "AVX512F", "AMX_TILE", "NO_SUCH"]
    assert ("SSE4_2", "AVX2", "AVX512F", "AMX_TILE") == cpu.features_found(asked, cpuid, lambda: 0x600E7)
    assert ("SSE4_2", "AVX2") == cpu.features_found(asked, cpuid, lambda: 0x7)
    assert ("SSE4_2",) == cpu.features_found(asked, cpuid, lambda: 0)


def test_features_are_read_from_the_compilers_macros() -> None:
    """Only whole names of known features count."""
    macros = "#define __AVX2__ 1\n#define __AVX512VNNI__ 1\n#define __AVX__X 1\n#define __SGX__ 1\n"
    assert ("AVX2", "AVX512VNNI") == cpu.features_in_macros(macros)


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="reads /proc/cpuinfo")
def test_features_agree_with_the_kernel() -> None:
    """What CPUID says here is what Linux says."""
    flags = set(re.search(r"^flags\s*:(.*)$|\Z", Path("/proc/cpuinfo").read_text(), re.M)[0].split())  # type: ignore[index]
    if not flags:
        pytest.skip("not an x86 CPU")
    named = {"SSE4_2": "sse4_2", "AVX2": "avx2", "FMA": "fma", "BMI2": "bmi2", "AVX512F": "avx512f"}
    named |= {"AVX512VNNI": "avx512_vnni", "AVXVNNI": "avx_vnni", "AVX512BF16": "avx512_bf16", "AMX_INT8": "amx_int8"}
    found = build_info()["cpu_features_found"]
    assert {name for name, flag in named.items() if flag in flags} == set(found) & set(named)


def test_another_cpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for a better CPU raises an ImportError that names what is missing."""
    monkeypatch.setitem(lib._record, "cpu_features", ["SSE3", "AVX2", "AVX512VNNI"])
    monkeypatch.setattr(lib, "features_found", lambda *_: ("SSE3",))
    with pytest.raises(ImportError, match="AVX2, AVX512VNNI, which this CPU lacks") as caught:
        lib._check_build()
    assert isinstance(caught.value, BuildError)


def test_other_libraries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of another version than the module's are an error, not a crash."""
    monkeypatch.setitem(lib._record, "ggml_version", "0.0.1")
    with pytest.raises(BuildError, match=r"expected version 0\.0\.1, loaded 0"):
        lib._check_build()


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-x86_64")
def test_an_old_cpu_works_or_is_refused() -> None:
    """On an emulated CPU of 2008 the library works, or raises ImportError naming the feature; it never crashes."""
    code = "import ggufpy._ffi.lib as l; print(l.build_info()['backends'])"
    done = python(code, "qemu-x86_64", "-cpu", "Nehalem")
    if build_info()["native"]:
        assert re.search(r"BuildError: .*compiled for a CPU with .*AVX.*, which this CPU lacks", done.stderr)
    else:
        assert "'CPU'" in done.stdout, done.stderr


# --- which libraries are loaded ---


def test_the_best_scored_variant_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several CPU libraries the one with the highest score is chosen; a score of 0 rules one out."""
    scores = {"x64": 1, "haswell": 63, "zen4": 0}
    fake = SimpleNamespace(ggufpy_backend_score=lambda path: scores[os.fsdecode(path)])
    monkeypatch.setattr(lib, "C", fake)
    assert Path("haswell") == lib._best_cpu_library([Path(name) for name in scores])
    scores.update(x64=0, haswell=0)
    assert lib._best_cpu_library([Path(name) for name in scores]) is None
    assert lib._best_cpu_library([]) is None


def test_a_backend_that_cannot_load_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken library of another backend is left out, and build_info says why."""
    monkeypatch.setattr(lib, "_unavailable", {})
    broken = tmp_path / "libggufpy-ggml-broken.so"
    broken.write_bytes(b"not a library")
    assert not lib._load(broken)
    assert "broken" in build_info()["backends_unavailable"]
    assert "libggufpy-ggml-broken.so" in build_info()["backends_unavailable"]["broken"]


def test_cublas_of_the_environment_is_opened_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA library that misses cuBLAS is opened again after NVIDIA's wheel, wherever that is installed."""
    cublas = tmp_path / "nvidia" / "cu13" / "lib" / "libcublas.so.13"
    cublas.parent.mkdir(parents=True)
    cublas.touch()
    opened: list[str] = []
    missing = ffi.new("char[]", b"libcublas.so.13: cannot open shared object file")
    fake = SimpleNamespace(ggufpy_dlerror=lambda: missing, ggufpy_dlopen=lambda path: opened.append(os.fsdecode(path)))
    monkeypatch.setattr(lib, "C", fake)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    lib._load_with_cublas(Path("libggufpy-ggml-cuda.so"))
    assert [str(cublas), "libggufpy-ggml-cuda.so"] == opened


def test_stray_libraries_are_not_picked_up(tmp_path: Path) -> None:
    """Neither the current folder, LD_LIBRARY_PATH nor GGML_BACKEND_PATH leads to another library."""
    for name in ("libggml-cpu-evil.so", "libggufpy-ggml.so", "libggufpy-ggml-base.so", "libggml-base.so"):
        (tmp_path / name).write_bytes(b"not a library")
    code = f"import os; os.chdir({str(tmp_path)!r}); import ggufpy._ffi.lib as l; print(*l.build_info()['backends'])"
    stray = str(tmp_path / "libggml-cpu-evil.so")
    done = python(code, LD_LIBRARY_PATH=str(tmp_path), GGML_BACKEND_PATH=stray, PYTHONPATH=os.pathsep.join(sys.path))
    assert ("", 0) == (done.stderr, done.returncode)
    assert "CPU" in done.stdout.split()


# --- another ggml in the process (E8) ---


def bindings_to(other: str, first: str) -> tuple[set[str], int]:
    """Load everything in a process of its own; return our symbols bound into `other`, and how many into our own."""
    code = f"{first}\nimport ggufpy._ffi.lib"
    path = os.pathsep.join(sys.path)
    done = python(code, LD_BIND_NOW="1", LD_DEBUG="bindings", PYTHONPATH=path)
    assert 0 == done.returncode, done.stderr[-2000:]
    bound = re.findall(r"binding file (\S+) \[\d+\] to (\S+) \[\d+\]: normal symbol `(\w+)'", done.stderr)
    ours = [(target, symbol) for source, target, symbol in bound if "ggufpy" in source]
    return {symbol for target, symbol in ours if other in target}, sum("ggufpy" in target for target, _ in ours)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the GNU loader")
def test_symbols_are_bound_to_our_own_ggml(tmp_path: Path) -> None:
    """A ggml that is in the process already, opened RTLD_GLOBAL, gets none of our calls."""
    content = (PACKAGE / "lib" / "libggufpy-ggml-base.so").read_bytes()
    foreign = tmp_path / "libforeign-ggml-one.so"
    foreign.write_bytes(content.replace(b"libggufpy-ggml-base.so", b"libforeign-ggml-one.so"))
    theirs, ours = bindings_to("libforeign", f"import ctypes; ctypes.CDLL({str(foreign)!r}, ctypes.RTLD_GLOBAL)")
    assert set() == theirs
    assert 300 < ours


needs_llama_cpp = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")


@needs_llama_cpp
@pytest.mark.parametrize("first", ["import llama_cpp", ""])
def test_llama_cpp_gets_none_of_our_symbols(first: str) -> None:
    """llama_cpp opens its ggml RTLD_GLOBAL; not one of our symbols is bound there."""
    theirs, ours = bindings_to("llama_cpp", first)
    assert set() == theirs
    assert 300 < ours


@needs_llama_cpp
@pytest.mark.parametrize("order", ["ours()\ntheirs()", "theirs()\nours()"])
def test_llama_cpp_can_run_in_the_same_process(order: str, smollm2_path: Path) -> None:
    """Whoever is first, both generate what they generate alone."""
    code = f"""
path, prompt = {str(smollm2_path)!r}, "The capital of France is"
def ours():
    import ggufpy
    with ggufpy.Model.load(path) as model:
        print(model.generate(prompt, max_tokens=8, temperature=0).text.split())
def theirs():
    import llama_cpp
    model = llama_cpp.Llama(path, verbose=False, n_ctx=256)
    print(model(prompt, max_tokens=8, temperature=0)["choices"][0]["text"].split())
{order}
"""
    done = python(code, PYTHONPATH=os.pathsep.join(sys.path))
    assert 0 == done.returncode, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    assert "Paris" in first


# --- the log ---


@pytest.fixture
def log() -> Iterator[Any]:
    """Give ggml's current log function, and take away what a test left half-said."""
    callback, data = ffi.new("ggml_log_callback *"), ffi.new("void **")
    C.ggml_log_get(callback, data)
    yield lambda level, text: callback[0](level, text, ffi.NULL)
    lib._fragments.flush()


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Return level and text of what was logged."""
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "ggufpy.ggml"]


def test_messages_of_ggml_reach_logging(caplog: pytest.LogCaptureFixture) -> None:
    """What ggml says, here about a library that is not there, is logged with its level."""
    with caplog.at_level(logging.DEBUG, "ggufpy.ggml"):
        assert not C.ggml_backend_load(b"/nowhere/libnothing.so")
    ((level, text),) = messages(caplog)
    assert logging.ERROR == level
    assert "/nowhere/libnothing.so" in text


def test_fragments_are_joined(log: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Pieces with level CONT belong to the line before; a new level ends a line that had no newline."""
    with caplog.at_level(logging.DEBUG, "ggufpy.ggml"):
        log(C.GGML_LOG_LEVEL_INFO, b"loading")
        log(C.GGML_LOG_LEVEL_CONT, b" .")
        log(C.GGML_LOG_LEVEL_CONT, b".\n")
        log(C.GGML_LOG_LEVEL_WARN, b"odd")
        log(C.GGML_LOG_LEVEL_ERROR, b"bad \xff\n")
        log(C.GGML_LOG_LEVEL_DEBUG, b"\n")
    expected = [(logging.INFO, "loading .."), (logging.WARNING, "odd"), (logging.ERROR, "bad \ufffd")]
    assert expected == messages(caplog)


def test_threads_do_not_mix_their_lines(log: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Fragments are joined for each thread on its own."""
    turn = threading.Barrier(2)

    def say(name: bytes) -> None:
        for piece in (C.GGML_LOG_LEVEL_INFO, C.GGML_LOG_LEVEL_CONT, C.GGML_LOG_LEVEL_CONT):
            turn.wait()
            log(piece, name)
        log(C.GGML_LOG_LEVEL_CONT, b"\n")

    with caplog.at_level(logging.DEBUG, "ggufpy.ggml"):
        threads = [threading.Thread(target=say, args=(name,)) for name in (b"a", b"b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ["aaa", "bbb"] == sorted(text for _, text in messages(caplog))


def test_a_failing_handler_does_not_reach_c(log: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """An exception in a log handler is dropped: there is nobody above it who could take it."""

    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("no")

    handler, logger = Failing(), logging.getLogger("ggufpy.ggml")
    logger.addHandler(handler)
    try:
        log(C.GGML_LOG_LEVEL_ERROR, b"x\n")
    finally:
        logger.removeHandler(handler)
    assert "" == capfd.readouterr().err


def test_errors_of_ggml_are_quiet_by_default() -> None:
    """A program that sets up no logging sees nothing of ggml's log, even an error."""
    done = python("from ggufpy._ffi.lib import C; C.ggml_backend_load(b'/nowhere/x.so')")
    assert ("", "", 0) == (done.stdout, done.stderr, done.returncode)
