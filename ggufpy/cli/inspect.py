"""`ggufpy inspect`: what is in a GGUF file, for people and as JSON. Needs neither the compiled part nor NumPy."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from ggufpy.cli.loading import find
from ggufpy.cli.terminal import count, size, table, visible
from ggufpy.gguf import GGMLType, GGUFArray, GGUFFile, TensorInfo

__all__ = ["run"]

SHOWN_ITEMS, SHOWN_CHARACTERS, JSON_ITEMS = 6, 72, 64


def run(args: Namespace) -> int:
    """Print the description of `args.file`."""
    with GGUFFile(find(args.file)) as file:
        if args.json:
            print(json.dumps(_describe(file, full=args.arrays), indent=2, allow_nan=False))
        else:
            print("\n".join(_lines(file, full=args.arrays)))
    return 0


def _lines(file: GGUFFile, *, full: bool) -> list[str]:
    nbytes = sum(shard.size for shard in file.shards)
    shards = f", {len(file.shards)} files" if len(file.shards) > 1 else ""
    elements = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    metadata = [(visible(key), _type(file, key), _value(value, full)) for key, value in file.metadata.items()]
    types = [
        (_name(kind), str(n), f"{total:,}", f"{used * 8 / max(total, 1):.2f}", size(used))
        for kind, (n, total, used) in _by_type(file).items()
    ]
    tensors = [
        (visible(tensor.name), _name(tensor.type), _shape(tensor), f"{math.prod(tensor.shape):,}", size(tensor.nbytes))
        for tensor in file.tensors.values()
    ]
    lines = [
        f"{visible(str(file.path))}: GGUF version {file.version}, {size(nbytes)}{shards}, alignment {file.alignment}"
    ]
    lines += [f"{count(elements)} parameters in {len(tensors)} tensors", "", f"metadata ({len(metadata)})"]
    lines += [table(metadata, indent="  ")] if metadata else []
    lines += ["", f"types ({len(types)})"]
    lines += (
        [table([("type", "tensors", "elements", "bits each", "size"), *types], right=(1, 2, 3, 4), indent="  ")]
        if types
        else []
    )
    lines += ["", f"tensors ({len(tensors)})"]
    head = ("name", "type", "shape", "elements", "size")
    lines += [table([head, *tensors], right=(3, 4), indent="  ")] if tensors else []
    return lines


def _describe(file: GGUFFile, *, full: bool) -> dict[str, Any]:
    return {
        "path": str(file.path),
        "version": file.version,
        "alignment": file.alignment,
        "shards": [{"path": str(shard.path), "size": shard.size} for shard in file.shards],
        "metadata": {key: _json_entry(file, key, value, full) for key, value in file.metadata.items()},
        "types": {
            _name(kind): {"tensors": n, "elements": total, "nbytes": used}
            for kind, (n, total, used) in _by_type(file).items()
        },
        "tensors": [
            {
                "name": tensor.name,
                "type": _name(tensor.type),
                "shape": tensor.shape,
                "shard": tensor.shard,
                "offset": tensor.offset,
                "nbytes": tensor.nbytes,
            }
            for tensor in file.tensors.values()
        ],
    }


def _by_type(file: GGUFFile) -> dict[GGMLType | int, tuple[int, int, int]]:
    """Return, for each tensor type, how many tensors, elements and bytes the file has; the largest first."""
    found: dict[GGMLType | int, tuple[int, int, int]] = {}
    for tensor in file.tensors.values():
        n, elements, nbytes = found.get(tensor.type, (0, 0, 0))
        found[tensor.type] = (n + 1, elements + math.prod(tensor.shape), nbytes + tensor.nbytes)
    return dict(sorted(found.items(), key=lambda entry: -entry[1][2]))


def _name(kind: GGMLType | int) -> str:
    return kind.name if isinstance(kind, GGMLType) else f"type {kind}"


def _shape(tensor: TensorInfo) -> str:
    return " x ".join(map(str, tensor.shape))


def _type(file: GGUFFile, key: str) -> str:
    value = file.metadata[key]
    return f"{value.type}[{len(value)}]" if isinstance(value, GGUFArray) else str(file.metadata_types[key])


def _value(value: Any, full: bool) -> str:
    if isinstance(value, GGUFArray):
        shown = value if full else value[:SHOWN_ITEMS]
        more = len(value) - len(shown)
        return f"[{', '.join(_item(item, full) for item in shown)}{f', … {more:,} more' if more else ''}]"
    return _shorten(visible(value), full) if isinstance(value, str) else _number(value)


def _item(item: Any, full: bool) -> str:
    if isinstance(item, GGUFArray):
        return _value(item, full)
    return f'"{_shorten(visible(item), full)}"' if isinstance(item, str) else _number(item)


def _shorten(text: str, full: bool) -> str:
    if full or len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]} … {len(text) - SHOWN_CHARACTERS:,} more"


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _json_entry(file: GGUFFile, key: str, value: Any, full: bool) -> dict[str, Any]:
    if not isinstance(value, GGUFArray):
        return {"type": file.metadata_types[key], "value": _json_value(value)}
    entry = {"type": file.metadata_types[key], "count": len(value)}
    if full or len(value) <= JSON_ITEMS:
        return {**entry, "value": _json_value(value)}
    return {**entry, "first": _json_value(value[:SHOWN_ITEMS])}


def _json_value(value: Any) -> Any:
    """Return a value that JSON can hold; what it has no number for (nan, inf) becomes a string."""
    if isinstance(value, (GGUFArray, list)):
        return [_json_value(item) for item in _items(value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _items(value: GGUFArray | list[Any]) -> Sequence[Any]:
    return value.tolist() if isinstance(value, GGUFArray) else value
