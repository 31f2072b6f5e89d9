"""The weights of a model: ggml tensors that point into the mapped file, or copies where they have to be.

This file owns where each weight lies: in the file's mapping (the default on the CPU, nothing is read), in plain memory,
in one of ggml's extra buffer types (`repack=True`), or on another device. It knows tensor tables, not graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ggufpy.arch import TensorSpec
from ggufpy.backend import Buffer, BufferType, Device, weight_buffer_type
from ggufpy.errors import BackendError
from ggufpy.gguf import GGUFFile, TensorInfo
from ggufpy.graph import Context, Tensor

__all__ = ["Layout", "Progress", "Weights"]

Progress = Callable[[int, int], None]
"""Called with the bytes loaded so far and the bytes there are to load."""

ALIGNMENT = 32
"""ggml's CPU kernels want each tensor to start at a multiple of this many bytes (TENSOR_ALIGNMENT)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which device computes which layer. The last `n_gpu_layers` of them, the output counted as one, go to the GPUs."""

    cpu: Device
    layers: tuple[Device, ...]
    output: Device

    @classmethod
    def of(cls, n_layer: int, cpu: Device, gpus: Sequence[Device], n_gpu_layers: int | None) -> Layout:
        """Deal the layers out to the GPUs in equal runs; None offloads all of them where there is a GPU."""
        wanted = n_gpu_layers if n_gpu_layers is not None else n_layer + 1 if gpus else 0
        if not isinstance(wanted, int) or isinstance(n_gpu_layers, bool) or wanted < 0:
            raise ValueError(f"n_gpu_layers: expected None (all) or an integer of at least 0, got {n_gpu_layers!r:.60}")
        if wanted and not gpus:
            raise BackendError(
                f"n_gpu_layers={n_gpu_layers}: there is no GPU that ggml can use here (see ggufpy.devices(); "
                "GPU support is built in with `CUDA=on python -m pip install --force-reinstall --no-cache-dir ggufpy`)"
            )
        wanted = min(wanted, n_layer + 1)
        first = n_layer + 1 - wanted
        dealt = [cpu if i < first else gpus[(i - first) * len(gpus) // wanted] for i in range(n_layer + 1)]
        return cls(cpu, tuple(dealt[:-1]), dealt[-1])

    @property
    def devices(self) -> list[Device]:
        """List the devices in use, the CPU last."""
        used = dict.fromkeys(d for d in (*self.layers, self.output) if d != self.cpu)
        return [*used, self.cpu]

    def of_tensor(self, name: str) -> Device:
        """Return the device that holds a tensor; the token embeddings stay on the CPU, as in llama.cpp."""
        if name.startswith("blk."):
            return self.layers[int(name.split(".")[1])]
        if name.startswith(("per_layer_model_proj", "per_layer_proj_norm")):
            return self.layers[0]
        return self.output if name.startswith(("output", "altup")) else self.cpu


class Weights(Mapping[str, Tensor]):
    """Named tensors with their data. What they need is freed with the last reference to them."""

    def __init__(self, tensors: dict[str, Tensor], buffers: list[Buffer], n_mapped: int) -> None:
        self._tensors = tensors
        self._buffers = buffers
        self.n_mapped = n_mapped

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def n_repacked(self) -> int:
        """Return how many tensors kernels have in a layout of their own; ggml has none for some types."""
        return sum(t.buffer is not None and t.buffer.packed for t in self._tensors.values())

    @property
    def nbytes_copied(self) -> int:
        """Return how many bytes lie outside the file's mapping."""
        return sum(buffer.size for buffer in self._buffers if not buffer.is_mapped)

    @classmethod
    def load(
        cls,
        file: GGUFFile,
        table: Iterable[TensorSpec],
        layout: Layout,
        *,
        stand_ins: Mapping[str, str] | None = None,
        use_mmap: bool = True,
        repack: bool = False,
        progress: Progress | None = None,
    ) -> Weights:
        """Bind or copy every tensor of the table that the file has; `stand_ins` name what is used for one it lacks.

        The file agrees with the table (`arch.check_tensors`). Raises BackendError where memory runs out.
        """
        specs = [spec for spec in table if spec.name in file.tensors and not spec.unused]
        context = Context(len(specs) + 1)
        mapped: list[_Source] = []
        copied: dict[BufferType, list[_Source]] = {}
        tensors: dict[str, Tensor] = {}

        def add(name: str, info: TensorInfo, *, indexed: bool = False) -> None:
            device = layout.of_tensor(name)
            tensors[name] = tensor = context.new_tensor(info.type, *info.shape[::-1], name=info.name)
            where = device.buffer_type
            if repack and len(info.shape) > 1 and not indexed:
                where = weight_buffer_type(device, tensor, experts="_exps." in name)
            plain = device == layout.cpu and where == device.buffer_type
            if use_mmap and plain and info.offset % ALIGNMENT == 0:
                mapped.append(_Source(tensor, info))
            else:
                copied.setdefault(where, []).append(_Source(tensor, info))

        for spec in specs:
            add(spec.name, file.tensors[spec.name], indexed=spec.indexed)
        for name, other in (stand_ins or {}).items():
            if name not in tensors:
                _stand_in(name, file.tensors[other], tensors, layout, repack, add)
        buffers = _map(file, layout.cpu, mapped)
        total = sum(source.info.nbytes for sources in copied.values() for source in sources)
        done = 0
        for where, sources in copied.items():
            buffers.append(_allocate(where, sources))
            for source in sources:
                source.tensor.set_bytes(file.data(source.info.name))
                done += source.info.nbytes
                if progress:
                    progress(done, total)
        return cls(tensors, buffers, len(mapped))


@dataclass(frozen=True, slots=True)
class _Source:
    tensor: Tensor
    info: TensorInfo


def _stand_in(
    name: str, info: TensorInfo, tensors: dict[str, Tensor], layout: Layout, repack: bool, add: Callable[..., None]
) -> None:
    """Use a tensor in another's place, too: the same one, or a copy where that has to lie elsewhere."""
    if repack or layout.output != layout.cpu:
        add(name, info, indexed=name == "token_embd.weight")
    else:
        tensors[name] = tensors[info.name]


def _map(file: GGUFFile, cpu: Device, sources: list[_Source]) -> list[Buffer]:
    """Wrap each part of the file once and point its tensors into it."""
    buffers = []
    for number, shard in enumerate(file.shards):
        mine = [source for source in sources if source.info.shard == number]
        if mine:
            buffer = Buffer.from_host(cpu, shard.mapping)
            for source in mine:
                buffer.bind(source.tensor, buffer.base + source.info.offset)
            buffer.set_usage_weights()
            buffers.append(buffer)
    return buffers


def _allocate(where: BufferType, sources: list[_Source]) -> Buffer:
    """Make one buffer for tensors and place them in it."""
    buffer = Buffer.for_tensors(where, [source.tensor for source in sources])
    buffer.set_usage_weights()
    return buffer
