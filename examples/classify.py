"""Classify texts by the log-probabilities of their labels: no training, no sampling, all texts in one call.

Usage: python examples/classify.py [NAME_OR_PATH]
"""

import math
import sys
from itertools import product
from pathlib import Path

import ggufpy

LABELS = [" positive", " negative"]
REVIEWS = ["A wonderful film, I laughed and cried.", "Dull, slow and far too long.", "The best dinner of my life."]
EXAMPLES = "Review: I loved every minute.\nSentiment: positive\n\nReview: A waste of money.\nSentiment: negative\n\n"

prompts = [f"{EXAMPLES}Review: {review}\nSentiment:" for review in REVIEWS]
name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
load = ggufpy.Model.load if Path(name).exists() else ggufpy.Model.from_pretrained
with load(name) as model:
    pairs = list(product(prompts, LABELS))  # what prompts share is computed once, and a prompt once for all labels
    scores = iter(model.score([prompt for prompt, _ in pairs], [label for _, label in pairs]))
    for review in REVIEWS:
        shares = {label: math.exp(next(scores).sum) for label in LABELS}
        best = max(shares, key=shares.get)
        print(f"{shares[best] / sum(shares.values()):4.0%}{best}: {review}")
