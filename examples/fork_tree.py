"""Grow a tree of continuations: the beginning is computed once, each branch is a copy of its parent's cache.

Usage: python examples/fork_tree.py [NAME_OR_PATH]
"""

import sys
from pathlib import Path

import ggufpy

name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
load = ggufpy.Model.load if Path(name).exists() else ggufpy.Model.from_pretrained
BRANCHES, DEPTH, N_TOKENS = 2, 3, 8

with load(name) as model, model.session(n_ctx=8 * 256, n_seq_max=BRANCHES**DEPTH) as session:
    decode = model.tokenizer.decode
    tree = [model.tokenizer.encode("Once upon a time")]
    rows = list(session.decode(tree[0]))
    for _ in range(DEPTH):
        grown = []
        for i, ids in enumerate(tree):  # branch i keeps sequence i, its other children get copies of it
            best = rows[i].argsort()[::-1][:BRANCHES].tolist()
            grown += [(i + j * len(tree), i, [*ids, token]) for j, token in enumerate(best)]
        for child, parent, _ in grown:
            session.fork(parent, child)
        tree = [ids for _, _, ids in sorted(grown)]
        for _ in range(N_TOKENS):
            batch = [(i, ids[-1:], "last") for i, ids in enumerate(tree)]
            rows = [row[0] for row in session.decode_batch(batch)]
            for ids, row in zip(tree, rows, strict=True):
                ids.append(int(row.argmax()))
        rows = [row[0] for row in session.decode_batch([(i, ids[-1:], "last") for i, ids in enumerate(tree)])]
    for ids in tree:
        print(repr(decode(ids)))
