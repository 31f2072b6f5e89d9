"""Reading GGUF files: what is accepted, what is refused and why, and how long the mapping lives."""

from __future__ import annotations

import gc
import os
import random
import struct
import subprocess
import sys
import time
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest
from helpers.gguf_files import CRAFTED, MAX_U64, REFUSED, gguf, pair, string, tensor

from ggufpy.errors import ClosedError, GGUFError
from ggufpy.gguf import GGMLType, GGUFArray, GGUFFile

# Sizes from the table of public reports: they show that the crafted files are the ones meant.
SIZES = {
    "empty_file": 0, "magic_only": 4, "html": 15, "hdr_cut": 20, "valid_min": 24, "v0": 24, "v1": 24, "v4": 24,
    "v2": 24, "be3": 24, "nkv_-1": 24, "nkv_2p40": 24, "nt_2p60": 24, "key_len_max": 33, "arr_huge_u8": 49,
    "arr_huge_str": 49, "align0": 57, "align_33": 57, "align_i32": 57, "align_str": 63, "align64_ok": 256,
    "align64_nopad_tail": 208, "align1_ok": 131, "t_ok": 128, "t_mul_ovf": 160, "t_ovf_42": 160, "t_big_pad_wrap": 128,
    "t_type_999": 128, "t_type_neg": 128, "t_type_4_removed": 128, "t_type31": 128, "t_q4_33": 128, "t_off_1": 128,
    "t_off_32": 128, "t_off_max": 128, "t_short": 80, "t_nodata": 57, "trail_junk": 528,
}  # fmt: skip

# Every value type of the format: key suffix, code, bytes, Python value.
SCALARS = [
    ("u8", 0, b"\xff", 255),
    ("i8", 1, b"\xff", -1),
    ("u16", 2, b"\xff\xff", 65535),
    ("i16", 3, b"\xff\xff", -1),
    ("u32", 4, b"\xff" * 4, 2**32 - 1),
    ("i32", 5, b"\xff" * 4, -1),
    ("f32", 6, struct.pack("<f", 0.1), struct.unpack("<f", struct.pack("<f", 0.1))[0]),
    ("bool", 7, b"\1", True),
    ("str", 8, string("hé\0"), "hé\0"),
    ("u64", 10, b"\xff" * 8, MAX_U64),
    ("i64", 11, b"\xff" * 8, -1),
    ("f64", 12, struct.pack("<d", 0.1), 0.1),
]


def array(code: int, n: int, items: bytes) -> bytes:
    return struct.pack("<iQ", code, n) + items


@pytest.fixture
def save(tmp_path: Path):
    """A function that saves bytes under a name and gives the path."""

    def write(raw: bytes, name: str = "x.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(raw)
        return path

    return write


def test_crafted_files_are_those_reported():
    """The crafted files have the sizes, and one the bytes, of those in the reports."""
    assert {name: len(CRAFTED[name]) for name in SIZES} == SIZES
    assert set(CRAFTED) - set(SIZES) == {"t_overlap", "t_reorder"}
    assert CRAFTED["be3"].hex() == "4747554600000003" + 16 * "00"


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_bad_file_quickly_and_says_why(name, save):
    """One error type with path and reason, within 100 ms and 50 MB whatever the file claims."""
    path = save(CRAFTED[name])
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(GGUFError) as caught:
        GGUFFile(path)
    elapsed, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert REFUSED[name] in caught.value.reason
    assert caught.value.path == path
    assert str(caught.value) == f"{path}: {caught.value.reason}"
    assert elapsed < 0.1
    assert peak < 50e6


@pytest.mark.parametrize("name", sorted(set(CRAFTED) - set(REFUSED)))
def test_opens_sound_file(name, save):
    """Also an absent final padding, trailing bytes, and tensors of an unknown type do not keep a file from opening."""
    with GGUFFile(save(CRAFTED[name])) as file:
        assert file.version == (2 if name == "v2" else 3)
        assert set(file.tensors) in (set(), {"x"}, {"x", "y"})


@pytest.mark.parametrize(
    ("name", "alignment", "x", "y"),
    [
        ("align64_ok", 64, [1, 2, 3, 4], [5, 6, 7, 8]),
        ("align64_nopad_tail", 64, [1, 2, 3, 4], [5, 6, 7, 8]),
        ("align1_ok", 1, [1], [2]),
    ],
)
def test_alignment_places_tensors(name, alignment, x, y, save):
    """Data starts, and each tensor follows the last, at multiples of general.alignment, odd addresses included."""
    with GGUFFile(save(CRAFTED[name])) as file:
        assert file.alignment == alignment
        assert file.data("x").tobytes() == np.array(x, "<f4").tobytes()
        assert file.data("y").tobytes() == np.array(y, "<f4").tobytes()
        if alignment == 1:
            assert file.tensors["x"].offset == 123


@pytest.mark.parametrize(
    ("name", "code"), [("t_type_999", 999), ("t_type_neg", -1), ("t_type_4_removed", 4), ("t_type31", 31)]
)
def test_unknown_tensor_type_keeps_metadata_readable(name, code, save):
    """The raw number is shown; only asking for the data raises."""
    with GGUFFile(save(CRAFTED[name])) as file:
        info = file.tensors["x"]
        assert (info.shape, info.type, info.nbytes) == ((4,), code, 0)
        assert not isinstance(info.type, GGMLType)
        with pytest.raises(GGUFError, match=f"x: type {code} is not supported"):
            file.data("x")


def test_tensors_after_an_unknown_type(save):
    """A tensor that follows one of unknown size may start at any aligned place from there on, no other."""
    for offset, fits in ((0, True), (96, True), (33, False)):
        path = save(gguf(tensors=[tensor("x", [4], 999), tensor("y", [4], offset=offset)], data=bytes(128)))
        if fits:
            assert GGUFFile(path).tensors["y"].offset == 96 + offset
        else:
            with pytest.raises(GGUFError, match="y: expected at data offset 0, found at 33"):
                GGUFFile(path)


def test_reads_every_value_type(save):
    """Each value type comes back as the Python value that was written."""
    pairs = [pair(f"k.{name}", code, raw) for name, code, raw, _ in SCALARS]
    pairs += [pair(f"a.{name}", 9, array(code, 2, raw * 2)) for name, code, raw, _ in SCALARS]
    pairs += [pair(f"e.{name}", 9, array(code, 0, b"")) for name, code, _, _ in SCALARS]
    with GGUFFile(save(gguf(pairs))) as file:
        for name, _, _, value in SCALARS:
            assert (file.metadata[f"k.{name}"], file.metadata_types[f"k.{name}"]) == (value, name)
            assert type(file.metadata[f"k.{name}"]) is type(value)
            items = file.metadata[f"a.{name}"]
            assert (items, file.metadata_types[f"a.{name}"], items.type) == ([value, value], f"arr[{name}]", name)
            assert len(file.metadata[f"e.{name}"]) == 0
            assert file.metadata[f"e.{name}"].tolist() == []
        assert list(file.metadata)[:2] == ["k.u8", "k.i8"]
        with pytest.raises(TypeError):
            file.metadata["new"] = 1


def test_number_array_is_a_sequence_and_a_buffer(save):
    """Numbers are read in place and go to NumPy without a copy."""
    file = GGUFFile(save(gguf([pair("a", 9, array(3, 4, struct.pack("<4h", 1, -2, 3, -4)))])))
    items = file.metadata["a"]
    assert isinstance(items, GGUFArray)
    assert (items[0], items[-1], items[1:3], list(items), items.index(3)) == (1, -4, [-2, 3], [1, -2, 3, -4], 2)
    assert np.asarray(items.view).dtype == np.int16
    assert not np.asarray(items.view).flags.writeable
    for wrong in (4, -5):
        with pytest.raises(IndexError):
            items[wrong]
    with pytest.raises(GGUFError, match="expected an array of str, found one of i16"):
        items.rawlist()
    with pytest.raises(GGUFError, match="expected an array of str, found one of i16"):
        items.raw(0)


def test_string_array_keeps_bytes_exact(save):
    """Tokens need not be UTF-8: `raw` and `rawlist` give bytes, text has them as surrogate escapes."""
    tokens = [b"a", b"", "é🦙".encode(), b"\xe6\xad", b"\xff\0"]
    raw = b"".join(string(token) for token in tokens)
    items = GGUFFile(save(gguf([pair("a", 9, array(8, 5, raw)), pair("s", 8, string(b"\xff"))]))).metadata["a"]
    assert items.rawlist() == tokens
    assert [items.raw(i) for i in range(5)] == tokens
    assert items.raw(-1) == tokens[-1]
    texts = [token.decode("utf-8", "surrogateescape") for token in tokens]
    assert (items.tolist(), [items[i] for i in range(5)], items[3:]) == (texts, texts, texts[3:])
    assert [text.encode("utf-8", "surrogateescape") for text in items] == tokens
    with pytest.raises(IndexError):
        items.raw(5)
    with pytest.raises(GGUFError, match="expected an array of numbers, found one of str"):
        items.view  # noqa: B018


def test_nested_arrays_to_a_bounded_depth(save):
    """Four levels are read; a fifth is refused before anything recurses further."""
    value = array(0, 2, b"\1\2")
    for _ in range(3):
        value = array(9, 1, value)
    file = GGUFFile(save(gguf([pair("a", 9, value)])))
    assert file.metadata["a"][0][0][0] == [1, 2]
    assert file.metadata["a"] == [[[[1, 2]]]]
    with pytest.raises(GGUFError, match="a: arrays are nested deeper than 4"):
        GGUFFile(save(gguf([pair("a", 9, array(9, 1, value))])))
    with pytest.raises(GGUFError, match="nested deeper"):
        GGUFFile(save(gguf([pair("a", 9, array(9, 1, b"") * 100_000)])))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (gguf([pair("a", 0, b"\1"), pair("a", 0, b"\2")]), "a: the key occurs twice"),
        (gguf([pair("", 4, bytes(4))]), "key 0 is empty"),
        (gguf([struct.pack("<Q", MAX_U64) + bytes(9)]), f"key 0: needs {MAX_U64} bytes at offset 32, the file has 9"),
        (gguf([pair(b"\xff", 0, b"\1")]), r"key 0: b'\xff' is not UTF-8"),
        (gguf([pair("a", 13, b"\1")]), "a: unknown value type 13, expected 0 to 12"),
        (gguf([pair("a", -1, b"\1")]), "a: unknown value type -1"),
        (gguf([pair("a", 9, array(13, 1, b"\1"))]), "a: unknown value type 13"),
        (gguf([pair("a", 7, b"\2")]), "a: a bool is 2, expected 0 or 1"),
        (gguf([pair("a", 9, array(7, 3, b"\0\1\3"))]), "a: a bool is 3, expected 0 or 1"),
        (gguf([pair("a", 10, b"\1" * 4)]), "a: needs 8 bytes at offset 37, the file has 4 left"),
        (gguf([pair("a", 8, struct.pack("<Q", 5) + b"abcd")]), "a: needs 5 bytes at offset 45, the file has 4 left"),
        (gguf([pair("a", 9, array(8, 2, string("x") + struct.pack("<Q", 9)))]), "the file ends before string 1 of 2"),
        (gguf([pair("a", 9, array(8, 2, string("12345678") + b"1234567"))]), "a: the file ends before string 1 of 2"),
        (gguf([pair("a", 9, array(8, 2, struct.pack("<Q", MAX_U64) * 2))]), "a: the file ends before string 1 of 2"),
        (gguf([pair("a", 9, array(9, 3, b"\0" * 35))]), "a: 3 cannot fit in the 35 bytes left"),
        (gguf(tensors=[tensor("x", [0]), tensor("x", [0])]), "x: the tensor occurs twice"),
        (gguf(tensors=[tensor("n" * 64, [0])]), "tensor 0: expected a name of at most 63 bytes without NUL"),
        (gguf(tensors=[tensor("é" * 32, [0])]), "tensor 0: expected a name of at most 63 bytes without NUL"),
        (gguf(tensors=[tensor("a\0b", [0])]), "tensor 0: expected a name of at most 63 bytes without NUL"),
        (gguf(tensors=[tensor(b"\xc3", [0])]), "name of tensor 0: b'\\xc3' is not UTF-8"),
        (gguf(tensors=[tensor("x", [1] * 5)], data=bytes(32)), "x: expected at most 4 dimensions, found 5"),
        (gguf(tensors=[tensor("x", [2**63])]), "x: shape [9223372036854775808] has more elements"),
        (gguf(tensors=[tensor("x", [0, 2**62, 4])]), "x: shape [4, 4611686018427387904, 0] has more elements"),
        (gguf(tensors=[tensor("x", [4], 999, offset=1)], data=bytes(16)), "x: expected at data offset 0, found at 1"),
    ],
)
def test_refuses_bad_content(raw, reason, save):
    """The message names the key or tensor, what was expected and what is there."""
    with pytest.raises(GGUFError) as caught:
        GGUFFile(save(raw))
    assert reason in caught.value.reason


def test_accepts_what_ggml_accepts_at_the_limits(save):
    """A 63-byte name, four dimensions, no dimension, and no elements."""
    entries = [tensor("n" * 63, [1, 2, 1, 1]), tensor("s", [], offset=32), tensor("e", [0, 3], offset=64)]
    file = GGUFFile(save(gguf(tensors=entries, data=bytes(36))))
    assert [t.shape for t in file.tensors.values()] == [(1, 1, 2, 1), (), (3, 0)]
    assert [len(file.data(name)) for name in file.tensors] == [8, 4, 0]


def test_every_prefix_and_damage_gives_gguf_error_or_opens(save):
    """No other exception, whatever is cut or changed; what opens can be read in full."""
    pairs = [pair(f"k.{name}", code, raw) for name, code, raw, _ in SCALARS]
    pairs += [pair(f"a.{name}", 9, array(code, 2, raw * 2)) for name, code, raw, _ in SCALARS]
    pairs += [pair("n", 9, array(9, 1, array(8, 1, string("in"))))]
    whole = gguf(pairs, [tensor("x", [4, 2]), tensor("q", [32, 2], 2, offset=32)], bytes(96))
    path = save(whole)

    def opens(raw: bytes) -> bool:
        path.write_bytes(raw)
        try:
            file = GGUFFile(path)
        except GGUFError:
            return False
        for value in file.metadata.values():
            assert not isinstance(value, GGUFArray) or len(value.tolist()) == len(value)
        for info in file.tensors.values():
            assert not isinstance(info.type, GGMLType) or len(file.data(info.name)) == info.nbytes
        return True

    data_end = len(whole) - 96 + 32 + 36
    for n in range(0, len(whole), 3):
        assert opens(whole[:n]) == (n >= data_end)
    rng = random.Random(0)
    outcomes = []
    for _ in range(500):
        raw = bytearray(whole)
        for _ in range(rng.choice((1, 1, 8))):
            raw[rng.randrange(len(raw))] = rng.choice((0, 1, 7, 9, 127, 128, 255))
        outcomes.append(opens(bytes(raw)))
    assert {True, False} == set(outcomes)


def test_os_errors_stay_os_errors(tmp_path):
    """What the system refuses is an OSError, not a fault of the file."""
    with pytest.raises(FileNotFoundError):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(IsADirectoryError):
        GGUFFile(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
def test_unreadable_file_is_a_permission_error(save, tmp_path):
    """In a subprocess that gives up being root, who may read every file."""
    save(CRAFTED["t_ok"]).chmod(0)
    tmp_path.chmod(0o755)
    code = (
        "import os, sys; from ggufpy.gguf import GGUFFile; os.chdir(sys.argv[1]); os.geteuid() or os.setuid(65534)\n"
        "try: GGUFFile('x.gguf')\nexcept PermissionError as e: print(e)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    assert "Permission denied: 'x.gguf'" in output


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_fifo_is_refused_without_waiting(tmp_path):
    """Opening a FIFO that nobody writes to must not hang; a subprocess so that a failure ends."""
    os.mkfifo(tmp_path / "f.gguf")
    code = "import sys; from ggufpy.gguf import GGUFFile\ntry: GGUFFile(sys.argv[1])\nexcept ValueError as e: print(e)"
    command = [sys.executable, "-c", code, str(tmp_path / "f.gguf")]
    output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    assert "not a regular file" in output


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have(name):
    """NUL and lone surrogates are found out by Python, which has other errors for that."""
    with pytest.raises(GGUFError, match="no file can have this name"):
        GGUFFile(name)


def test_metadata_needs_neither_numpy_nor_the_compiled_library(save):
    """Opening a file and reading its metadata imports neither."""
    code = (
        "import sys; from ggufpy.gguf import GGUFFile; f = GGUFFile(sys.argv[1]); f.metadata; f.tensors['x']; "
        "print([m for m in sys.modules if m.split('.')[0] in ('numpy', 'cffi') or m.startswith('ggufpy._ffi')])"
    )
    command = [sys.executable, "-c", code, str(save(CRAFTED["t_ok"]))]
    assert subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip() == "[]"


def test_view_outlives_the_file(save):
    """A view keeps the mapping; it goes with the last view, with no help from the garbage collector."""
    gc.disable()
    try:
        file = GGUFFile(save(CRAFTED["align64_ok"]))
        mapping = weakref.ref(file.shards[0].mapping)
        view = file.data("y")
        assert not view.flags.writeable
        file.close()
        del file
        assert mapping() is not None
        assert view.view("<f4").tolist() == [5, 6, 7, 8]
        del view
        assert mapping() is None
    finally:
        gc.enable()


def test_replacing_the_file_leaves_the_mapping_alone(save):
    """A file that is renamed over an open one does not change what was mapped."""
    file = GGUFFile(save(CRAFTED["align64_ok"]))
    other = save(CRAFTED["t_ok"], "other.gguf")
    other.replace(file.path)
    assert file.data("y").view("<f4").tolist() == [5, 6, 7, 8]


def test_close_twice_and_use_after_close(save):
    """Closing again does nothing; data is refused by name; metadata and the tensor table are still there."""
    with GGUFFile(save(gguf([pair("a", 9, array(8, 1, string("t")))], [tensor("x", [4])], bytes(32)))) as file:
        file.close()
    file.close()
    for use in (lambda: file.data("x"), lambda: file.dequantize("x"), lambda: file.shards, file.__enter__):
        with pytest.raises(ClosedError, match=r"x\.gguf is closed"):
            use()
    assert file.metadata["a"].tolist() == ["t"]
    assert file.tensors["x"].nbytes == 16


def test_unknown_tensor_name(save):
    """A name that no tensor has is named in the error."""
    file = GGUFFile(save(CRAFTED["t_ok"]))
    for ask in (file.data, file.dequantize):
        with pytest.raises(GGUFError, match="no tensor is named 'nope'"):
            ask("nope")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_file_descriptor_or_mapping_is_left(save):
    """Opening good and bad files again and again leaves nothing behind, closed or just dropped."""
    good, bad = save(CRAFTED["t_ok"], "good.gguf"), save(CRAFTED["t_short"], "bad.gguf")

    def left() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), Path("/proc/self/maps").read_text().count(str(good.parent))

    before = left()
    for i in range(20):
        file = GGUFFile(good)
        if i % 2:
            file.close()
        del file
        with pytest.raises(GGUFError):
            GGUFFile(bad)
    assert left() == before


def split(no: int, count: int, n_tensors: int, entries: list[bytes], data: bytes, code: int = 2) -> bytes:
    pairs = [pair("split.no", 2, struct.pack("<H", no)), pair("split.count", code, struct.pack("<H", count))]
    pairs += [pair("split.tensors.count", 5, struct.pack("<i", n_tensors))]
    return gguf([*([pair("only.first", 0, b"\7")] if no == 0 else []), *pairs], entries, data)


def part_name(i: int, n: int = 2) -> str:
    return f"m-{i:05}-of-{n:05}.gguf"


FIRST = split(0, 2, 2, [tensor("x", [4])], struct.pack("<4f", 1, 2, 3, 4))
SECOND = split(1, 2, 2, [tensor("y", [2])], struct.pack("<2f", 5, 6))


@pytest.mark.parametrize("opened", [1, 2])
def test_split_file_opens_from_any_part(opened, save):
    """Whichever part is given, all tensors of all parts are there."""
    paths = [save(FIRST, part_name(1)), save(SECOND, part_name(2))]
    with GGUFFile(paths[opened - 1]) as file:
        assert file.metadata["only.first"] == 7
        assert [(t.name, t.shard) for t in file.tensors.values()] == [("x", 0), ("y", 1)]
        assert [shard.path.name for shard in file.shards] == [part_name(1), part_name(2)]
        assert file.data("x").view("<f4").tolist() == [1, 2, 3, 4]
        assert file.data("y").view("<f4").tolist() == [5, 6]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (split(0, 2, 2, [tensor("y", [2])], bytes(8)), "split.no: expected 1, found 0"),
        (split(1, 3, 2, [tensor("y", [2])], bytes(8)), "split.count: expected 2, found 3"),
        (split(1, 2, 2, [tensor("x", [2])], bytes(8)), "x: the tensor occurs twice"),
        (split(1, 2, 2, [], b""), "split.tensors.count: expected 2, the parts hold 1"),
        (gguf(tensors=[tensor("y", [2])], data=bytes(8)), "split.no: expected an integer, found None"),
        (SECOND[:-1], "y: needs 8 bytes"),
    ],
)
def test_split_parts_must_agree(second, reason, save):
    """Parts whose numbers or counts contradict each other are refused."""
    first = save(FIRST, part_name(1))
    save(second, part_name(2))
    with pytest.raises(GGUFError) as caught:
        GGUFFile(first)
    assert reason in str(caught.value)


def test_split_part_missing_or_misnamed(save):
    """A part that is not there is a FileNotFoundError with its path; a renamed one is told the name it should have."""
    path = save(FIRST, part_name(1))
    with pytest.raises(FileNotFoundError) as caught:
        GGUFFile(path)
    assert part_name(2) in str(caught.value)
    for name in ("m.gguf", part_name(1, 3)):
        with pytest.raises(GGUFError, match=r"expected a name that ends in -0000N-of-00002\.gguf"):
            GGUFFile(save(FIRST, name))
    odd = gguf([pair("split.count", 8, string("2"))])
    with pytest.raises(GGUFError, match=r"split\.count: expected an integer, found '2'"):
        GGUFFile(save(odd))


def test_split_name_without_split_keys_is_one_file(save):
    """A name like a part's means nothing without the keys."""
    assert GGUFFile(save(CRAFTED["t_ok"], part_name(1))).data("x").tobytes() == bytes(16)


def test_type_table():
    """Removed codes are absent, types are found by code and by name, sizes follow from blocks."""
    assert not {4, 5, 31, 32, 33, 36, 37, 38, 43} & {int(t) for t in GGMLType}
    assert len(GGMLType) == 43 - 8
    assert GGMLType(12) is GGMLType("q4_K") is GGMLType("Q4_K") is GGMLType.Q4_K
    assert [GGMLType.F32.label, GGMLType.IQ2_XXS.label, GGMLType.Q8_K.label] == ["f32", "iq2_xxs", "q8_K"]
    assert (GGMLType.Q4_K.row_nbytes(512), GGMLType.Q4_0.nbytes((3, 64)), GGMLType.F16.nbytes(())) == (288, 108, 2)
    assert [t.name for t in GGMLType if not t.is_quantized] == ["F32", "F16", "I8", "I16", "I32", "I64", "F64", "BF16"]
    for n in (33, -32):
        with pytest.raises(GGUFError, match=f"a row of {n} elements does not fill whole blocks of 32"):
            GGMLType.Q4_0.row_nbytes(n)
    with pytest.raises(ValueError, match="q9"):
        GGMLType("q9")


def test_type_table_agrees_with_gguf_package():
    """Names, codes, block sizes and bytes are those of the gguf package."""
    constants = pytest.importorskip("gguf").constants
    ours = {t.name: (int(t), t.block_size, t.type_size) for t in GGMLType}
    theirs = {t.name: (int(t), *constants.GGML_QUANT_SIZES[t]) for t in constants.GGMLQuantizationType}
    assert len(theirs) > 30
    theirs["Q8_1"] = (9, 32, 36)  # the package says 40; the static_assert of ggml-common.h says two halves and 32 bytes
    assert {name: ours.get(name) for name in theirs} == theirs


def test_reads_a_real_model(smollm2_path):
    """SmolLM2's metadata, tensors and sizes come out as they are in the file."""
    with GGUFFile(smollm2_path) as file:
        assert (file.version, file.alignment, len(file.tensors)) == (3, 32, 272)
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        assert len(file.metadata["tokenizer.ggml.token_type"].view) == 49152
        info = file.tensors["blk.3.attn_k.weight"]
        assert (info.shape, info.type, info.nbytes) == ((192, 576), GGMLType.Q4_1, 192 * 576 // 32 * 20)
        assert sum(t.nbytes for t in file.tensors.values()) < file.shards[0].size


def cut_copy(source: Path, target: Path, size: int) -> Path:
    """Make a file like the first `size` bytes of `source`, without the tensor data (a hole): opening reads none."""
    with source.open("rb") as file:
        target.write_bytes(file.read(4_000_000))
    os.truncate(target, size)
    return target


@pytest.mark.parametrize("size", [50_000_000, -1])
def test_truncated_download_names_the_first_bad_tensor(size, smollm2_path, tmp_path):
    """A file cut short says which tensor is the first not whole."""
    with GGUFFile(smollm2_path) as file:
        size = size if size > 0 else file.shards[0].size - 1
        bad = next(t for t in file.tensors.values() if t.offset + t.nbytes > size)
    with pytest.raises(GGUFError) as caught:
        GGUFFile(cut_copy(Path(smollm2_path), tmp_path / "cut.gguf", size))
    have = size - bad.offset
    expected = f"{bad.name}: needs {bad.nbytes} bytes at offset {bad.offset}, the file has {have} there ({size} in all)"
    assert expected in str(caught.value)


def test_opening_is_lazy_and_quick(gemma3_path):
    """A vocabulary of 262,144 tokens costs a walk over its lengths: no strings, no offsets, no copy."""
    times = []
    for _ in range(5):
        began = time.process_time()
        file = GGUFFile(gemma3_path)
        times.append(time.process_time() - began)
    assert min(times) < 0.1, "measured: 17 ms"
    tracemalloc.start()
    file = GGUFFile(gemma3_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 262_144


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps")
def test_opening_reads_no_tensor_data(smollm2_path):
    """Of a 100 MB mapping only the header's pages are touched, and what the kernel maps around them."""
    file = GGUFFile(smollm2_path)
    blocks = Path("/proc/self/smaps").read_text().split("VmFlags")
    resident = [line for block in blocks if str(smollm2_path) in block for line in block.splitlines() if "Rss:" in line]
    assert resident
    assert sum(int(line.split()[1]) * 1024 for line in resident) < file.shards[0].data_offset + 20e6


def test_dequantize_gives_float32_of_the_shape(save):
    """Through ggml: a new array that the caller owns, in NumPy order."""
    f16 = np.array([[1, -2, 0.5], [4, 5, 6]], "<f2")
    q8_0 = np.float16(0.5).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    entries = [tensor("h", [3, 2], 1), tensor("q", [32, 1, 1], 8, offset=32)]
    with GGUFFile(save(gguf(tensors=entries, data=f16.tobytes().ljust(32, b"\0") + q8_0))) as file:
        h, q = file.dequantize("h"), file.dequantize("q")
    assert (h.dtype, h.shape, h.tolist()) == (np.float32, (2, 3), f16.tolist())
    assert (q.shape, q.ravel().tolist()) == ((1, 1, 32), [n / 2 for n in range(-16, 16)])
    assert h.flags.writeable
    assert h.flags.owndata
