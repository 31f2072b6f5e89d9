"""The llama graph, node by node, for people who want to understand it: no cache, no session, one prompt.

Shapes are in ggml order, the contiguous dimension first. The real thing, with a cache and every option, is
ggufpy/arch/decoder.py. Usage: python examples/llama_by_hand.py [FILE of architecture llama]
"""

import math
import sys

import numpy as np

from ggufpy import GGUFFile, Tokenizer, hub
from ggufpy.backend import Backend, Buffer, Scheduler, cpu_device
from ggufpy.gguf import GGMLType
from ggufpy.graph import Context, Tensor

F32, I32 = GGMLType.F32, GGMLType.I32

file = GGUFFile(sys.argv[1] if len(sys.argv) > 1 else hub.fetch("smollm2-135m-instruct"))
n_layer, n_embd, n_head, n_head_kv = (
    file.metadata[f"llama.{key}"]
    for key in ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv")
)
eps = file.metadata["llama.attention.layer_norm_rms_epsilon"]
freq_base = file.metadata["llama.rope.freq_base"]
d_head = n_embd // n_head

# The weights: tensors without data of their own, bound to addresses inside the mapped file. Nothing is copied.
weights_context = Context(len(file.tensors))
mapping = Buffer.from_host(cpu_device(), file.shards[0].mapping)
weights: dict[str, Tensor] = {}
for info in file.tensors.values():
    weights[info.name] = weights_context.new_tensor(info.type, *info.shape[::-1], name=info.name)
    mapping.bind(weights[info.name], mapping.base + info.offset)

scheduler = Scheduler([Backend(cpu_device())], n_nodes=2048)


def logits(ids: list[int]) -> np.ndarray:
    """Compute the logits after the last of these tokens."""
    g, n = Context(4096), len(ids)
    graph = g.new_graph()
    tokens = g.input(I32, n, name="tokens")
    positions = g.input(I32, n, name="positions")
    last = g.input(I32, 1, name="last")
    mask = g.input(F32, n, n, name="mask")

    def norm(x: Tensor, name: str) -> Tensor:
        return g.mul(g.rms_norm(x, eps), weights[name])

    def rope(x: Tensor) -> Tensor:
        return g.rope_ext(x, positions, None, d_head, 0, 0, freq_base, 1.0, 0.0, 1.0, 32.0, 1.0)

    def heads(x: Tensor, name: str, n_heads: int) -> Tensor:
        return g.reshape_3d(g.mul_mat(weights[name], x), d_head, n_heads, n)  # [d_head, n_heads, n]

    x = g.get_rows(weights["token_embd.weight"], tokens)  # [n_embd, n]
    for il in range(n_layer):
        blk = f"blk.{il}"

        # Attention: every token looks at those before it and takes a weighted mean of what they offer.
        cur = norm(x, f"{blk}.attn_norm.weight")
        q = rope(heads(cur, f"{blk}.attn_q.weight", n_head))
        k = rope(heads(cur, f"{blk}.attn_k.weight", n_head_kv))
        v = heads(cur, f"{blk}.attn_v.weight", n_head_kv)
        q, k = g.permute(q, 0, 2, 1, 3), g.permute(k, 0, 2, 1, 3)  # [d_head, n, n_heads]
        v = g.cont(g.permute(v, 1, 2, 0, 3))  # [n, d_head, n_head_kv]
        scores = g.mul_mat(k, q)  # [n, n, n_head]; a key head serves several query heads
        scores = g.soft_max_ext(scores, mask, 1 / math.sqrt(d_head), 0.0)
        cur = g.mul_mat(v, scores)  # [d_head, n, n_head]
        cur = g.cont_2d(g.permute(cur, 0, 2, 1, 3), n_embd, n)
        x = g.add(g.mul_mat(weights[f"{blk}.attn_output.weight"], cur), x)

        # FFN: each token for itself, with a gate.
        cur = norm(x, f"{blk}.ffn_norm.weight")
        gate = g.mul_mat(weights[f"{blk}.ffn_gate.weight"], cur)  # [n_ff, n]
        up = g.mul_mat(weights[f"{blk}.ffn_up.weight"], cur)
        x = g.add(g.mul_mat(weights[f"{blk}.ffn_down.weight"], g.swiglu_split(gate, up)), x)

    x = norm(g.get_rows(x, last), "output_norm.weight")  # [n_embd, 1]
    head = weights.get("output.weight", weights["token_embd.weight"])
    out = g.output(g.mul_mat(head, x), "logits")  # [n_vocab, 1]
    graph.expand(out)

    scheduler.alloc(graph)
    tokens.set(np.array(ids, np.int32))
    positions.set(np.arange(n, dtype=np.int32))
    last.set(np.array([n - 1], np.int32))
    mask.set(np.where(np.tri(n, dtype=bool), 0, -np.inf).astype(np.float32))
    scheduler.compute(graph)
    return out.get()


tokenizer = Tokenizer.from_metadata(file.metadata)
ids = tokenizer.encode("The capital of France is")
for _ in range(8):
    ids.append(int(logits(ids).argmax()))
print(tokenizer.decode(ids))
