"""The type table, and conversion to and from float32 through ggml's own functions."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from ggufpy.errors import BuildError, GraphError
from ggufpy.gguf import GGMLType
from ggufpy.types import NUMPY_TYPES, _check_table, dequantize, needs_imatrix, quantize

BLOCKS = [kind for kind in GGMLType if kind.is_quantized and kind not in (GGMLType.Q8_1, GGMLType.Q8_K)]
# ggml computes grids of seconds for these before it quantizes; reading them needs none.
SLOW = {GGMLType.IQ1_S, GGMLType.IQ1_M, GGMLType.IQ2_S, GGMLType.IQ2_XS}
QUICK = [kind for kind in BLOCKS if kind not in SLOW]
NEED_IMATRIX = {GGMLType.IQ2_XXS, GGMLType.IQ2_XS, GGMLType.IQ1_S}
# Root mean square of the error, relative to that of the values, by the digit in the type's name.
COARSENESS = {1: 0.9, 2: 0.8, 3: 0.25, 4: 0.14, 5: 0.06, 6: 0.03, 8: 0.01}


def values(kind: GGMLType, rows: int = 3, blocks: int = 2) -> np.ndarray:
    return np.random.default_rng(int(kind)).standard_normal((rows, blocks * kind.block_size)).astype(np.float32)


def imatrix(kind: GGMLType, n: int) -> np.ndarray | None:
    return np.ones(n, np.float32) if needs_imatrix(kind) else None


def test_the_table_is_compared_with_the_loaded_ggml(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that differs from ggml's is refused by name."""
    _check_table()
    monkeypatch.setattr(GGMLType.Q4_K, "type_size", 143)
    with pytest.raises(BuildError, match="type 12: ggufpy knows it as"):
        _check_table()


def test_types_that_need_an_imatrix() -> None:
    """Exactly the types that ggml itself refuses without one."""
    assert {kind for kind in GGMLType if needs_imatrix(kind)} == NEED_IMATRIX


@pytest.mark.parametrize("kind", QUICK, ids=lambda kind: kind.name)
def test_blocks_keep_the_values_roughly(kind: GGMLType) -> None:
    """What comes back differs by no more than the type's coarseness."""
    x = values(kind)
    data = quantize(x, kind, imatrix(kind, x.shape[-1]))
    assert (data.dtype, data.shape) == (np.uint8, (3, 2 * kind.type_size))
    back = dequantize(data, kind, x.shape)
    assert (back.dtype, back.shape) == (np.float32, x.shape)
    bits = 1 if kind.name.startswith("T") else int("".join(c for c in kind.name if c.isdigit())[0])
    assert np.sqrt(np.mean((back - x) ** 2) / np.mean(x**2)) < COARSENESS[bits]


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_dequantizing_agrees_with_the_gguf_package(kind: GGMLType) -> None:
    """An independent reading of the same bytes gives the same numbers."""
    data = np.random.default_rng(int(kind)).integers(0, 60, (3, 2 * kind.type_size), np.uint8)  # no infinite scales
    try:
        expected = gguf.dequantize(data, gguf.GGMLQuantizationType(int(kind)))
    except (ValueError, NotImplementedError, KeyError):
        pytest.skip(f"the gguf package does not read {kind.name}")
    np.testing.assert_allclose(dequantize(data, kind, expected.shape), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", sorted(NUMPY_TYPES))
def test_plain_numbers(kind: GGMLType) -> None:
    """Plain numbers come back as they were, as far as the type holds them."""
    x = np.array([[0, 1, -2], [3, 100, -128]])
    data = quantize(x, kind)
    assert data.shape == (2, 3 * kind.type_size)
    np.testing.assert_array_equal(dequantize(data, kind, (2, 3)), x)


def test_bf16_rounds_to_nearest_even() -> None:
    """bf16 is the upper half of a float32, rounded."""
    x = np.array([1.0, 1.00390625, 1.01171875, 3.0e38], np.float32)  # the middle two lie half-way
    assert quantize(x, GGMLType.BF16).view(np.uint16).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x7F62]


@pytest.mark.parametrize("kind", QUICK, ids=lambda kind: kind.name)
@pytest.mark.parametrize("scale", [0.0, 1e-38, 60000.0])
def test_extreme_values_stay_finite(kind: GGMLType, scale: float) -> None:
    """Zeros, tiny numbers, and the largest that are taken give finite blocks."""
    x = np.clip(values(kind), -1, 1) * np.float32(scale)
    x[0, 0] = np.float32(65504.0 if scale > 1 else scale)
    data = quantize(x, kind, imatrix(kind, x.shape[-1]))
    assert np.isfinite(dequantize(data, kind, x.shape)).all()


@pytest.mark.parametrize(
    ("array", "kind", "match"),
    [
        (np.zeros((2, 33), np.float32), "q4_0", "rows of 33 elements do not fill whole blocks of 32"),
        (np.zeros((), np.float32), "q4_0", "elements expected"),
        (np.zeros((0, 32), np.float32), "q4_0", "elements expected"),
        (np.zeros(32, np.float32), "q8_1", "ggml's own use"),
        (np.zeros(256, np.float32), "q8_K", "ggml's own use"),
        (np.zeros(256, np.float32), "iq1_s", "importance matrix"),
        (np.full(32, np.nan, np.float32), "q4_0", "finite"),
        (np.full(32, 1e6), "q4_0", "65504"),
        (np.array([1.5]), "i32", "integers"),
        (np.array([128]), "i8", "-128 to 127"),
        (np.array([2**40]), "i32", "integers from"),
        (np.zeros(32), 4, "no type 4"),
    ],
)
def test_what_cannot_be_quantized(array: np.ndarray, kind: str | int, match: str) -> None:
    """Each is refused with the reason, before ggml sees it."""
    with pytest.raises(GraphError, match=match):
        quantize(array, kind)


@pytest.mark.parametrize("weights", [np.ones(255), np.full(256, -1.0), np.full(256, np.inf), np.ones((1, 256))])
def test_an_imatrix_that_does_not_fit(weights: np.ndarray) -> None:
    """It has one finite, non-negative weight per column."""
    with pytest.raises(GraphError, match="imatrix of 256"):
        quantize(np.ones(256), GGMLType.IQ2_XS, weights)


@pytest.mark.parametrize(
    ("nbytes", "kind", "shape", "match"),
    [
        (18, "q4_0", (31,), "no q4_0 tensor has the shape"),
        (17, "q4_0", (32,), "has 18 contiguous bytes, not 17"),
        (36, "q4_0", (32,), "has 18 contiguous bytes, not 36"),
        (18, "q4_0", (-1, 32), "no q4_0 tensor has the shape"),
        (292, "q8_K", (256,), "ggml's own use"),
        (0, 36, (0,), "no type 36"),
    ],
)
def test_what_cannot_be_dequantized(nbytes: int, kind: str | int, shape: tuple[int, ...], match: str) -> None:
    """Bytes that are not such a tensor are refused with both sizes."""
    with pytest.raises(GraphError, match=match):
        dequantize(bytes(nbytes), kind, shape)


def test_dequantizing_takes_any_buffer() -> None:
    """bytes, memoryviews and read-only arrays are read without a copy of ours."""
    data = quantize(np.arange(64, dtype=np.float32), GGMLType.Q8_0)
    expected = dequantize(data, GGMLType.Q8_0, (2, 32))
    for source in (bytes(data), memoryview(data.tobytes()), data):
        np.testing.assert_array_equal(dequantize(source, GGMLType.Q8_0, (2, 32)), expected)
    assert dequantize(b"", GGMLType.Q8_0, (0, 32)).shape == (0, 32)
