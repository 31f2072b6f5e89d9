"""Where weights lie: in the mapped file, in memory of their own, or rearranged; and that nothing goes too early."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rewrite import rewrite

from ggufpy import BackendError, ClosedError, GGUFError, GGUFFile, GGUFWriter, GraphError, Model, devices
from ggufpy.backend import cpu_device, extra_buffer_types
from ggufpy.weights import Layout

Tiny = Callable[..., Path]
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
linux_only = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")


def logits(model: Model, **options: Any) -> np.ndarray:
    """The rows of a few tokens: equal bits mean equal weights."""
    with model.session(n_ctx=256, n_threads=1, **options) as session:
        return session.decode(IDS, logits="all")


def mapping_range(model: Model, shard: int = 0) -> range:
    """The addresses of a mapped file."""
    view = np.frombuffer(model._file.shards[shard].mapping, np.uint8)
    start = view.ctypes.data
    return range(start, start + view.nbytes)


def mapped_lines(path: Path) -> list[str]:
    """The process's mappings of a file."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]


def resident_kb(path: Path) -> int:
    """How much of a mapped file this process has touched."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = [i for i, line in enumerate(lines) if line.endswith(str(path))]
    return sum(int(next(x for x in lines[i:] if x.startswith("Rss:")).split()[1]) for i in at)


# -------------------------------------------------------------------------------------------------------- zero copy


def test_weights_are_the_bytes_of_the_file(smollm2_path: Path) -> None:
    """Every weight's address is its offset in the mapping; nothing is copied, and opening reads no weights."""
    with Model.load(smollm2_path) as model:
        inside = mapping_range(model)
        for name, info in model._file.tensors.items():
            assert inside.start + info.offset == model.weights[name].address
            assert model.weights[name].address + info.nbytes <= inside.stop
        assert len(model._file.tensors) == model.weights.n_mapped
        assert 0 == model.weights.nbytes_copied
        assert model.weights["output.weight"] is model.weights["token_embd.weight"]
        if Path("/proc/self/smaps").exists():
            assert resident_kb(smollm2_path) < 8000 < smollm2_path.stat().st_size // 1024


def test_every_part_of_a_split_file_is_mapped(tiny: Tiny, tmp_path: Path) -> None:
    """Each weight lies in the mapping of its own part; opening any part gives the same model."""
    with GGUFFile(tiny("llama")) as file:
        writer = GGUFWriter(tmp_path / "x.gguf", max_tensors=11)
        for key, value in file.metadata.items():
            writer.add(key, value, file.metadata_types[key])
        for name, info in file.tensors.items():
            writer.add_tensor(name, file.data(name), type=info.type, shape=info.shape)
        parts = writer.write()
    assert 3 == len(parts)
    with Model.load(parts[2]) as model, Model.load(tiny("llama")) as whole:
        assert 0 == model.weights.nbytes_copied
        assert {0, 1, 2} == {info.shard for info in model._file.tensors.values()}
        for name, info in model._file.tensors.items():
            assert mapping_range(model, info.shard).start + info.offset == model.weights[name].address
        assert np.array_equal(logits(whole), logits(model))


def test_two_models_of_one_file_do_not_disturb_each_other(tiny: Tiny) -> None:
    """Closing one leaves the other's weights where they are."""
    first, second = Model.load(tiny("llama")), Model.load(tiny("llama"))
    expected = logits(first)
    first.close()
    assert np.array_equal(expected, logits(second))
    second.close()


# ------------------------------------------------------------------------------------------------------- alignment


@pytest.mark.parametrize("alignment", [1, 8, 16])
def test_unaligned_tensors_are_copied_to_aligned_memory(alignment: int, tiny: Tiny, tmp_path: Path) -> None:
    """Case A6: what does not start at a multiple of 32 is copied, tensor by tensor; the numbers stay the same."""
    source = tiny("llama", n_embd=36, n_head=2, n_head_kv=1, n_ff=20)  # rows that are no multiple of 32 bytes
    path = rewrite(source, tmp_path / "x.gguf", {"a": "b" * (alignment // 2)}, alignment=alignment)
    with Model.load(path) as model, Model.load(source) as plain:
        assert alignment == model._file.alignment
        inside = mapping_range(model)
        aligned = {name for name, info in model._file.tensors.items() if info.offset % 32 == 0}
        assert len(aligned) == model.weights.n_mapped < len(model._file.tensors)
        for name in model._file.tensors:
            address = model.weights[name].address
            assert 0 == address % 32
            assert (address in inside) == (name in aligned)
        assert model.weights.nbytes_copied > 0
        assert np.array_equal(logits(plain), logits(model))


@pytest.mark.parametrize("alignment", [64, 4096])
def test_larger_alignments_are_mapped(alignment: int, tiny: Tiny, tmp_path: Path) -> None:
    """Padding that the key asks for is skipped, not read."""
    with Model.load(rewrite(tiny("llama"), tmp_path / "x.gguf", alignment=alignment)) as model:
        assert 0 == model.weights.nbytes_copied
        with Model.load(tiny("llama")) as plain:
            assert np.array_equal(logits(plain), logits(model))


# ------------------------------------------------------------------------------------------------------ truncation


@pytest.mark.parametrize("size", [50_000_000, -1])
def test_truncated_downloads_are_refused_by_tensor(size: int, smollm2_path: Path, tmp_path: Path) -> None:
    """Case A5: the first tensor that does not lie in the file is named, with what it needs and what is there."""
    path = rewrite(smollm2_path, tmp_path / "x.gguf", hollow=True)
    whole = path.stat().st_size
    os.truncate(path, size if size > 0 else whole + size)
    with pytest.raises(GGUFError, match=r"\.weight: needs \d+ bytes at offset \d+, the file has \d+ there"):
        Model.load(path)


def test_missing_padding_at_the_end_is_no_loss(tiny: Tiny, tmp_path: Path) -> None:
    """A file whose last tensor is whole but not padded has all its data."""
    source = tiny("llama", n_ff=100)
    path = rewrite(source, tmp_path / "x.gguf", alignment=4096)
    with GGUFFile(path) as file:
        end = max(info.offset + info.nbytes for info in file.tensors.values())
    assert end < path.stat().st_size
    os.truncate(path, end)
    with Model.load(path) as model, Model.load(source) as plain:
        assert np.array_equal(logits(plain), logits(model))


def test_a_mapped_file_may_be_replaced(tiny: Tiny, tmp_path: Path) -> None:
    """Renaming another file over it, as downloads do, changes nothing for a model that is open."""
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny("llama").read_bytes())
    with Model.load(path) as model:
        expected = logits(model)
        (tmp_path / "new").write_bytes(b"nothing")
        (tmp_path / "new").replace(path)
        assert np.array_equal(expected, logits(model))


# ------------------------------------------------------------------------------------------------------- use_mmap


def test_without_mmap_weights_are_read(tiny: Tiny) -> None:
    """Every weight lies outside the mapping, and computes the same bits."""
    with Model.load(tiny("llama"), use_mmap=False) as model, Model.load(tiny("llama")) as mapped:
        inside = mapping_range(model)
        assert 0 == model.weights.n_mapped
        assert not any(tensor.address in inside for tensor in model.weights.values())
        assert model.weights.nbytes_copied >= sum(info.nbytes for info in model._file.tensors.values())
        assert np.array_equal(logits(mapped), logits(model))


def test_without_mmap_cutting_the_file_short_does_no_harm(tiny: Tiny, tmp_path: Path) -> None:
    """The very thing that kills a process with mapped weights (SIGBUS)."""
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny("llama").read_bytes())
    script = """
import os, sys
from ggufpy import Model
model = Model.load(sys.argv[1], use_mmap=False)
session = model.session(n_threads=1)
os.truncate(sys.argv[1], 0)
print(session.decode([1, 2, 3]).shape)
"""
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
    assert (0, "(1, 64)\n", "") == (done.returncode, done.stdout, done.stderr)


def test_progress_counts_the_bytes_that_are_copied(tiny: Tiny) -> None:
    """Steps grow and end with the whole; where nothing is copied there is nothing to report."""
    steps: list[tuple[int, int]] = []
    Model.load(tiny("llama"), use_mmap=False, progress=lambda *step: steps.append(step)).close()
    with GGUFFile(tiny("llama")) as file:
        total = sum(info.nbytes for info in file.tensors.values())
    assert [total] * len(steps) == [of for _, of in steps]
    done = [n for n, _ in steps]
    assert sorted(done) == done
    assert total == done[-1]
    steps.clear()
    Model.load(tiny("llama"), progress=lambda *step: steps.append(step)).close()
    assert [] == steps


@linux_only
def test_an_exception_in_progress_stops_the_load(tiny: Tiny, tmp_path: Path) -> None:
    """It reaches the caller, and the file is not kept open."""
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny("llama").read_bytes())

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Model.load(path, use_mmap=False, progress=stop)
    gc.collect()
    assert [] == mapped_lines(path)


# --------------------------------------------------------------------------------------------------------- repacked

REPACKED = ["q4_0", "q4_k", "iq4_nl", "mxfp4", "q8_0"]


@pytest.mark.parametrize("type", REPACKED)
def test_repacking_changes_where_weights_lie_and_hardly_the_numbers(type: str, tiny: Tiny) -> None:
    """Matrices may go to an extra kind of memory; vectors and the table of embeddings stay where they are."""
    with Model.load(tiny("llama", type=type), repack=True) as model, Model.load(tiny("llama", type=type)) as mapped:
        packed = {name for name, tensor in model.weights.items() if tensor.buffer and tensor.buffer.packed}
        assert not {name for name in packed if "norm" in name}
        assert "token_embd.weight" not in packed
        assert model.weights["output.weight"] is not model.weights["token_embd.weight"]
        if type in ("q4_0", "q4_k") and "CPU_REPACK" in [kind.name for kind in extra_buffer_types(cpu_device())]:
            assert {"blk.0.attn_q.weight", "blk.2.ffn_down.weight"} <= packed
        for name in packed:
            with pytest.raises(GraphError, match="cannot be read back"):
                model.weights[name].get()
        expected, found = logits(mapped), logits(model)
        assert np.square(found - expected).mean() / np.square(expected).mean() < 1e-2


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("type", [*REPACKED, "f16", "f32"])
def test_repacked_bits_are_those_of_llama_cpps_default(type: str, name: str, tiny: Tiny) -> None:
    """The same kind of memory for each weight, so the same sums."""
    pytest.importorskip("llama_cpp")
    from reference.llama import ReferenceModel

    path = tiny(name, type=type)
    options = {"n_ctx": 256, "n_threads": 1}
    with ReferenceModel(path, repack=True) as theirs, theirs.session(**options) as session:
        expected = [session.decode(IDS, logits="all"), session.decode([7])]
    with Model.load(path, repack=True) as ours, ours.session(**options) as session:
        found = [session.decode(IDS, logits="all"), session.decode([7])]
    for a, b in zip(expected, found, strict=True):
        assert np.array_equal(a.view(np.uint32), b.view(np.uint32))


# --------------------------------------------------------------------------------------------------------- lifetime


@linux_only
def test_a_view_of_a_mapped_weight_keeps_the_mapping(tiny: Tiny, tmp_path: Path) -> None:
    """Closed model, no other reference, collected garbage: the view still shows the file's bytes; then all is gone."""
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny("llama").read_bytes())
    model = Model.load(path)
    view = model.weights["blk.1.attn_q.weight"].numpy_view()
    copy, raw = view.copy(), model._file.data("blk.1.attn_q.weight")
    assert not view.flags.writeable
    assert np.shares_memory(view, raw)
    model.close()
    del model, raw
    gc.collect()
    assert len(mapped_lines(path)) == 1
    assert np.array_equal(copy, view)
    del view
    gc.collect()
    assert [] == mapped_lines(path)


def test_weights_are_refused_after_close(tiny: Tiny) -> None:
    """A model that is closed has no weights; a tensor taken before still has its bytes."""
    model = Model.load(tiny("llama"))
    tensor = model.weights["output_norm.weight"]
    before = tensor.get()
    model.close()
    with pytest.raises(ClosedError, match="closed"):
        _ = model.weights
    assert np.array_equal(before, tensor.get())


def test_a_mapped_weight_cannot_be_written(tiny: Tiny) -> None:
    """The mapping is read-only: a write would kill the process, so it is refused."""
    with Model.load(tiny("llama")) as model:
        tensor = model.weights["output_norm.weight"]
        with pytest.raises(GraphError, match="cannot be written"):
            tensor.set(np.zeros(128, np.float32))
        with pytest.raises(GraphError, match="cannot be written"):
            tensor.numpy_view(writable=True)


# ------------------------------------------------------------------------------------------------ layers on devices

no_gpu = pytest.mark.skipif(any(d.type == "gpu" for d in devices()), reason="there is a GPU")


@no_gpu
def test_layers_for_a_gpu_that_is_not_there_are_refused(tiny: Tiny) -> None:
    """The error names the setting and says how to see and get a GPU."""
    with pytest.raises(BackendError, match=r"n_gpu_layers=1: there is no GPU.*devices\(\)"):
        Model.load(tiny("llama"), n_gpu_layers=1)
    with Model.load(tiny("llama"), n_gpu_layers=0) as model:
        assert [cpu_device()] == model.devices


@pytest.mark.parametrize("value", [-1, 1.5, "all", True, [1], "", []])
def test_numbers_of_layers_are_integers(value: Any, tiny: Tiny) -> None:
    """None means all; nothing else that is no count does."""
    with pytest.raises(ValueError, match="n_gpu_layers: expected None"):
        Model.load(tiny("llama"), n_gpu_layers=value)


def layout(n_gpu_layers: int | None, *gpus: str) -> Layout:
    """Deal out four layers; the devices' names will do."""
    return Layout.of(4, "cpu", gpus, n_gpu_layers)  # type: ignore[arg-type]


def test_layers_are_dealt_from_the_end() -> None:
    """The output counts as the last layer, GPUs get equal runs, and None offloads whatever can be."""
    assert (("cpu", "cpu", "gpu", "gpu"), "gpu") == (layout(3, "gpu").layers, layout(3, "gpu").output)
    assert (("cpu",) * 4, "gpu") == (layout(1, "gpu").layers, layout(1, "gpu").output)
    assert (("gpu",) * 4, "gpu") == (layout(None, "gpu").layers, layout(99, "gpu").output)
    assert (("cpu",) * 4, "cpu") == (layout(0, "gpu").layers, layout(None).output)
    assert (("a", "a", "a", "b"), "b") == (layout(None, "a", "b").layers, layout(None, "a", "b").output)
    assert ["a", "b", "cpu"] == layout(None, "a", "b").devices


def test_a_tensor_goes_with_its_layer() -> None:
    """Embeddings stay on the CPU, as in llama.cpp; the output matrix and its norm follow the output."""
    two = layout(3, "gpu")
    places = {
        name: two.of_tensor(f"{name}.weight") for name in ("blk.1.attn_q", "blk.2.attn_q", "output", "output_norm")
    }
    assert {"blk.1.attn_q": "cpu", "blk.2.attn_q": "gpu", "output": "gpu", "output_norm": "gpu"} == places
    assert "cpu" == two.of_tensor("token_embd.weight") == two.of_tensor("per_layer_token_embd.weight")
    assert "cpu" == two.of_tensor("per_layer_model_proj.weight")  # as the first layer
    assert "gpu" == layout(None, "gpu").of_tensor("per_layer_model_proj.weight")
    assert "gpu" == two.of_tensor("altup_unembd_proj.weight")


def test_entry_points_refuse_what_is_no_path() -> None:
    """A number is no file; a missing file and a folder are the system's errors."""
    with pytest.raises(TypeError):
        Model.load(5)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        Model.load("nowhere.gguf")
    with pytest.raises(OSError, match="directory"):
        Model.load(Path(__file__).parent)


def test_surplus_data_behind_the_tensors_is_ignored(tiny: Tiny, tmp_path: Path) -> None:
    """Trailing junk is not ours to judge."""
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny("llama").read_bytes() + bytes(400))
    with Model.load(path) as model, Model.load(tiny("llama")) as plain:
        assert np.array_equal(logits(plain), logits(model))
