"""Let lm-evaluation-harness measure a GGUF model: an adapter for its three kinds of requests.

Usage: python examples/lm_eval_adapter.py MODEL TASK…, with lm_eval installed. Without it the class works alike on
anything that has `args`, as the harness's requests have.
"""

import sys
from typing import Any

import ggufpy
from ggufpy.scoring import Score

try:
    from lm_eval.api.model import LM
except ImportError:
    LM = object


class GGUF(LM):
    """A model as lm_eval sees it: log-likelihoods of continuations and of whole texts, and greedy answers."""

    def __init__(self, model: ggufpy.Model, max_gen_toks: int = 256, **options: Any) -> None:
        super().__init__()
        self.model, self.max_gen_toks, self.options = model, max_gen_toks, options
        tokenizer = model.tokenizer
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.prefix = [] if first is None else [first]  # what stands before a text that begins with nothing

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Return (log-probability, whether greedy decoding would give it) of each (context, continuation)."""
        pairs = [request.args for request in requests]
        scores = self._score([context or self.prefix for context, _ in pairs], [text for _, text in pairs])
        return [(score.sum, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Return the log-probability of each text, in windows of the context's size, each token scored once."""
        size = self.options.get("n_ctx", self.model.config.n_ctx_train)
        found = []
        for request in requests:
            ids = self.prefix + self.model.tokenizer.encode(request.args[0], add_special=False)
            starts = range(0, max(1, len(ids) - 1), size - 1)
            windows = [ids[start : start + size] for start in starts]
            scores = self._score([window[:1] for window in windows], [window[1:] for window in windows])
            found.append(sum(score.sum for score in scores))
        return found

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return the answer to each (context, {"until": …, "max_gen_toks": …})."""
        answers = []
        for context, given in (request.args for request in requests):
            answer = self.model.generate(
                context,
                temperature=given.get("temperature", 0.0),
                stop=given.get("until") or (),
                max_tokens=given.get("max_gen_toks", self.max_gen_toks),
            )
            answers.append(answer.text)
        return answers

    def _score(self, prompts: list[Any], continuations: list[Any]) -> list[Score]:
        return self.model.score(prompts, continuations, **self.options)


if __name__ == "__main__":
    import lm_eval

    path, *tasks = sys.argv[1:]
    with ggufpy.Model.load(path, repack=True) as model:
        results = lm_eval.simple_evaluate(GGUF(model), tasks=tasks)
    print(lm_eval.utils.make_table(results))
