"""Hold ggufpy's logits against llama.cpp's, which were computed once and kept in a file.

Usage: python examples/compare_logits.py MODEL DUMP; dumps that llama.cpp's own tools write work too.
"""

import sys

from ggufpy import Model
from ggufpy.reference import compare_model, read_dump

if len(sys.argv) != 3:
    sys.exit(__doc__)
path, dump_path = sys.argv[1:]
dump = read_dump(dump_path)
with Model.load(path) as model:
    result = compare_model(model, dump)
print(f"{result.identical_rows} of {result.n_rows} rows are identical to the last bit")
print(f"largest difference {result.max_abs_diff:g}, NMSE {result.nmse:g}")
print(f"same likeliest token in {result.top1_agreement:.1%} of the rows")
