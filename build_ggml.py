"""Builds ggufpy: the PEP 517 backend. It wraps setuptools', and adds to it everything about ggml.

It owns where the ggml source comes from, how CMake is called, what the wheel's compiled part consists of, and how a
failure is told: each ends the build's output with one plain paragraph. What ggml is compiled with stands in
vendor/ggml/CMakeLists.txt, the pin in vendor/ggml/UPSTREAM.toml.

Environment: CUDA, GGUFPY_PORTABLE (on or off), CMAKE_ARGS, GGUFPY_GGML_SOURCE (a folder with ggml), CC, CXX; for CUDA
CUDACXX, CUDA_HOME, CMAKE_CUDA_ARCHITECTURES; and what CMake itself reads, such as CMAKE_CXX_COMPILER_LAUNCHER.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from setuptools import build_meta as _setuptools
from setuptools.command.build_ext import build_ext as _build_ext
from setuptools.command.egg_info import egg_info as _egg_info

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent
VENDOR = ROOT / "vendor" / "ggml"
UNPACKED = VENDOR / "src"
LIBRARIES = "libggufpy-ggml*.so"

# A declaration in ggufpy/_ffi/decl that differs from ggml's header is a mistake, not a warning.
STRICT = ["-Werror=incompatible-pointer-types", "-Werror=int-conversion"]

# The options of CMake that build_info() reports: those that decide what code ggml consists of.
REPORTED = re.compile(
    r"CMAKE_BUILD_TYPE|CMAKE_CUDA_ARCHITECTURES|GGUFPY_LONG_RUNS|GGML_(BACKEND_DL|LLAMAFILE|OPENMP|LTO|BLAS|RPC|VULKAN|CUDA"
    r"|CUDA_.*|CPU_(REPACK|ALL_VARIANTS|HBM|KLEIDIAI)|SSE42|AVX.*|BMI2|FMA|F16C|AMX_.*|SCHED_MAX_COPIES)"
)


def fail(*paragraph: str) -> NoReturn:
    """End the build; the last thing it prints is this paragraph."""
    sys.stdout.flush()
    raise SystemExit("\n" + textwrap.fill(" ".join(paragraph), 100, break_long_words=False, break_on_hyphens=False))


# --- what was asked for ---


def switch(name: str) -> bool:
    """Return whether the environment variable `name` is on."""
    value = os.environ.get(name, "").strip().lower()
    if value in {"on", "1", "true", "yes"}:
        return True
    if value in {"", "off", "0", "false", "no"}:
        return False
    fail(f"{name}={value} is not understood: use {name}=on or {name}=off.")


@dataclass(frozen=True, slots=True)
class Options:
    """What one build was asked for."""

    cuda: bool
    portable: bool
    cmake_args: tuple[str, ...]

    @classmethod
    def from_environment(cls) -> Options:
        """Read CUDA, GGUFPY_PORTABLE and CMAKE_ARGS."""
        args = tuple(shlex.split(os.environ.get("CMAKE_ARGS", "")))
        return cls(switch("CUDA"), switch("GGUFPY_PORTABLE"), args)


@cache
def upstream() -> Mapping[str, Any]:
    """Return the pin."""
    pin: dict[str, Any] = tomllib.loads((VENDOR / "UPSTREAM.toml").read_text(encoding="utf-8"))
    return pin


# --- the ggml source ---


def find_source() -> Path | None:
    """Return the ggml folder that needs no download, or None."""
    if given := os.environ.get("GGUFPY_GGML_SOURCE"):
        for inner in ("", "ggml", upstream()["archive"]["ggml"]):
            folder = Path(given).expanduser().resolve() / inner
            if (folder / "include" / "ggml.h").is_file():
                return folder
        fail(
            f"GGUFPY_GGML_SOURCE={given} holds no ggml: expected include/ggml.h in it, in its folder ggml, or in",
            f"{upstream()['archive']['ggml']}. Point it to the unpacked source, or unset it to use the pinned archive.",
        )
    return UNPACKED / "ggml" if unpacked_pin(UNPACKED) == upstream()["archive"]["sha256"] else None


def unpacked_pin(folder: Path) -> str | None:
    """Return the hash of the archive that `folder` was unpacked from, or None."""
    mark = folder / "ARCHIVE.sha256"
    return mark.read_text(encoding="ascii").strip() if mark.is_file() else None


def obtain_source(folder: Path) -> Path:
    """Return the ggml folder, downloading and unpacking the pinned archive into `folder` if there is none yet."""
    if source := find_source():
        return source
    if unpacked_pin(folder) != upstream()["archive"]["sha256"]:
        with tempfile.TemporaryDirectory(prefix="ggufpy-archive-") as temporary:
            unpack(download(Path(temporary)), folder)
    return folder / "ggml"


def download(folder: Path) -> Path:
    """Fetch the pinned archive through pip, so that the user's own index settings hold, and return its path."""
    archive = upstream()["archive"]
    pin = f"{archive['package']}=={archive['version']}"
    if missing := [name for name in ("pip", "scikit_build_core") if importlib.util.find_spec(name) is None]:
        fail(
            f"The ggml source has to be fetched, and {' and '.join(missing)} needed for that cannot be imported. Run",
            "`python -m pip install pip scikit-build-core`, or build with isolation, which does it by itself.",
        )
    print(f"fetching the ggml source ({pin}, about 77 MB)", flush=True)
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{pin} --hash=sha256:{archive['sha256']}\n", encoding="ascii")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--require-hashes"]
    command += ["--no-binary", archive["package"], "--dest", str(folder), "--requirement", str(requirement)]
    status, output = run(command)
    if mismatch := re.search(r"DO NOT MATCH THE HASHES.*Got\s+(\w+)", output, re.S):
        fail(wrong_hash(pin, mismatch[1]))
    found = sorted(folder.glob("*.tar.gz"))
    if status or not found:
        fail(
            f"The ggml source could not be fetched: `pip download {pin}` failed (its messages are above). Give the",
            "build a network or an index that has this source distribution, or build from a source distribution of",
            "ggufpy, which carries ggml, or unpack the archive yourself and set GGUFPY_GGML_SOURCE to that folder.",
        )
    return found[0]


def wrong_hash(what: str, found: str) -> str:
    """Say that an archive is not the pinned one."""
    return (
        f"The archive of {what} is not the pinned one and was not used: expected SHA-256 "
        f"{upstream()['archive']['sha256']}, found {found}. Download it again from an index you trust; a proxy or "
        "mirror may have changed it."
    )


def unpack(archive: Path, folder: Path) -> None:
    """Verify the archive and unpack ggml and its licence into `folder`, all or nothing."""
    pin = upstream()["archive"]
    with archive.open("rb") as file:
        found = hashlib.sha256(file.read()).hexdigest()
    if found != pin["sha256"]:
        fail(wrong_hash(archive.name, found))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unpack-") as temporary:
        fresh = Path(temporary) / "src"
        with tarfile.open(archive) as tar:
            for member in tar:
                inner = member.name.partition("/")[2]
                if member.isfile() and (inner == pin["licence"] or inner.startswith(pin["ggml"] + "/")):
                    relative = "LICENSE" if inner == pin["licence"] else "ggml/" + inner[len(pin["ggml"]) + 1 :]
                    write_member(tar, member, fresh, relative)
        (fresh / "ARCHIVE.sha256").write_text(found + "\n", encoding="ascii")
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)


def write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, relative: str) -> None:
    """Write one file of an archive below `folder`."""
    target = (folder / relative).resolve()
    content = tar.extractfile(member)
    assert content is not None
    assert target.is_relative_to(folder.resolve()), "the hash says which archive this is"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content.read())


# --- tools ---


def run(command: list[str]) -> tuple[int, str]:
    """Run a command, passing its output on as it comes; return its exit status and the output."""
    print("+", shlex.join(command), flush=True)
    # pip started us with variables that a pip of our own would take for its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("_PYPROJECT_", "PEP517_"))}
    lines = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def tool(name: str, folder: str) -> str:
    """Return the path of cmake or ninja: from its PyPI package, whose attribute `folder` says where, or from PATH."""
    try:
        module = importlib.import_module(name)
        found = shutil.which(name, path=getattr(module, folder))
    except (ImportError, AttributeError):
        found = None
    if found := found or shutil.which(name):
        return found
    fail(f"{name} was not found, and ggml is built with it. Install it with `python -m pip install cmake ninja`.")


def check_compilers(options: Options) -> None:
    """Stop early if there is no C or C++ compiler; CMake would say so in forty lines."""
    if any("COMPILER=" in arg or "TOOLCHAIN_FILE=" in arg for arg in options.cmake_args):
        return
    for variable, language, names in (("CC", "C", ("cc", "gcc", "clang")), ("CXX", "C++", ("c++", "g++", "clang++"))):
        named = shlex.split(os.environ.get(variable, ""))[:1]
        if not any(shutil.which(name) for name in named or names):
            fail(
                f"No {language} compiler was found ({variable}={named[0]} does not exist)."
                if named
                else f"No {language} compiler was found ({', '.join(names)} are not in PATH).",
                "ggufpy compiles ggml for this machine. Install one, for example with `apt install build-essential`",
                "(Debian, Ubuntu) or `dnf install gcc-c++` (Fedora), or name one with CC and CXX, and install again.",
            )


# --- CUDA ---


@dataclass(frozen=True, slots=True)
class Nvcc:
    """The CUDA compiler, and whether its toolkit has cuBLAS."""

    path: Path
    major: str
    has_cublas: bool


@cache
def find_nvcc() -> Nvcc:
    """Find nvcc, or end the build."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [*(f"{home}/bin/nvcc" for home in homes), "nvcc", "/usr/local/cuda/bin/nvcc"]
    if named := os.environ.get("CUDACXX"):
        candidates = [named]
    path = next(filter(None, map(shutil.which, candidates)), None)
    if path is None:
        fail(
            f"CUDA=on needs NVIDIA's CUDA compiler, and nvcc was not found ({', '.join(candidates)} do not exist).",
            "Install the CUDA toolkit (12 or newer; NVIDIA's installer, or your system's package cuda-toolkit or",
            "nvidia-cuda-toolkit), put its bin folder into PATH or set CUDACXX to nvcc, and install again. Without",
            "CUDA=on ggufpy is built for the CPU only.",
        )
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"release (\d+)\.", text)
    if version is None:
        fail(f"CUDA=on: `{path} --version` does not say which CUDA it is. Set CUDACXX to a working nvcc.")
    # nvcc may be a link; its toolkit lies where the link leads.
    folders = {Path(path).parent.parent, Path(path).resolve().parent.parent}
    libraries = ("lib64", "lib", "targets/*/lib", "lib/*-linux-gnu")
    has_cublas = any(list(folder.glob(f"{lib}/libcublas.so")) for folder in folders for lib in libraries)
    return Nvcc(Path(path), version[1], has_cublas)


def cublas_requirement(nvcc: Nvcc) -> str:
    """Return the requirement whose wheel has cuBLAS for this toolkit."""
    major = int(nvcc.major)
    return f"nvidia-cublas>={major},<{major + 1}" if major >= 13 else f"nvidia-cublas-cu{major}"


def cublas_folder(nvcc: Nvcc) -> Path:
    """Return the folder (include, lib) of the cuBLAS wheel in this environment."""
    for entry in sys.path:
        for inner in (f"cu{nvcc.major}", "cublas"):
            folder = Path(entry or ".") / "nvidia" / inner
            if (folder / "include" / "cublas_v2.h").is_file():
                return folder.resolve()
    fail(
        f"CUDA=on: this CUDA toolkit ({nvcc.path}) has no cuBLAS, and the wheel that completes it is not installed.",
        f"Run `python -m pip install '{cublas_requirement(nvcc)}'`, or build with isolation, which does it by itself.",
    )


# --- compiling ggml ---


@contextmanager
def build_folder() -> Iterator[Path]:
    """Give the folder that everything is built in: build/ here, kept for the next time, or a temporary one."""
    folder = ROOT / "build"
    try:
        folder.mkdir(exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if writable:
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="ggufpy-build-") as temporary:
            yield Path(temporary)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one build at a time in, where the system can."""
    with path.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_ggml(options: Options, folder: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Compile ggml below `folder`; return its source, the folder of its libraries, and the record of the build."""
    check_compilers(options)
    cmake, ninja = tool("cmake", "CMAKE_BIN_DIR"), tool("ninja", "BIN_DIR")
    with locked(folder / "source.lock"):
        source = obtain_source(UNPACKED if os.access(VENDOR, os.W_OK) else folder / "source")
    arguments = cmake_arguments(options, source, folder)
    key = configuration_key(options, arguments)
    binary = folder / f"ggml-{key}"
    configure = [cmake, "-S", str(VENDOR), "-B", str(binary), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    compile_ = [cmake, "--build", str(binary), "--target", "ggufpy-ggml", *jobs()]
    with locked(folder / f"ggml-{key}.lock"):
        configure_and_compile(configure + arguments, compile_)
    return source, binary / "lib", record(options, source, binary)


def configuration_key(options: Options, arguments: list[str]) -> str:
    """Return a name for everything that the objects depend on and neither CMake nor Ninja would see change.

    An option that is not given any more would live on in CMake's cache; another compiler under the same name, or
    another CPU (-march=native) on a shared disk, would leave the old objects in place.
    """
    compilers = [os.environ.get("CC") or "cc", os.environ.get("CXX") or "c++"]
    versions = [
        subprocess.run([*shlex.split(name), "--version"], capture_output=True, check=False).stdout
        for name in compilers
        if shutil.which(shlex.split(name)[0])
    ]
    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.findall(r"^(?:flags|Features|model name)\s*:.*$", cpuinfo.read_text(), re.M) if cpuinfo.is_file() else []
    parts = (arguments, compilers, versions, [] if options.portable else sorted(set(cpu)))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def configure_and_compile(configure: list[str], compile_: list[str]) -> None:
    """Run CMake twice, and say what to do where it fails."""
    if run(configure)[0]:
        fail(
            "CMake could not configure ggml; the reason stands in its messages above. A working C and C++ compiler is",
            "needed, for CUDA=on also a toolkit that works with that compiler. If CMAKE_ARGS is set, check it.",
        )
    if run(compile_)[0]:
        fail(
            "ggml did not compile; the compiler's message stands above, at the first line that says FAILED. If it was",
            "killed, memory ran out: set CMAKE_BUILD_PARALLEL_LEVEL=1 and install again, which goes on from here.",
        )


def jobs() -> list[str]:
    """Return cmake's option for parallel compiling: the user's own setting, or every CPU this process may use."""
    if os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL"):
        return []
    return ["--parallel", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())]


def cmake_arguments(options: Options, source: Path, folder: Path) -> list[str]:
    """Return the -D arguments, the user's last, so that they win."""
    arguments = [f"-DGGUFPY_GGML_SOURCE={source}"]
    if not os.environ.get("GGUFPY_GGML_SOURCE"):
        arguments.append(f"-DGGML_BUILD_COMMIT={upstream()['ggml']['commit'][:9]}")
    if options.portable:
        arguments.append("-DGGML_CPU_ALL_VARIANTS=ON")
    if options.cuda:
        nvcc = find_nvcc()
        arguments += ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc.path}"]
        if architectures := os.environ.get("CMAKE_CUDA_ARCHITECTURES") or os.environ.get("CUDAARCHS"):
            arguments.append(f"-DCMAKE_CUDA_ARCHITECTURES={architectures}")
        if not nvcc.has_cublas:
            arguments.append(f"-DGGUFPY_CUBLAS={stable_link(cublas_folder(nvcc), folder / 'cublas')}")
    return [*arguments, *options.cmake_args]


def stable_link(target: Path, link: Path) -> Path:
    """Point `link` to `target`: pip's environment has another path each time, and the objects must not depend on it."""
    link.unlink(missing_ok=True)
    link.symlink_to(target, target_is_directory=True)
    return link


def record(options: Options, source: Path, binary: Path) -> dict[str, Any]:
    """Return what the package must know about its own build."""
    text = (binary / "CMakeCache.txt").read_text(encoding="utf-8")
    cached = dict(re.findall(r"^([A-Za-z]\w*):[A-Z]+=(.*)$", text, re.M))
    header = (source / "CMakeLists.txt").read_text(encoding="utf-8")
    version = ".".join(re.findall(r"set\(GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)", header))
    macros = binary / "native-macros.txt"
    features = runpy.run_path(str(ROOT / "ggufpy" / "_ffi" / "cpu.py"))["features_in_macros"]
    pinned = not os.environ.get("GGUFPY_GGML_SOURCE")
    cuda = cached.get("GGML_CUDA") == "ON"
    reported = [name for name in cached if REPORTED.fullmatch(name) and (cuda or "CUDA_" not in name)]
    return {
        "ggml_version": version,
        "ggml_commit": upstream()["ggml"]["commit"] if pinned else "unknown (GGUFPY_GGML_SOURCE)",
        "options": {name: cached[name] for name in reported},
        "compiler": compiler(binary),
        "native": macros.is_file(),
        "portable": cached.get("GGML_CPU_ALL_VARIANTS") == "ON",
        "cuda": cuda,
        "cpu_features": list(features(macros.read_text(encoding="utf-8"))) if macros.is_file() else [],
    }


def compiler(binary: Path) -> str:
    """Return name and version of the C++ compiler that CMake found."""
    text = next(binary.glob("CMakeFiles/*/CMakeCXXCompiler.cmake")).read_text(encoding="utf-8")
    return " ".join(re.findall(r'set\(CMAKE_CXX_COMPILER_(?:ID|VERSION) "(.*?)"\)', text))


def install_libraries(built: Path, target: Path) -> None:
    """Make `target` hold the libraries in `built` and nothing of an earlier build."""
    target.mkdir(parents=True, exist_ok=True)
    libraries = {library.name: library for library in built.glob(LIBRARIES)}
    for name, library in libraries.items():
        fresh = target / f"{name}.new"
        shutil.copy2(library, fresh)
        fresh.replace(target / name)  # a running program keeps the file that it has mapped
    for stale in target.iterdir():
        if stale.name not in libraries:
            stale.unlink()


# --- setuptools ---


class BuildExt(_build_ext):  # type: ignore[misc]
    """Compiles ggml, then the cffi module against it, and puts both where setuptools wants them."""

    def run(self) -> None:
        """Build everything; called by setuptools for wheels and editable installs."""
        if importlib.util.find_spec("cffi") is None:
            fail("cffi was not found, and the compiled module is made with it. Run `python -m pip install cffi`.")
        with build_folder() as folder:
            source, self._libraries, built = compile_ggml(Options.from_environment(), folder)
            self._configure_extension(source, built)
            self._compile_extension()
            package = ROOT / "ggufpy" if self.inplace else Path(self.build_lib) / "ggufpy"
            install_libraries(self._libraries, package / "lib")

    def _configure_extension(self, source: Path, built: Mapping[str, Any]) -> None:
        ffi = runpy.run_path(str(ROOT / "ggufpy" / "_ffi" / "build.py"))["ffi_builder"](built)
        generated = Path(self.build_temp) / "_ggml.c"
        generated.parent.mkdir(parents=True, exist_ok=True)
        ffi.emit_c_code(str(generated))
        (extension,) = self.extensions
        extension.sources = [str(generated)]
        extension.include_dirs = [str(source / "include")]
        extension.library_dirs = [str(self._libraries)]
        extension.libraries = ["ggufpy-ggml", "ggufpy-ggml-base", "m"]
        # One module for every Python from 3.10 on; free-threaded Pythons have no such thing yet.
        extension.py_limited_api = not sysconfig.get_config_var("Py_GIL_DISABLED")
        # Every operation of the sampling's C is rounded as it says, on every machine: none is fused with the next.
        extension.extra_compile_args = [*STRICT, "-g0", "-ffp-contract=off"]
        extension.extra_link_args = ["-Wl,-rpath,$ORIGIN/../lib"]
        if sys.platform == "linux":
            extension.extra_link_args.append("-Wl,--disable-new-dtags")

    def _compile_extension(self) -> None:
        try:
            super().run()
        except Exception as error:
            print(error, file=sys.stderr)
            fail(
                "The cffi module did not compile; the compiler's message stands above. Python's headers and the C",
                "compiler that Python names are needed: on Debian and Ubuntu `apt install python3-dev",
                "build-essential`; CC names another compiler.",
            )


class EggInfo(_egg_info):  # type: ignore[misc]
    """Adds the library that a CUDA build was completed with to what the package requires."""

    def finalize_options(self) -> None:
        """Extend the requirements before setuptools writes them."""
        super().finalize_options()
        if switch("CUDA") and not find_nvcc().has_cublas:
            required = [*self.distribution.install_requires, cublas_requirement(find_nvcc())]
            self.distribution.install_requires = self.distribution.metadata.install_requires = required


@contextmanager
def _setuptools_elsewhere() -> Iterator[None]:
    """Let setuptools write into a fresh folder: nothing stale gets into a wheel, and the source may be read-only."""
    with build_folder() as folder, tempfile.TemporaryDirectory(dir=folder, prefix="setuptools-") as work:
        config = Path(work) / "setuptools.cfg"
        text = f"[build]\nbuild_base = {work}/build\n[egg_info]\negg_base = {work}\n"
        if Options.from_environment().cuda:
            text += "[bdist_wheel]\nbuild_number = 1cuda\n"  # never mistaken for the CPU's wheel
        config.write_text(text, encoding="utf-8")
        previous = os.environ.get("DIST_EXTRA_CONFIG")
        os.environ["DIST_EXTRA_CONFIG"] = str(config)
        try:
            yield
        finally:
            os.environ.pop("DIST_EXTRA_CONFIG")
            if previous is not None:
                os.environ["DIST_EXTRA_CONFIG"] = previous


# --- hooks ---


def _requirements() -> list[str]:
    """Return what this build needs beside pyproject.toml's list; ends the build if it cannot succeed anyway."""
    options = Options.from_environment()
    requirements = []
    if options.cuda and not (nvcc := find_nvcc()).has_cublas:
        requirements.append(cublas_requirement(nvcc))
    check_compilers(options)
    if find_source() is None:
        requirements += ["pip", "scikit-build-core"]  # the download, and the archive's metadata step
    return requirements


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return setuptools' requirements and ours."""
    needed = _requirements()
    with _setuptools_elsewhere():
        return [*_setuptools.get_requires_for_build_wheel(config_settings), *needed]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return setuptools' requirements and ours."""
    needed = _requirements()
    with _setuptools_elsewhere():
        return [*_setuptools.get_requires_for_build_editable(config_settings), *needed]


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    """Return setuptools' requirements, and what unpacking ggml needs."""
    needed = [] if unpacked_pin(UNPACKED) == upstream()["archive"]["sha256"] else ["pip", "scikit-build-core"]
    with _setuptools_elsewhere():
        return [*_setuptools.get_requires_for_build_sdist(config_settings), *needed]


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """Write the wheel's metadata."""
    with _setuptools_elsewhere():
        return str(_setuptools.prepare_metadata_for_build_wheel(metadata_directory, config_settings))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Any = None) -> str:
    """Write the editable wheel's metadata."""
    with _setuptools_elsewhere():
        return str(_setuptools.prepare_metadata_for_build_editable(metadata_directory, config_settings))


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Compile ggml and build the wheel."""
    with _setuptools_elsewhere():
        return str(_setuptools.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Compile ggml into the source tree and build the wheel that points to it."""
    with _setuptools_elsewhere():
        return str(_setuptools.build_editable(wheel_directory, config_settings, metadata_directory))


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Build the source distribution; the unpacked ggml goes in, so installing it downloads nothing more."""
    if unpacked_pin(UNPACKED) != upstream()["archive"]["sha256"]:
        with tempfile.TemporaryDirectory(prefix="ggufpy-archive-") as temporary:
            unpack(download(Path(temporary)), UNPACKED)
    with _setuptools_elsewhere():
        return str(_setuptools.build_sdist(sdist_directory, config_settings))
