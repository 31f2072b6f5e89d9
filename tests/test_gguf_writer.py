"""Writing GGUF files: reading back the same, here and by the `gguf` package, and refusing what does not fit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from helpers.gguf_files import CRAFTED

from ggufpy.errors import GGUFError
from ggufpy.gguf import GGMLType, GGUFFile, GGUFWriter, write_gguf

METADATA = {
    "general.architecture": ("tést", "str"),
    "u8": (255, "u8"),
    "i8": (-128, "i8"),
    "u16": (65535, "u16"),
    "i16": (-32768, "i16"),
    "u32": (2**32 - 1, "u32"),
    "i32": (-(2**31), "i32"),
    "u64": (2**64 - 1, "u64"),
    "i64": (-(2**63), "i64"),
    "f32": (0.5, "f32"),
    "f64": (0.1, "f64"),
    "bool": (True, "bool"),
    "arr.u8": ([0, 255], "arr[u8]"),
    "arr.i16": ([-1, 1], "arr[i16]"),
    "arr.u64": ([2**63], "arr[u64]"),
    "arr.f32": ([0.5, -math.inf], "arr[f32]"),
    "arr.f64": ([0.1], "arr[f64]"),
    "arr.bool": ([True, False], "arr[bool]"),
    "arr.str": (["", "a", "é🦙"], "arr[str]"),
    "arr.empty": ([], "arr[str]"),
}


def random_bytes(type: GGMLType, shape: tuple[int, ...]) -> bytes:
    return np.random.default_rng(int(type)).integers(0, 256, type.nbytes(shape), np.uint8).tobytes()


def all_types(shape_of=lambda t: (2, 3, 2 * t.block_size)) -> dict[str, tuple[bytes, GGMLType, tuple[int, ...]]]:
    return {t.label: (random_bytes(t, shape_of(t)), t, shape_of(t)) for t in GGMLType}


def test_every_value_type_reads_back(tmp_path):
    """A value of each type comes back as it was, under its type."""
    values = {key: value for key, (value, _) in METADATA.items()}
    types = {key: type for key, (_, type) in METADATA.items()}
    assert write_gguf(tmp_path / "x.gguf", values, metadata_types=types) == (tmp_path / "x.gguf",)
    with GGUFFile(tmp_path / "x.gguf") as file:
        assert dict(file.metadata) == values
        assert dict(file.metadata_types) == types
        write_gguf(tmp_path / "copy.gguf", file.metadata, metadata_types=file.metadata_types)
        write_gguf(tmp_path / "inferred.gguf", {k: v for k, v in file.metadata.items() if k.startswith("arr")})
    assert (tmp_path / "copy.gguf").read_bytes() == (tmp_path / "x.gguf").read_bytes()
    arrays = {key: type for key, type in types.items() if key.startswith("arr")}
    assert GGUFFile(tmp_path / "inferred.gguf").metadata_types == arrays


@pytest.mark.parametrize(
    ("value", "type"),
    [
        (True, "bool"),
        (0, "u32"),
        (-1, "i32"),
        (2**32, "u64"),
        (-(2**31) - 1, "i64"),
        (1.0, "f32"),
        ("a", "str"),
        (b"\xff", "str"),
        ([1, 2], "arr[i32]"),
        ((1, 2**31), "arr[u32]"),
        ([2**63], "arr[u64]"),
        ([2**32 - 1, -1], "arr[i64]"),
        ([1.0], "arr[f32]"),
        (["a", b"b"], "arr[str]"),
        ([[1], [2, 3]], "arr[arr]"),
        (np.float64(1), "f64"),
        (np.uint8(1), "u8"),
        (np.bool_(True), "bool"),
        (np.arange(3, dtype=np.int8), "arr[i8]"),
        (np.arange(3, dtype=">i2"), "arr[i16]"),
        (np.zeros(0, np.float32), "arr[f32]"),
        (np.ones((2, 2), np.int64), "arr[arr]"),
    ],
)
def test_type_is_inferred_as_documented(value, type, tmp_path):
    """Without a type, the one that `add` documents is chosen."""
    write_gguf(tmp_path / "x.gguf", {"k": value})
    file = GGUFFile(tmp_path / "x.gguf")
    assert file.metadata_types["k"] == type
    plain = value.tolist() if hasattr(value, "dtype") else value
    expected = plain.decode("utf-8", "surrogateescape") if isinstance(plain, bytes) else plain
    assert file.metadata["k"] == (["a", "b"] if plain == ["a", b"b"] else expected)


def test_strings_are_byte_exact(tmp_path):
    """Bytes go in as they are, and text read as surrogate escapes becomes the same bytes again."""
    write_gguf(tmp_path / "x.gguf", {"k": [b"\xe6\xad", b"\xff\0", "é"]})
    write_gguf(tmp_path / "y.gguf", {"k": GGUFFile(tmp_path / "x.gguf").metadata["k"].tolist()})
    assert GGUFFile(tmp_path / "y.gguf").metadata["k"].rawlist() == [b"\xe6\xad", b"\xff\0", "é".encode()]


def test_nested_arrays_read_back(tmp_path):
    """Arrays in arrays come back as they were."""
    value = [[["a"], []], [["b", "c"]]]
    with pytest.raises(GGUFError, match="found nothing; give the type"):
        write_gguf(tmp_path / "x.gguf", {"k": value})
    write_gguf(tmp_path / "x.gguf", {"k": value}, metadata_types={"k": "arr[arr[arr[str]]]"})
    file = GGUFFile(tmp_path / "x.gguf")
    assert (file.metadata["k"], file.metadata_types["k"]) == (value, "arr[arr]")
    write_gguf(tmp_path / "y.gguf", file.metadata, metadata_types=file.metadata_types)
    assert (tmp_path / "y.gguf").read_bytes() == (tmp_path / "x.gguf").read_bytes()


@pytest.mark.parametrize(("name", "alignment"), [("align64_ok", 64), ("align1_ok", 1)])
def test_layout_is_the_crafted_one(name, alignment, tmp_path):
    """Byte for byte the file that was put together by hand."""
    x, y = ([1, 2, 3, 4], [5, 6, 7, 8]) if alignment == 64 else ([1], [2])
    with GGUFWriter(tmp_path / "x.gguf", alignment=alignment) as writer:
        writer.add_tensor("x", np.array(x, np.float32))
        writer.add_tensor("y", np.array(y, np.float32))
    assert (tmp_path / "x.gguf").read_bytes() == CRAFTED[name]


def test_every_tensor_type_reads_back(tmp_path):
    """The bytes of a tensor of each type come back as they were."""
    write_gguf(tmp_path / "x.gguf", {}, all_types())
    with GGUFFile(tmp_path / "x.gguf") as file:
        assert list(file.tensors) == [t.label for t in GGMLType]
        for label, (data, type, shape) in all_types().items():
            info = file.tensors[label]
            assert (info.type, info.shape, info.nbytes, info.offset % 32) == (type, shape, len(data), 0)
            assert file.data(label).tobytes() == data


def test_array_gives_type_and_shape(tmp_path):
    """Numbers by dtype, any memory layout or byte order; encoded rows by the bytes of their last axis."""
    f32 = np.arange(12, dtype=np.float32).reshape(3, 4)
    rows = np.frombuffer(random_bytes(GGMLType.Q8_0, (2, 64)), np.uint8).reshape(2, 68)
    writer = GGUFWriter(tmp_path / "x.gguf")
    for name, array in {
        "f32": f32,
        "f16": f32.astype(np.float16),
        "f64": f32.astype(np.float64),
        "i8": f32.astype(np.int8),
        "i16": f32.astype(np.int16),
        "i32": f32.astype(np.int32),
        "i64": f32.astype(np.int64),
        "transposed": f32.T,
        "big": f32.astype(">f4"),
        "strided": f32[:, ::2],
        "scalar": np.float32(7).reshape(()),
        "none": np.zeros((0, 4), np.float32),
    }.items():
        writer.add_tensor(name, array)
    writer.add_tensor("q8_0", rows, type="q8_0")
    writer.add_tensor("bf16", np.arange(4, dtype=np.uint16), type=GGMLType.BF16)
    writer.write()
    with GGUFFile(tmp_path / "x.gguf") as file:
        types = [info.type.label for info in file.tensors.values()]
        assert types == ["f32", "f16", "f64", "i8", "i16", "i32", "i64", *["f32"] * 5, "q8_0", "bf16"]
        shapes = [info.shape for info in file.tensors.values()]
        assert shapes == [*[(3, 4)] * 7, (4, 3), (3, 4), (3, 2), (), (0, 4), (2, 64), (4,)]
        assert file.data("transposed").view("<f4").reshape(4, 3).tolist() == f32.T.tolist()
        assert file.data("big").tobytes() == f32.tobytes()
        assert file.data("strided").view("<f4").tolist() == [0, 2, 4, 6, 8, 10]
        assert file.data("scalar").view("<f4").tolist() == [7]
        assert file.data("q8_0").tobytes() == rows.tobytes()
        assert file.data("bf16").view("<u2").tolist() == [0, 1, 2, 3]


def test_gguf_package_reads_the_same(tmp_path):
    """Keys, values, value types, tensor names, types, shapes and bytes, under alignment 64."""
    gguf = pytest.importorskip("gguf")
    known = {t.value for t in gguf.GGMLQuantizationType} - {GGMLType.Q8_1}  # whose block it takes for 40 bytes
    tensors = {name: tensor for name, tensor in all_types().items() if tensor[1] in known}
    values = {key: value for key, (value, _) in METADATA.items()}
    types = {key: type for key, (_, type) in METADATA.items()}
    write_gguf(tmp_path / "x.gguf", values, tensors, metadata_types=types, alignment=64)
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    fields = {key: field for key, field in reader.fields.items() if not key.startswith(("GGUF.", "general.alignment"))}
    assert {key: field.contents() for key, field in fields.items() if key != "arr.empty"} == {
        key: value for key, value in values.items() if key != "arr.empty"
    }
    long = {"u": "UINT", "i": "INT", "f": "FLOAT", "b": "BOOL", "s": "STRING", "a": "ARRAY"}
    for key, field in fields.items():
        expected = ["arr"] if key == "arr.empty" else types[key].rstrip("]").split("[")
        digits = [name.strip("abcdefghijklmnopqrstuvwxyz") for name in expected]
        assert [type.name for type in field.types] == [
            long[name[0]] + n for name, n in zip(expected, digits, strict=True)
        ]
    assert reader.alignment == 64
    assert [t.name for t in reader.tensors] == list(tensors)
    for theirs in reader.tensors:
        data, type, shape = tensors[theirs.name]
        assert (theirs.tensor_type.value, tuple(theirs.shape[::-1]), theirs.data_offset % 64) == (type, shape, 0)
        assert theirs.data.tobytes() == data


def test_reads_what_the_gguf_package_writes(tmp_path):
    """A file of the gguf package is read alike."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(128)
    writer.add_uint16("u16", 7)
    writer.add_array("tokens", [b"\xff", "é"])
    writer.add_array("scores", [0.5, -1.5])
    writer.add_tensor("x", np.arange(6, dtype=np.float16).reshape(2, 3))
    writer.add_tensor("y", np.arange(68, dtype=np.uint8).reshape(2, 34), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "x.gguf") as file:
        assert (file.alignment, file.metadata["u16"], file.metadata["scores"]) == (128, 7, [0.5, -1.5])
        assert file.metadata["tokens"].rawlist() == [b"\xff", "é".encode()]
        assert (file.tensors["x"].shape, file.tensors["x"].type) == ((2, 3), GGMLType.F16)
        assert (file.tensors["y"].shape, file.tensors["y"].type) == ((2, 32), GGMLType.Q8_0)
        assert file.data("x").view("<f2").tolist() == [0, 1, 2, 3, 4, 5]
        assert file.data("y").tolist() == list(range(68))


@pytest.mark.parametrize(
    ("limits", "n_parts"),
    [
        ({"max_tensors": 2}, 3),
        ({"max_bytes": 2 * 64}, 3),
        ({"max_bytes": 1}, 5),
        ({"max_tensors": 3, "max_bytes": 64}, 5),
        ({"max_tensors": 5, "max_bytes": 5 * 64}, 1),
    ],
)
def test_split_reads_back_from_any_part(limits, n_parts, tmp_path):
    """Parts are filled in order; metadata is in the first, number and alignment in each; one part is a plain file."""
    tensors = {f"t{i}": np.full(4, i, np.float32) for i in range(5)}
    paths = write_gguf(tmp_path / "m.gguf", {"k": "v", "general.alignment": 64}, tensors, **limits)
    names = [f"m-{i + 1:05}-of-{n_parts:05}.gguf" for i in range(n_parts)]
    assert [path.name for path in paths] == (names if n_parts > 1 else ["m.gguf"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
    for path in paths:
        with GGUFFile(path) as file:
            assert len(file.shards) == n_parts
            assert (file.metadata["k"], file.alignment) == ("v", 64)
            assert list(file.tensors) == list(tensors)
            assert all(info.offset % 64 == 0 for info in file.tensors.values())
            for name, array in tensors.items():
                assert file.data(name).tobytes() == array.tobytes()
            if n_parts > 1:
                assert file.metadata_types["split.count"] == "u16"
                assert file.metadata["split.tensors.count"] == 5


@pytest.mark.parametrize(
    ("key", "value", "type", "reason"),
    [
        ("k", 256, "u8", "expected u8"),
        ("k", -1, "u32", "expected u32"),
        ("k", 1.5, "u32", "expected u32"),
        ("k", 1e300, "f32", "expected f32"),
        ("k", True, "u32", "expected u32, found True"),
        ("k", 1, "bool", "expected bool, found 1"),
        ("k", "1", "u32", "expected u32"),
        ("k", 1, "str", "expected str, found 1"),
        ("k", 1, "arr[u32]", "expected a sequence for arr[u32], found 1"),
        ("k", [1], "u32", "expected u32"),
        ("k", "abc", "arr[str]", "expected a sequence for arr[str], found 'abc'"),
        ("k", 1, "u31", "unknown value type 'u31'"),
        ("k", [1], "arr[", "unknown value type ''"),
        ("k", 2**64, None, "no integer type holds"),
        ("k", [], None, "found nothing; give the type"),
        ("k", [1, "a"], None, "found int and str"),
        ("k", [1, 2.0], None, "found f32 and int"),
        ("k", None, None, "cannot store a NoneType"),
        ("k", {}, None, "cannot store a dict"),
        ("k", np.complex64(1), None, "dtype complex64 is no GGUF value type"),
        ("k", "\ud800", None, "not encodable as UTF-8"),
        ("k", [[[[[1]]]]], None, "arrays are nested deeper than 4"),
        ("", 1, None, "expected a name of 1 to 65535 bytes, found 0"),
        ("k" * 65536, 1, None, "expected a name of 1 to 65535 bytes, found 65536"),
        ("\udcff", 1, None, "not encodable as UTF-8"),
        ("old", 1, None, "old: the key was added before"),
        ("split.count", 1, None, "split.count: the writer sets this key itself"),
        ("general.alignment", 33, None, "expected a power of two (u32), found 33"),
        ("general.alignment", 0, None, "expected a power of two (u32), found 0"),
        ("general.alignment", 32, "u64", "expected a power of two (u32), found 32 (u64)"),
    ],
)
def test_refuses_bad_metadata(key, value, type, reason, tmp_path):
    """The error names the key; the writer stays usable."""
    writer = GGUFWriter(tmp_path / "x.gguf")
    writer.add("old", 1)
    with pytest.raises(GGUFError) as caught:
        writer.add(key, value, type)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{key}: ")
    writer.write()
    assert dict(GGUFFile(tmp_path / "x.gguf").metadata) == {"old": 1}


F32 = np.zeros((2, 32), np.float32)


@pytest.mark.parametrize(
    ("name", "data", "type", "shape", "reason"),
    [
        ("", F32, None, None, "expected a name of 1 to 63 bytes, found 0"),
        ("n" * 64, F32, None, None, "expected a name of 1 to 63 bytes, found 64"),
        ("é" * 32, F32, None, None, "expected a name of 1 to 63 bytes, found 64"),
        ("a\0b", F32, None, None, "expected a str without NUL"),
        ("old", F32, None, None, "the tensor was added before"),
        ("t", F32, "q4_0", None, "expected data of type q4_0, found float32"),
        ("t", F32, "f16", None, "expected data of type f16, found float32"),
        ("t", F32, "q9", None, "unknown tensor type 'q9'"),
        ("t", F32, 4, None, "unknown tensor type 4"),
        ("t", F32, None, (65,), "f32 of shape [65] takes 260 bytes, found 256"),
        ("t", F32, None, (1, 1, 1, 2, 32), "expected a shape of at most 4 sizes"),
        ("t", F32, None, (-2, -32), "expected a shape of at most 4 sizes"),
        ("t", F32, None, (64.0,), "expected a shape of at most 4 sizes"),
        ("t", b"\0" * 8, None, (2,), "give the tensor type of raw bytes"),
        ("t", b"\0" * 8, "f32", None, "give the shape of raw bytes"),
        ("t", b"\0" * 7, "f32", (2,), "f32 of shape [2] takes 8 bytes, found 7"),
        ("t", b"\0" * 18, "q4_0", (33,), "a row of 33 elements does not fill whole blocks of 32"),
        ("t", np.zeros(8, np.uint8), None, None, "give the tensor type of uint8"),
        ("t", np.zeros(19, np.uint8), "q4_0", None, "q4_0 of shape [32] takes 18 bytes, found 19"),
        ("t", [1.0, 2.0], "f32", (2,), "expected an array or contiguous bytes"),
    ],
)
def test_refuses_bad_tensor(name, data, type, shape, reason, tmp_path):
    """The error names the tensor; the writer stays usable."""
    writer = GGUFWriter(tmp_path / "x.gguf")
    writer.add_tensor("old", F32)
    with pytest.raises(GGUFError) as caught:
        writer.add_tensor(name, data, type=type, shape=shape)
    assert str(caught.value).startswith(f"{name}: {reason}")
    writer.write()
    assert list(GGUFFile(tmp_path / "x.gguf").tensors) == ["old"]


@pytest.mark.parametrize("limits", [{"max_tensors": 0}, {"max_bytes": -1}])
def test_refuses_bad_limits(limits, tmp_path):
    """A part has to have room for something."""
    with pytest.raises(GGUFError, match="expected positive limits"):
        GGUFWriter(tmp_path / "x.gguf", **limits)


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    """A write that stops half-way leaves neither a damaged file nor a temporary one."""
    (tmp_path / "x.gguf").write_bytes(CRAFTED["t_ok"])
    writer = GGUFWriter(tmp_path / "x.gguf")
    writer.add_tensor("t", F32)

    def fail(self, file):
        raise OSError("disk full")

    monkeypatch.setattr(GGUFWriter, "_pad", fail)
    with pytest.raises(OSError, match="disk full"):
        writer.write()
    assert (tmp_path / "x.gguf").read_bytes() == CRAFTED["t_ok"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_exception_in_the_block_writes_nothing(tmp_path):
    """A `with` block that raises leaves no file, whole or in part."""
    with pytest.raises(KeyError), GGUFWriter(tmp_path / "x.gguf"):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_overwriting_an_open_file_is_harmless(tmp_path):
    """The mapping of the file that was there stays as it is, so a file can be rewritten from its own views."""
    path: Path = tmp_path / "x.gguf"
    write_gguf(path, {"k": 1}, {"t": F32 + 1})
    with GGUFFile(path) as file:
        view = file.data("t")
        write_gguf(path, {"k": 2}, {"t": (view, "f32", (64,))})
        assert view.view("<f4").tolist() == [1.0] * 64
    with GGUFFile(path) as file:
        assert (file.metadata["k"], file.tensors["t"].shape) == (2, (64,))
        assert file.data("t").view("<f4").tolist() == [1.0] * 64
