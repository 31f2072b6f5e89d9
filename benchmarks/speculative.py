"""Measures what guessing ahead gains: benchmarks/speculative.py MODEL…, each task with and without, pair by pair.

The tasks repeat their prompt more or less: a file with a name changed, a summary, and a story that repeats nothing,
where guessing must not cost much. Prompts are plain text, for models that have learnt no chat too. Reported are the
ratio of the speeds after the first token (median over the rounds), how many guesses were right, and whether the text
was the same. `--rows` measures what a step costs by the number of tokens it computes, which decides how long a guess
has to be. Absolute times are never judged.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from harness import environment, markdown

from ggufpy import Completion, DraftModel, Model, PromptLookup

CODE = '''class Inventory:
    """Keep counts of parts by name."""

    def __init__(self):
        self.parts = {}

    def add(self, name, count):
        if count < 0:
            raise ValueError("count must not be negative")
        self.parts[name] = self.parts.get(name, 0) + count

    def remove(self, name, count):
        if self.parts.get(name, 0) < count:
            raise ValueError("not enough parts")
        self.parts[name] -= count
        if self.parts[name] == 0:
            del self.parts[name]

    def total(self):
        return sum(self.parts.values())

    def report(self):
        for name, count in sorted(self.parts.items()):
            print(name, count)
'''
TEXT = (
    "The harbour of Aldersund was built in 1887 to serve the herring fleet. At its height more than two hundred boats "
    "landed their catch there each week, and the salting houses along the quay employed half of the town. When the "
    "herring left the coast in the 1930s the fleet shrank to a dozen boats, and most of the salting houses were pulled "
    "down. Two of them still stand: one is a museum of the fishery, the other a restaurant. Since 2004 the harbour has "
    "served a ferry to the outer islands, which carries about ninety thousand passengers a year."
)
TASKS = {
    "edit code": f"The file inventory.py before the change:\n\n```python\n{CODE}```\n\nThe file inventory.py after the "
    'change, in which Inventory is named Store:\n\n```python\nclass Store:\n    """Keep counts of parts by name."""\n\n'
    "    def __init__(self):",
    "summarise": f"Text:\n{TEXT}\n\nSummary of the text, in its own words:\nThe harbour of Aldersund",
    "a story": "Once upon a time in a small village there lived",
}
N_TOKENS, N_PAST = 200, 300
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
HEAD = ("task", "model", "weights", "plain", "guessing", "guessing ÷ plain", "guessed", "right", "text")


def measure(model: Model, prompt: str, draft: Any, rounds: int) -> dict[str, Any]:
    """Answer a prompt with and without guesses by turns."""
    plain: list[Completion] = []
    drafted: list[Completion] = []
    with model.session(n_ctx=1024) as session:
        for index in range(rounds + 1):  # the first warms up
            for turn in range(2):
                session.clear()
                guess = (index + turn) % 2
                answer = model.generate(
                    prompt, session=session, temperature=0, max_tokens=N_TOKENS, draft=draft if guess else None
                )
                (drafted if guess else plain).append(answer)
    speeds = [[answer.timings.decode_tokens_per_s for answer in side[1:]] for side in (plain, drafted)]
    pairs = enumerate(zip(plain[0].token_ids, drafted[0].token_ids, strict=False))
    return {
        "plain": statistics.median(speeds[0]),
        "guessing": statistics.median(speeds[1]),
        "ratio": statistics.median(b / a for a, b in zip(*speeds, strict=True)),
        "guessed": drafted[0].usage.draft_tokens,
        "right": drafted[0].usage.accepted_tokens,
        "tokens": len(plain[0].token_ids),
        "same": plain[0].text == drafted[0].text,
        "differs at": next((i for i, (a, b) in pairs if a != b), None),
    }


def rows(model: Model, rounds: int) -> dict[int, float]:
    """Measure a step of so many tokens after 300, as a multiple of a step of one."""
    seconds: dict[int, list[float]] = {n: [] for n in ROWS}
    with model.session(n_ctx=1024) as session:
        ids = [1000 + 7919 * i % 40_000 for i in range(N_PAST)]
        session.decode(ids)
        for _ in range(rounds):
            for n in ROWS:
                for _ in range(4):
                    start = time.perf_counter()
                    session.decode(ids[:n], logits="all" if n > 1 else "last", copy=False)
                    took = time.perf_counter() - start
                    session.trim(0, N_PAST)
                seconds[n].append(took)  # of the last: the first builds the graph
    one = statistics.median(seconds[1])
    return {n: statistics.median(each) / one for n, each in seconds.items()}


def main() -> None:
    """Measure every model given and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="a GGUF file")
    parser.add_argument("--rounds", type=int, default=5, help="pairs measured for each task (5)")
    parser.add_argument("--mapped", action="store_true", help="leave the weights as the file has them")
    parser.add_argument("--draft", type=Path, help="a GGUF file to guess with, in place of the text so far")
    parser.add_argument("--tokens", type=int, help="the most tokens guessed at once")
    parser.add_argument("--rows", action="store_true", help="measure steps of 1 to 32 tokens too")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    arguments = parser.parse_args()
    weights = "mapped" if arguments.mapped else "repacked"
    options = {} if arguments.tokens is None else {"num_speculative_tokens": arguments.tokens}
    small = None if arguments.draft is None else Model.load(arguments.draft, repack=not arguments.mapped)
    draft = PromptLookup(**options) if small is None else DraftModel(small, **options)
    lines, steps = [], []
    for path in arguments.models:
        with Model.load(path, repack=not arguments.mapped) as model:
            for task, prompt in TASKS.items():
                found = measure(model, prompt, draft, arguments.rounds)
                lines.append({"task": task, "model": path.stem, "weights": weights, **found})
            if arguments.rows:
                steps.append({"model": path.stem, "weights": weights, **rows(model, arguments.rounds)})
    facts = {**environment(), "threads": len(os.sched_getaffinity(0)), "rounds": arguments.rounds}
    print(", ".join(f"{name} {value}" for name, value in facts.items()), end="\n\n")
    print(markdown(HEAD, [show(line) for line in lines]))
    if steps:
        shown = [[str(step["model"]), *(f"{step[n]:.2f}" for n in ROWS)] for step in steps]
        print("\n" + markdown(("tokens in a step", *map(str, ROWS)), shown))
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": facts, "rows": lines, "steps": steps}, indent=1))


def show(line: dict[str, Any]) -> list[str]:
    """Format one line of the table."""
    text = "same" if line["same"] else f"differs at {line['differs at']}"
    speeds = [f"{line[side]:.3g} t/s" for side in ("plain", "guessing")]
    counts = [str(line["guessed"]), str(line["right"])]
    return [line["task"], line["model"], line["weights"], *speeds, f"{line['ratio']:.2f}", *counts, text]


if __name__ == "__main__":
    main()
