"""The build: where ggml comes from, what is asked of pip and CMake, and that each failure ends in a plain paragraph.

Nothing is downloaded or compiled here, but for a few lines of C.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("setuptools")

ROOT = Path(__file__).parent.parent
UNPACKED = ROOT / "vendor" / "ggml" / "src" / "ggml"
VARIABLES = ("CUDA", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "GGUFPY_PORTABLE", "GGUFPY_GGML_SOURCE", "CMAKE_ARGS")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Give the build backend, freshly loaded, in an environment that asks for nothing."""
    for name in (*VARIABLES, "CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("build_ggml", ROOT / "build_ggml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "build_ggml", module)
    spec.loader.exec_module(module)
    return module


def paragraph(function: Callable[..., Any], *arguments: Any) -> str:
    """Return the paragraph with which a call ends the build, unwrapped."""
    with pytest.raises(SystemExit) as caught:
        function(*arguments)
    text = str(caught.value)
    assert "\n\n" not in text.strip()
    assert text.strip().endswith(".")
    return " ".join(text.split())


def archive(build: ModuleType, path: Path, files: dict[str, bytes]) -> Path:
    """Write an archive of the pinned one's shape, and make the pin name it."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"llama_cpp_python-0.3.36/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    build.upstream()["archive"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return path


FILES = {
    "README.md": b"no",
    "vendor/llama.cpp/LICENSE": b"MIT",
    "vendor/llama.cpp/src/llama.cpp": b"no",
    "vendor/llama.cpp/ggml/include/ggml.h": b"yes",
    "vendor/llama.cpp/ggml-other/ggml.h": b"no",
}


# --- switches ---


@pytest.mark.parametrize(("value", "on"), [("on", True), ("ON", True), ("1", True), ("", False), ("off", False)])
def test_a_switch_is_on_or_off(build: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    """CUDA and GGUFPY_PORTABLE take on and off, in any case."""
    monkeypatch.setenv("CUDA", value)
    assert on is build.switch("CUDA")


def test_a_misspelt_switch_is_refused(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything else ends the build, and does not count as off."""
    monkeypatch.setenv("CUDA", "onn")
    assert "CUDA=onn is not understood" in paragraph(build.get_requires_for_build_wheel)


# --- the source ---


def test_only_ggml_and_its_licence_are_unpacked(build: ModuleType, tmp_path: Path) -> None:
    """The archive carries much more; and an earlier tree gives way as a whole."""
    old = tmp_path / "src" / "ggml" / "old.c"
    old.parent.mkdir(parents=True)
    old.touch()
    build.unpack(archive(build, tmp_path / "a.tar.gz", FILES), tmp_path / "src")
    names = {str(path.relative_to(tmp_path / "src")) for path in (tmp_path / "src").rglob("*") if path.is_file()}
    assert {"LICENSE", "ggml/include/ggml.h", "ARCHIVE.sha256"} == names
    assert build.upstream()["archive"]["sha256"] == build.unpacked_pin(tmp_path / "src")


def test_another_archive_is_not_used(build: ModuleType, tmp_path: Path) -> None:
    """A wrong hash names both, and leaves nothing behind."""
    path = archive(build, tmp_path / "a.tar.gz", FILES)
    found = build.upstream()["archive"]["sha256"]
    build.upstream()["archive"]["sha256"] = "0" * 64
    text = paragraph(build.unpack, path, tmp_path / "src")
    assert f"expected SHA-256 {'0' * 64}, found {found}" in text
    assert [path] == list(tmp_path.iterdir())


def test_a_given_folder_comes_first(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GGUFPY_GGML_SOURCE may be ggml itself, or a tree that has it where llama.cpp or the archive does."""
    for inner in ("", "ggml", "vendor/llama.cpp/ggml"):
        folder = tmp_path / f"tree{len(inner)}"
        (folder / inner / "include").mkdir(parents=True)
        (folder / inner / "include" / "ggml.h").touch()
        monkeypatch.setenv("GGUFPY_GGML_SOURCE", str(folder))
        assert folder / inner == build.find_source()


def test_a_given_folder_without_ggml_is_refused(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong GGUFPY_GGML_SOURCE ends the build instead of falling back to the download."""
    monkeypatch.setenv("GGUFPY_GGML_SOURCE", str(tmp_path))
    assert f"GGUFPY_GGML_SOURCE={tmp_path} holds no ggml" in paragraph(build.find_source)


def test_an_unpacked_tree_of_another_pin_is_not_used(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree in vendor/ggml/src counts only if it comes from the pinned archive."""
    monkeypatch.setattr(build, "UNPACKED", tmp_path)
    assert build.find_source() is None
    (tmp_path / "ARCHIVE.sha256").write_text("0" * 64)
    assert build.find_source() is None
    (tmp_path / "ARCHIVE.sha256").write_text(build.upstream()["archive"]["sha256"] + "\n")
    assert tmp_path / "ggml" == build.find_source()


def test_what_the_download_needs_is_required(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip and the archive's own build system are asked for exactly when there is something to download."""
    monkeypatch.setattr(build, "UNPACKED", tmp_path)
    assert {"pip", "scikit-build-core"} <= set(build.get_requires_for_build_wheel())
    assert {"pip", "scikit-build-core"} <= set(build.get_requires_for_build_sdist())
    (tmp_path / "ARCHIVE.sha256").write_text(build.upstream()["archive"]["sha256"])
    assert "pip" not in build.get_requires_for_build_wheel()
    assert "pip" not in build.get_requires_for_build_editable()
    assert "pip" not in build.get_requires_for_build_sdist()


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("ERROR: No matching distribution found", "could not be fetched"),
        ("ERROR: DO NOT MATCH THE HASHES …\n Expected sha256 832d\n   Got        abcd\n", "found abcd"),
    ],
)
def test_a_failed_download_says_what_to_do(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, expected: str
) -> None:
    """No network and a wrong hash are told apart."""
    commands: list[list[str]] = []
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: object())

    def run(command: list[str]) -> tuple[int, str]:
        commands.append(command)
        return 1, output

    monkeypatch.setattr(build, "run", run)
    assert expected in paragraph(build.download, tmp_path)
    assert "--require-hashes" in commands[0]
    assert build.upstream()["archive"]["sha256"] in (tmp_path / "requirement.txt").read_text()


def test_a_download_without_pip_says_what_to_install(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without isolation the environment may lack what the download needs."""
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert "python -m pip install pip scikit-build-core" in paragraph(build.download, tmp_path)


def test_a_pip_of_ours_is_not_taken_for_the_frontends(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables with which pip calls a build hook do not reach the commands that the hook runs."""
    monkeypatch.setenv("_PYPROJECT_HOOKS_BACKEND_PATH", "/elsewhere")
    monkeypatch.setenv("GGUFPY_TEST", "kept")
    code = "import os; print(os.environ.get('_PYPROJECT_HOOKS_BACKEND_PATH'), os.environ['GGUFPY_TEST'])"
    assert (0, "None kept\n") == build.run([sys.executable, "-c", code])


def test_the_licence_is_the_unpacked_one(build: ModuleType) -> None:
    """The licence that goes into the wheel is that of the ggml that is compiled."""
    unpacked = build.UNPACKED / "LICENSE"
    if build.unpacked_pin(build.UNPACKED) != build.upstream()["archive"]["sha256"]:
        pytest.skip("the pinned ggml is not unpacked here")
    assert unpacked.read_bytes() == (build.VENDOR / "LICENSE").read_bytes()


# --- tools ---


def test_a_missing_compiler_is_named(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is fetched, a named compiler that does not exist ends the build."""
    monkeypatch.setenv("CXX", "/nonexistent/c++ -m64")
    text = paragraph(build.get_requires_for_build_wheel)
    assert "No C++ compiler was found (CXX=/nonexistent/c++ does not exist)" in text
    monkeypatch.setenv("CMAKE_ARGS", "-DCMAKE_CXX_COMPILER=another")
    build.get_requires_for_build_wheel()


def test_no_compiler_at_all(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With none in PATH, the paragraph says which were looked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cc, gcc, clang are not in PATH" in paragraph(build.check_compilers, build.Options.from_environment())


def test_a_missing_tool_is_named(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cmake and ninja come from their PyPI packages or from PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "pip install cmake ninja" in paragraph(build.tool, "no_such_tool", "BIN_DIR")


@pytest.mark.parametrize(("results", "expected"), [([1], "could not configure"), ([0, 1], "did not compile")])
def test_a_failure_of_cmake_is_explained(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, results: list[int], expected: str
) -> None:
    """Configuring and compiling each have their paragraph."""
    monkeypatch.setattr(build, "run", lambda command: (results.pop(0), ""))
    assert expected in paragraph(build.configure_and_compile, ["cmake"], ["cmake", "--build"])


def test_the_users_arguments_come_last(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CMAKE_ARGS is split like a shell's words and wins over ours."""
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_OPENMP=OFF '-DCMAKE_CXX_FLAGS=-O2 -g'")
    monkeypatch.setenv("GGUFPY_PORTABLE", "on")
    arguments = build.cmake_arguments(build.Options.from_environment(), tmp_path / "a b", tmp_path)
    assert f"-DGGUFPY_GGML_SOURCE={tmp_path}/a b" == arguments[0]
    assert "-DGGML_CPU_ALL_VARIANTS=ON" in arguments
    assert ["-DGGML_OPENMP=OFF", "-DCMAKE_CXX_FLAGS=-O2 -g"] == arguments[-2:]


# --- CUDA ---


def toolkit(folder: Path, release: str = "13.0", *, cublas: bool) -> Path:
    """Make a CUDA toolkit of which only `nvcc --version` works."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    if cublas:
        (folder / "lib64").mkdir()
        (folder / "lib64" / "libcublas.so").touch()
    return nvcc


def test_cuda_without_nvcc_stops_first(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA=on without nvcc ends before anything is fetched or compiled, in one paragraph."""
    monkeypatch.setenv("CUDA", "on")
    monkeypatch.setenv("CUDACXX", "/nonexistent/nvcc")
    for hook in (build.get_requires_for_build_wheel, build.get_requires_for_build_editable):
        text = paragraph(hook)
        assert "nvcc was not found (/nonexistent/nvcc do not exist)" in text
        assert "Install the CUDA toolkit" in text


@pytest.mark.parametrize(
    ("release", "cublas", "expected"),
    [
        ("13.0", True, []),
        ("13.0", False, ["nvidia-cublas>=13,<14"]),
        ("12.9", False, ["nvidia-cublas-cu12"]),
    ],
)
def test_a_toolkit_without_cublas_is_completed(
    build: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    cublas: bool,
    expected: list[str],
) -> None:
    """The wheel of the same CUDA major is required, and only where the toolkit has no cuBLAS."""
    monkeypatch.setenv("CUDA", "on")
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path, release, cublas=cublas).parent.parent))
    needed = build.get_requires_for_build_wheel()
    assert expected == [requirement for requirement in needed if "cublas" in requirement]


def test_cublas_of_the_environment_is_used(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel's folder reaches CMake through a link whose path stays the same from build to build."""
    monkeypatch.setenv("CUDA", "on")
    monkeypatch.setenv("CUDACXX", str(toolkit(tmp_path / "cuda", cublas=False)))
    options = build.Options.from_environment()
    assert "pip install 'nvidia-cublas>=13,<14'" in paragraph(build.cmake_arguments, options, tmp_path, tmp_path)
    header = tmp_path / "site" / "nvidia" / "cu13" / "include" / "cublas_v2.h"
    header.parent.mkdir(parents=True)
    header.touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert f"-DGGUFPY_CUBLAS={tmp_path}/cublas" in build.cmake_arguments(options, tmp_path, tmp_path)
    assert (tmp_path / "cublas" / "include" / "cublas_v2.h").is_file()


# --- the wheel ---


def test_libraries_of_an_earlier_build_are_removed(build: ModuleType, tmp_path: Path) -> None:
    """A CPU build after a CUDA build leaves no CUDA library in the package."""
    built, target = tmp_path / "built", tmp_path / "lib"
    built.mkdir()
    target.mkdir()
    (built / "libggufpy-ggml-cpu.so").write_bytes(b"new")
    (built / "other.txt").touch()
    (target / "libggufpy-ggml-cpu.so").write_bytes(b"old")
    (target / "libggufpy-ggml-cuda.so").write_bytes(b"old")
    build.install_libraries(built, target)
    assert {"libggufpy-ggml-cpu.so": b"new"} == {path.name: path.read_bytes() for path in target.iterdir()}


def metadata(folder: Path, **environment: str) -> tuple[str, str]:
    """Run the metadata hook as a frontend does; return METADATA and what setuptools was configured with."""
    code = (
        "import sys, os; sys.path.insert(0, ''); import build_ggml as b\n"
        "b.get_requires_for_build_wheel()\n"
        f"name = b.prepare_metadata_for_build_wheel({str(folder)!r})\n"
        "with b._setuptools_elsewhere(): config = open(os.environ['DIST_EXTRA_CONFIG']).read()\n"
        f"open({str(folder / 'config')!r}, 'w').write(config); open({str(folder / 'name')!r}, 'w').write(name)\n"
    )
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean | environment, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stderr
    text = (folder / (folder / "name").read_text() / "METADATA").read_text(encoding="utf-8")
    return text, (folder / "config").read_text()


def test_the_metadata_carries_both_licences(tmp_path: Path) -> None:
    """The wheel has our licence and ggml's, and a CPU build asks for no GPU library."""
    before = {path.name for path in ROOT.iterdir()}
    text, config = metadata(tmp_path)
    assert {"LICENSE", "vendor/ggml/LICENSE"} == set(re.findall(r"^License-File: (.*)$", text, re.M))
    assert "License-Expression: MIT" in text
    assert "cublas" not in text
    assert "build_number" not in config
    assert {path.name for path in ROOT.iterdir()} <= before | {"build"}


def test_the_metadata_of_a_cuda_build(tmp_path: Path) -> None:
    """A CUDA build requires the cuBLAS that it was completed with, and its wheel has another name."""
    text, config = metadata(tmp_path, CUDA="on", CUDACXX=str(toolkit(tmp_path / "cuda", cublas=False)))
    assert re.search(r"^Requires-Dist: nvidia-cublas<14,>=13$", text, re.M)
    assert "build_number = 1cuda" in config


# --- AMX ---


@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_tile_configuration_is_stored(tmp_path: Path, language: str) -> None:
    """With our header gcc keeps the stores to all 64 bytes that ldtilecfg reads."""
    gcc = shutil.which("gcc")
    source = tmp_path / "tile.c"
    source.write_text(
        "#include <immintrin.h>\nvoid load(void) {\n    unsigned char config[64] = {0};\n"
        "    config[0] = 1;\n    config[63] = 90;\n    _tile_loadconfig(config);\n}\n"
    )
    header = ROOT / "vendor" / "ggml" / "ldtilecfg.h"
    command = [gcc or "", "-x", language, "-O3", "-Wall", "-Werror", "-mamx-tile", "-include", str(header)]
    if gcc is None or subprocess.run([gcc, "-mamx-tile", "-E", "-x", "c", "/dev/null"], capture_output=True).returncode:
        pytest.skip("needs gcc for x86 with AMX")
    done = subprocess.run([*command, "-S", "-o", "-", str(source)], capture_output=True, text=True, check=False)
    assert "" == done.stderr
    assert "ldtilecfg" in done.stdout
    assert re.search(r"movb\s+\$90,", done.stdout)


# --- long runs ---


@pytest.fixture
def runs(tmp_path: Path) -> Callable[..., list[str]]:
    """Compile a main function with runs.h, run it, and return what it prints: `runs(statements, option, …)`."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("needs gcc")

    def run(statements: str, *options: str) -> list[str]:
        source, program = tmp_path / "runs.c", tmp_path / "runs"
        source.write_text(f"#include <stdio.h>\nint main(void) {{ {statements} return 0; }}\n")
        header = str(ROOT / "vendor" / "ggml" / "runs.h")
        command = [gcc, "-Wall", "-Werror", *options, "-include", header, str(source), "-o", str(program)]
        subprocess.run(command, check=True)
        return subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()

    return run


def test_chunks_in_long_runs_are_each_taken_once(runs: Callable[..., list[str]]) -> None:
    """Whatever the numbers, threads that take chunks in turn take each of them once, and mostly neighbours."""
    lines = runs(
        'for (int t = 1; t <= 9; t++) for (int n = 0; n <= 40; n++, puts("")) for (int i = 0; i < n; i++)'
        '    printf("%d ", (int) ggufpy_in_runs(i, n, 1, t));'
        'for (int i = 0; i < 6; i++) printf("%d ", (int) ggufpy_in_runs(i, 3, 2, 2));'
    )
    sizes = [(t, n) for t in range(1, 10) for n in range(41)]
    for (n_threads, n), line in zip(sizes, lines, strict=False):
        taken = [int(number) for number in line.split()]
        assert list(range(n)) == sorted(taken)
        for thread in range(n_threads):
            own = taken[thread::n_threads]
            assert list(range(own[0], own[0] + len(own))) == own if own else n <= thread
    assert ["0 1 2 3 4 5 "] == lines[len(sizes) :]


def test_rows_that_are_enough_are_cut_alone(runs: Callable[..., list[str]]) -> None:
    """Into four chunks for each thread and 16 columns; fewer rows, and what may be pairs, are cut as ggml does."""
    statements = (
        "const int rows[] = {112, 113, 577}, columns[] = {1, 2, 17, 32, 512};"
        'for (int r = 0; r < 3; r++, puts("")) for (int c = 0; c < 5; c++) {'
        "    const int size = c ? 16 : 64;"
        '    printf("%dx", (int) ggufpy_n_chunks_of_rows(rows[r], columns[c], size, 2));'
        '    printf("%d ", (int) ggufpy_n_chunks_of_columns(rows[r], columns[c], size, 2));'
        "}"
    )
    few = "2x1 7x1 7x2 7x2 7x32 "
    assert [few, "2x1 8x1 8x1 8x1 8x1 ", "8x1 8x1 16x1 16x1 37x1 "] == runs(statements)
    pairs = "-D__ARM_FEATURE_MATMUL_INT8"
    assert [few, "2x1 8x1 8x1 8x2 8x32 ", "8x1 37x1 16x1 37x2 37x32 "] == runs(statements, pairs)


def test_chunks_hold_all_rows(runs: Callable[..., list[str]]) -> None:
    """As ggml counts from a chunk's number to its rows, each row is in one of them, those at the end perhaps empty."""
    lines = runs(
        "const int64_t rows[] = {2, 513, 4097}, threads[] = {1, 3, 64};"
        "for (int r = 0; r < 3; r++) for (int t = 0; t < 3; t++) for (int c = 1; c <= 33; c += 16) {"
        "    const int64_t n = ggufpy_n_chunks_of_rows(rows[r], c, c > 1 ? 16 : 64, threads[t]);"
        "    const int64_t size = (rows[r] + n - 1) / n;"
        "    int64_t sum = 0;"
        "    for (int64_t i = 0; i < n; i++) {"
        "        const int64_t start = size * ggufpy_in_runs(i, n, 1, threads[t]), end = start + size;"
        "        for (int64_t row = start; row < end && row < rows[r]; row++) sum += row + 1;"
        "    }"
        '    puts(sum == rows[r] * (rows[r] + 1) / 2 ? "all" : "not all");'
        "}"
    )
    assert ["all"] * 27 == lines


@pytest.fixture(scope="module")
def configure() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run CMake's first half on ggml's source: `configure(folder, source, option, …)`."""
    cmake, ninja = shutil.which("cmake"), shutil.which("ninja")
    if not (cmake and ninja and (UNPACKED / "include").is_dir()):
        pytest.skip("needs cmake, ninja and the unpacked source")

    def run(folder: Path, source: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [cmake, "-G", "Ninja", "-S", str(ROOT / "vendor" / "ggml"), "-B", str(folder), *options]
        command.append(f"-DGGUFPY_GGML_SOURCE={source}")
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def test_every_variant_gets_the_edited_files(configure: Any, tmp_path: Path) -> None:
    """None is compiled from upstream's, in a folder with a space too."""
    folder = tmp_path / "a folder"
    assert not configure(folder, UNPACKED, "-DGGML_CPU_ALL_VARIANTS=ON").returncode
    for file in ("ggml-cpu.c", "repack.cpp"):
        compiled = re.findall(rf'"file": "(.*/ggml-cpu/{file})"', (folder / "compile_commands.json").read_text())
        assert {str(folder / "edited" / "ggml-cpu" / file)} == set(compiled)
        edited, upstream = (
            (place / "ggml-cpu" / file).read_text().splitlines() for place in (folder / "edited", UNPACKED / "src")
        )
        changed = [line for line, before in zip(edited, upstream, strict=True) if line != before]
        assert {"ggml-cpu.c": 8, "repack.cpp": 2}[file] == len(changed)
        assert all("ggufpy_in_runs" in line or "ggufpy_n_chunks_of" in line for line in changed)


def test_a_source_that_cannot_be_edited_ends_the_build(configure: Any, tmp_path: Path) -> None:
    """What to do is said; without long runs it is built as it is."""
    source = tmp_path / "ggml"
    shutil.copytree(UNPACKED, source, copy_function=os.symlink)
    file = source / "src" / "ggml-cpu" / "repack.cpp"
    text = file.read_text().replace("current_chunk % nchunk0", "(current_chunk) % nchunk0")
    file.unlink()
    file.write_text(text)
    refused = configure(tmp_path / "on", source)
    assert refused.returncode
    assert 'repack.cpp has no "current_chunk % nchunk0"' in " ".join(refused.stderr.split())
    assert not configure(tmp_path / "off", source, "-DGGUFPY_LONG_RUNS=OFF").returncode


# --- declarations ---


@pytest.mark.parametrize(
    ("topic", "right", "wrong"),
    [
        ("ops", "struct ggml_tensor * c, int n_dims", "struct ggml_context * c, int n_dims"),
        ("types", "int64_t ne[4];", "int32_t ne[4];"),
    ],
)
def test_the_compiler_checks_the_declarations(
    build: ModuleType, tmp_path: Path, topic: str, right: str, wrong: str
) -> None:
    """A declaration that is not ggml's own does not compile, with the options of the real build."""
    gcc, include = shutil.which("gcc"), build.UNPACKED / "ggml" / "include"
    python = Path(sysconfig.get_paths()["include"])
    if gcc is None or not include.is_dir() or not (python / "Python.h").is_file():
        pytest.skip("needs gcc, Python's headers and the unpacked ggml")
    shutil.copytree(ROOT / "ggufpy" / "_ffi", tmp_path / "ffi")
    header = tmp_path / "ffi" / "decl" / f"{topic}.h"
    text = header.read_text(encoding="utf-8")
    assert right in text
    header.write_text(text.replace(right, wrong), encoding="utf-8")
    ffi = runpy.run_path(str(tmp_path / "ffi" / "build.py"))["ffi_builder"]({})
    ffi.emit_c_code(str(tmp_path / "module.c"))
    command = [gcc, "-fsyntax-only", f"-I{include}", f"-I{python}", *build.STRICT, str(tmp_path / "module.c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 0 != done.returncode
    assert "incompatible" in done.stderr
