"""Look into a GGUF file: metadata, the mapped bytes of a quantized tensor, and its values as a NumPy array."""

from ggufpy import GGUFFile, hub

with GGUFFile(hub.fetch("smollm2-135m-instruct")) as file:
    print(file.metadata["general.name"], file.metadata["llama.block_count"], "layers")
    info = file.tensors["blk.0.attn_q.weight"]
    print(info.name, info.shape, info.type.name, f"{info.nbytes:,} bytes at {info.offset:,}")
    blocks = file.data(info.name)  # a read-only view of the file's mapping, nothing is copied
    values = file.dequantize(info.name)  # float32, computed by ggml
    print(blocks.shape, blocks.dtype, values.shape, f"mean {values.mean():+.5f}, deviation {values.std():.5f}")
