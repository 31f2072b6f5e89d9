"""Generate text: all at once, then as a stream. Usage: python examples/generate.py [NAME_OR_PATH]"""

import sys
from pathlib import Path

import ggufpy

name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
load = ggufpy.Model.load if Path(name).exists() else ggufpy.Model.from_pretrained

with load(name) as model:
    answer = model.generate("The capital of France is", max_tokens=16, temperature=0)
    print(answer.text)
    print(answer.finish_reason, answer.usage, f"{answer.timings.decode_tokens_per_s:.0f} tokens/s", file=sys.stderr)

    for chunk in model.stream_generate("Once upon a time", max_tokens=32, temperature=0.7, seed=1):
        print(chunk.text, end="", flush=True)
    print()
