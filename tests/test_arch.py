"""Hyper-parameters and tensor tables: a file that contradicts itself is refused by name, before any graph is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rewrite import DROP, Entry, rewrite

from ggufpy import GGUFError, GGUFFile, Model, UnsupportedArchitectureError, arch
from ggufpy.gguf import GGMLType
from ggufpy.testing import variants

Tiny = Callable[..., Path]
Edit = Callable[[dict[str, Entry]], object]
NAN, INF = float("nan"), float("inf")


def load(source: Path, target: Path, keys: dict[str, Any] | None = None, edit: Edit | None = None) -> Model:
    """Load a copy of a model with another header and no data: what is refused has to be refused by its header."""
    return Model.load(rewrite(source, target, keys, edit, hollow=True))


def drop(name: str) -> Edit:
    return lambda tensors: tensors.pop(name)


def transpose(name: str) -> Edit:
    def edit(tensors: dict[str, Entry]) -> None:
        tensors[name].shape = tensors[name].shape[::-1]

    return edit


def retype(name: str, type: int) -> Edit:
    def edit(tensors: dict[str, Entry]) -> None:
        tensors[name].type = type

    return edit


def reshape(name: str, *shape: int) -> Edit:
    def edit(tensors: dict[str, Entry]) -> None:
        tensors[name].shape = shape

    return edit


def add(name: str) -> Edit:
    def edit(tensors: dict[str, Entry]) -> None:
        tensors[name] = Entry((8,), GGMLType.F32, bytes(32))

    return edit


def all_of(*edits: Edit) -> Edit:
    def edit(tensors: dict[str, Entry]) -> None:
        for one in edits:
            one(tensors)

    return edit


# ------------------------------------------------------------------------- case A11, on the file it was reported with

A11: dict[str, tuple[dict[str, Any], Edit | None, list[str]]] = {
    "head_count 0": ({"llama.attention.head_count": 0}, None, ["attention.head_count: expected at least 1, found 0"]),
    "head_count 7": (
        {"llama.attention.head_count": 7},
        None,
        ["llama.embedding_length: expected a multiple of 7 heads", "found 576", "head_count_kv: expected a divisor"],
    ),
    "block_count 2^31": ({"llama.block_count": 2**31}, None, ["block_count: expected at most 512, found 2147483648"]),
    "block_count 31": ({"llama.block_count": 31}, None, ["blk.30.attn_norm.weight: missing, expected [576]"]),
    "block_count 29": ({"llama.block_count": 29}, None, ["blk.29.ffn_up.weight: not a tensor of this architecture"]),
    "block_count a string": ({"llama.block_count": "30"}, None, ["block_count: expected an integer, found '30'"]),
    "embedding_length 575": (
        {"llama.embedding_length": 575},
        None,
        ["llama.embedding_length: expected a multiple of 9 heads", "found 575"],
    ),
    "head_count_kv absent": (
        {"llama.attention.head_count_kv": DROP},
        None,
        [
            "blk.0.attn_k.weight: expected [576, 576], file has [576, 192]",
            "blk.19.attn_v.weight: expected [576, 576]",
            "20 more",
        ],
    ),
    "head_count_kv of 29": (
        {"llama.attention.head_count_kv": ([3] * 29, "arr[i32]")},
        None,
        ["head_count_kv: expected one value or 30 (block_count), found an array of 29"],
    ),
    "epsilon absent": (
        {"llama.attention.layer_norm_rms_epsilon": DROP},
        None,
        ["llama.attention.layer_norm_rms_epsilon: the key is missing"],
    ),
    "architecture absent": ({"general.architecture": DROP}, None, ["general.architecture: the key is missing"]),
    "architecture nope": ({"general.architecture": "nope"}, None, ["general.architecture 'nope' is not supported"]),
    "architecture 5": ({"general.architecture": 5}, None, ["general.architecture 5 is not supported"]),
    "architecture a list": ({"general.architecture": ["llama"]}, None, ["general.architecture", "is not supported"]),
    "attn_k transposed": (
        {},
        transpose("blk.3.attn_k.weight"),
        ["blk.3.attn_k.weight: expected [576, 192], file has [192, 576]"],
    ),
    "ffn_up dropped": ({}, drop("blk.7.ffn_up.weight"), ["blk.7.ffn_up.weight: missing, expected [576, 1536]"]),
    "a tensor too many": ({}, add("blk.0.extra.weight"), ["blk.0.extra.weight: not a tensor of this architecture"]),
    "several tensors": (
        {},
        all_of(
            drop("blk.7.ffn_up.weight"),
            transpose("blk.3.attn_k.weight"),
            add("extra"),
            reshape("blk.9.attn_norm.weight", 575),
        ),
        [
            "blk.7.ffn_up.weight: missing",
            "blk.3.attn_k.weight: expected",
            "extra: not a",
            "blk.9.attn_norm.weight: expected [576], file has [575]",
        ],
    ),
    "several keys": (
        {
            "llama.context_length": 0,
            "llama.block_count": DROP,
            "llama.attention.head_count": "9",
            "llama.rope.freq_base": 7,
        },
        None,
        [
            "context_length: expected at least 1",
            "block_count: the key is missing",
            "head_count: expected an integer, found '9'",
            "freq_base: expected a float, found 7",
        ],
    ),
}


@pytest.mark.parametrize("case", A11)
def test_headers_that_contradict_themselves_are_refused_by_name(case: str, smollm2_path: Path, tmp_path: Path) -> None:
    """The error names the key or tensor, what was expected and what was found; several faults stand in one error."""
    keys, edit, expected = A11[case]
    with pytest.raises(GGUFError) as caught:
        load(smollm2_path, tmp_path / "x.gguf", keys, edit)
    for part in expected:
        assert part in str(caught.value)


def test_a_vocabulary_shorter_than_the_embeddings_is_refused(smollm2_path: Path, tmp_path: Path) -> None:
    """Ten tokens fewer than rows: as in llama.cpp an error, so that no row without a token is ever sampled."""
    with GGUFFile(smollm2_path) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"][:-10]
    with pytest.raises(GGUFError, match=r"token_embd.weight: expected \[576, 49142\], file has \[576, 49152\]"):
        load(smollm2_path, tmp_path / "x.gguf", {"tokenizer.ggml.tokens": tokens})


def test_head_count_kv_may_be_given_per_layer(smollm2_path: Path, tmp_path: Path) -> None:
    """An int32 array with one value for each layer means what the value means."""
    with load(smollm2_path, tmp_path / "x.gguf", {"llama.attention.head_count_kv": ([3] * 30, "arr[i32]")}) as model:
        assert model.config.n_head_kv == (3,) * 30
        assert len(model.weights) == 273  # 272 in the file, and the embeddings again as the output


@pytest.mark.parametrize("value", [DROP, "nope", "", "l" * 100_000, 5, True, 1.5, ["llama"], b"\xff\xfe"])
def test_unknown_architectures_are_named(value: Any, tiny: Tiny, tmp_path: Path) -> None:
    """Whatever stands for the architecture is shown shortened, beside the nearest that are known."""
    kind = GGUFError if value is DROP else UnsupportedArchitectureError
    with pytest.raises(kind, match=r"general\.architecture") as caught:
        load(tiny("llama"), tmp_path / "x.gguf", {"general.architecture": value})
    assert len(str(caught.value)) < 500
    assert value is DROP or "llama" in str(caught.value)


# ------------------------------------------------------------------------------------------ hostile hyper-parameters

INTEGERS = [
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
]  # fmt: skip
FLOATS = ["attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor", "rope.scaling.attn_factor"]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("value", [-1, 2**32, 2**63, 2.0, "2", True, [2], ["2"] * 3, [True] * 3, ([], "arr[i32]")])
@pytest.mark.parametrize("key", INTEGERS)
def test_integers_are_integers_in_range(key: str, value: Any, name: str, tiny: Tiny, tmp_path: Path) -> None:
    """Each key that counts something refuses signs, sizes and types that it cannot have, by its name."""
    with pytest.raises(GGUFError, match=rf"{name}\.{key}: expected"):
        load(tiny(name), tmp_path / "x.gguf", {f"{name}.{key}": value})


@pytest.mark.parametrize("value", [-1.0, -0.5, NAN, INF, (1e300, "f64"), 1, "1.0", True, [1.0, 1.0, 1.0]])
@pytest.mark.parametrize("key", FLOATS)
def test_floats_are_finite_floats(key: str, value: Any, tiny: Tiny, tmp_path: Path) -> None:
    """Each key that scales something refuses what would only give NaN."""
    with pytest.raises(GGUFError, match=rf"llama\.{key}: expected"):
        load(tiny("llama"), tmp_path / "x.gguf", {f"llama.{key}": value})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "rope.freq_base", 0.0),
        ("llama", "rope.freq_base", (1e-300, "f64")),
        ("llama", "rope.scaling.factor", 1e-45),
        ("llama", "rope.scale_linear", 1e-45),
        ("llama", "rope.scaling.type", "nope"),
        ("llama", "rope.scaling.type", 5),
        ("llama", "rope.scaling.original_context_length", 0),
        ("llama", "rope.dimension_count", 31),
        ("llama", "rope.dimension_count", 34),
        ("llama", "expert_count", 1025),
        ("llama", "expert_used_count", 1),
        ("llama", "attention.head_count_kv", 3),
        ("gemma3", "rope.freq_base_swa", 0.0),
        ("gemma3", "final_logit_softcapping", 1e-45),
        ("gemma3", "attention.sliding_window", -1),
        ("gemma3", "attention.sliding_window", 2**31),
        ("gemma3", "attention.sliding_window", 16.0),
        ("gemma3", "attention.sliding_window_pattern", -1),
        ("gemma3", "attention.sliding_window_pattern", [True, False]),
        ("gemma3", "attention.sliding_window_pattern", "ssssss"),
    ],
)
def test_values_without_a_meaning_are_refused(name: str, key: str, value: Any, tiny: Tiny, tmp_path: Path) -> None:
    """Numbers that only lead to NaN, names that nobody knows, and counts that do not go together."""
    options = {"n_swa": 16} if name == "gemma3" else {}
    with pytest.raises(GGUFError, match=rf"{name}\.{key}: expected"):
        load(tiny(name, **options), tmp_path / "x.gguf", {f"{name}.{key}": value})


def test_a_default_that_counts_with_a_missing_key(tiny: Tiny, tmp_path: Path) -> None:
    """Where MiniCPM files do not give logit_scale, it follows from embedding_length: that is named, if it is amiss."""
    with pytest.raises(GGUFError, match=r"minicpm\.embedding_length: expected at most"):
        load(tiny("minicpm"), tmp_path / "x.gguf", {"minicpm.embedding_length": 2**31})


@pytest.mark.parametrize("used", [0, 5, 1024, -1])
def test_no_more_experts_are_used_than_there_are(used: int, tiny: Tiny, tmp_path: Path) -> None:
    """Of four experts one to four can be chosen."""
    with pytest.raises(GGUFError, match=r"llama\.expert_used_count: expected"):
        load(tiny("llama", n_expert=4, n_expert_used=2), tmp_path / "x.gguf", {"llama.expert_used_count": used})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "context_length", 2**31 - 1),
        ("llama", "attention.layer_norm_rms_epsilon", 0.0),
        ("llama", "rope.freq_base", 4.5e10),
        ("llama", "rope.scaling.factor", 0.0),
        ("gemma3", "final_logit_softcapping", 0.0),
        ("gemma3", "attention.sliding_window", 0),
        ("gemma3", "attention.sliding_window", 2**31 - 1),
        ("gemma3", "attention.sliding_window_pattern", 0),
        ("gemma3", "attention.sliding_window_pattern", 2**31 - 1),
        ("gemma3", "attention.sliding_window_pattern", [True, True, True]),
    ],
)
def test_extreme_values_with_a_meaning_work(name: str, key: str, value: Any, tiny: Tiny, tmp_path: Path) -> None:
    """What is unusual but well defined is computed."""
    options = {"n_swa": 16} if name == "gemma3" else {}
    with (
        Model.load(rewrite(tiny(name, **options), tmp_path / "x.gguf", {f"{name}.{key}": value})) as model,
        model.session(n_ctx=256, n_threads=1, swa_full=False) as session,
    ):
        assert np.isfinite(session.decode(range(40), logits="all")).all()


# --------------------------------------------------------------------------------------------------- tensors' types


@pytest.mark.parametrize("type", [999, -1, 4, 31])
def test_unknown_types_leave_the_metadata_readable(type: int, tiny: Tiny, tmp_path: Path) -> None:
    """Case A8: a file of another ggml can be inspected, the type's number too; building a model names the tensor."""
    path = rewrite(tiny("llama"), tmp_path / "x.gguf", edit=retype("blk.1.attn_q.weight", type))
    with GGUFFile(path) as file:
        assert file.metadata["llama.context_length"] == 1024
        assert file.tensors["blk.1.attn_q.weight"].type == type
    with pytest.raises(GGUFError, match=rf"blk\.1\.attn_q\.weight: type {type} is not supported by this ggml"):
        Model.load(path)


@pytest.mark.parametrize("type", ["F16", "BF16", "Q8_0", "I32", "F64"])
@pytest.mark.parametrize("name", ["output_norm.weight", "blk.1.attn_norm.weight"])
def test_vectors_are_f32(name: str, type: str, tiny: Tiny, tmp_path: Path) -> None:
    """Kernels add and multiply vectors as f32 only: another type is named at load, not at the first token."""
    kind = GGMLType[type]

    def edit(tensors: dict[str, Entry]) -> None:
        tensors[name] = Entry((128,), kind, bytes(kind.nbytes((128,))))

    with pytest.raises(GGUFError, match=rf"{name}: expected type f32, file has {kind.label}"):
        load(tiny("llama"), tmp_path / "x.gguf", edit=edit)


@pytest.mark.parametrize("type", ["I8", "I16", "I32", "I64", "F64", "Q8_1"])
@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_q.weight"])
def test_matrices_have_types_of_weights(name: str, type: str, tiny: Tiny, tmp_path: Path) -> None:
    """Integers, f64 and the kernels' own types are no weights."""
    kind = GGMLType[type]

    def edit(tensors: dict[str, Entry]) -> None:
        shape = tensors[name].shape
        tensors[name] = Entry(shape, kind, bytes(kind.nbytes(shape)))

    with pytest.raises(GGUFError, match=rf"{name}: expected a type that weights have, file has {kind.label}"):
        load(tiny("llama"), tmp_path / "x.gguf", edit=edit)


def test_empty_tensors_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    """A width of 0 that keys and shapes agree on is still nothing to compute with."""

    def edit(tensors: dict[str, Entry]) -> None:
        for name in list(tensors):
            if ".ffn_" in name and "norm" not in name:
                tensors[name] = Entry((128, 0) if "down" in name else (0, 128), GGMLType.F32, b"")

    with pytest.raises(GGUFError, match=r"blk\.0\.ffn_gate\.weight: \[128, 0\] has no elements"):
        load(tiny("llama"), tmp_path / "x.gguf", {"llama.feed_forward_length": 0}, edit)


def test_an_empty_vocabulary_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """No tokens and no rows agree with each other, and are refused."""

    def edit(tensors: dict[str, Entry]) -> None:
        tensors["token_embd.weight"] = Entry((0, 128), GGMLType.F32, b"")

    with pytest.raises(GGUFError, match=r"token_embd\.weight: \[128, 0\] has no elements"):
        load(tiny("llama"), tmp_path / "x.gguf", {"tokenizer.ggml.tokens": ([], "arr[str]")}, edit)


def test_trailing_dimensions_of_one_make_no_difference(tiny: Tiny, tmp_path: Path) -> None:
    """Some writers keep them, some do not."""

    def edit(tensors: dict[str, Entry]) -> None:
        tensors["output_norm.weight"].shape = (1, 1, 128)
        tensors["blk.0.attn_q.weight"].shape = (1, 128, 128)

    path = rewrite(tiny("llama"), tmp_path / "x.gguf", edit=edit)
    with Model.load(path) as changed, Model.load(tiny("llama")) as plain:
        rows = [model.session(n_threads=1).decode([1, 2, 3]) for model in (changed, plain)]
    assert np.array_equal(rows[0], rows[1])


# ------------------------------------------------------------------------------------------------------ the registry


def test_names_lead_to_declarations() -> None:
    """Every name that is listed is found, under the name it declares."""
    assert {"llama", "gemma3"} <= set(arch.names())
    assert [arch.find(name).name for name in arch.names()] == arch.names()


def test_a_declarations_head_gives_attributes_that_there_are() -> None:
    """They are attributes as any others, but for the name, which nobody inherits; a misspelt one is refused."""

    class Kin(arch.Decoder, name="kin", tie=True):
        pass

    class Common(Kin):
        pass

    assert ("kin", True) == (Kin.name, Kin.tie)
    assert ("", True) == (Common.name, Common.tie)
    with pytest.raises(AttributeError, match="activatoin"):

        class Other(arch.Decoder, name="other", activatoin="relu"):
            pass


@pytest.mark.parametrize("name", arch.names())
def test_every_tensor_of_a_table_is_needed(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """A file is refused for the lack of any tensor that its table demands, and only for that one."""
    path = tiny(name)
    with GGUFFile(path) as file:
        declaration = arch.find(name)
        config = declaration.config(file.metadata)
        table = declaration(config).tensors(file.tensors)
        required = {spec.name for spec in table if not spec.optional and not spec.unused}
        present = list(file.tensors)
    assert required <= set(present)
    for tensor in present:
        if tensor not in required or tensor.startswith("blk.") > tensor.startswith("blk.0."):
            continue  # what holds of one layer holds of the others
        with pytest.raises(GGUFError, match=rf"{tensor}: missing") as caught:
            load(path, tmp_path / "x.gguf", edit=drop(tensor))
        assert str(caught.value).count(": missing") == 1


@pytest.mark.parametrize("name", arch.names())
def test_configs_hold_what_the_file_says(name: str, tiny: Tiny) -> None:
    """Hyper-parameters given to a file come back from it, per layer where they may differ, with derived ones beside."""
    with Model.load(tiny(name)) as model:
        c, said = model.config, {key.removeprefix(f"{name}."): value for key, value in model.metadata.items()}
        assert (name, len(said["tokenizer.ggml.tokens"])) == (c.architecture, c.n_vocab)
        assert (said["embedding_length"], said["block_count"]) == (c.n_embd, c.n_layer)
        n_head, n_head_kv = said["attention.head_count"], said["attention.head_count_kv"]
        per_layer = n_head_kv if isinstance(n_head_kv, Sequence) else [n_head_kv] * c.n_layer
        attend = [il not in arch.find(name)(c).states() for il in range(c.n_layer)]
        assert ((n_head,) * c.n_layer, tuple(np.multiply(per_layer, attend))) == (c.n_head, c.n_head_kv)
        if "attention.key_length" not in said and not arch.find(name).split_heads:
            assert c.n_embd // n_head == c.n_embd_head_k == c.n_embd_head_v == c.n_rot
        assert 1024 == c.n_ctx_train == c.n_ctx_orig_yarn


def test_windows_follow_pattern_or_period(tiny: Tiny) -> None:
    """Of each run of six layers the last sees everything, unless the file says which do."""
    with Model.load(tiny("gemma3", n_swa=16, n_layer=7)) as model:
        assert (True, True, True, True, True, False, True) == model.config.is_swa
    with Model.load(tiny("gemma3", **variants("gemma3")["window-array"])) as model:
        assert (True, False, True) == model.config.is_swa
    with Model.load(tiny("gemma3", n_layer=7)) as model:
        assert (False,) * 7 == model.config.is_swa
