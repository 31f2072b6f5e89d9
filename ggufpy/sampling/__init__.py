"""Choosing the next token: the parameters, pure functions on one row of logits, and the chain of them.

Owns the meaning, the order and the limits of every sampling parameter. The order and the arithmetic are those of
llama.cpp's chain (`common/sampling.cpp`, `src/llama-sampler.cpp`): sums run in float32 and one after another where
llama.cpp's do, and the random numbers are its too, so a seed picks the tokens that llama.cpp picks with it.
Knows nothing of models, text or sessions: what a tokenizer has to say comes as ids.

    params.py   SamplingParams: names, defaults, checks          dry.py       DRY, and its sequence breakers
    rows.py     row → row: biases, bans, masks, penalties        targets.py   mirostat and adaptive-p, with a state
    filters.py  candidates → candidates: top_k … temperature     logprobs.py  what a chosen token's probability was
    draws.py    std::mt19937 and what is drawn from it           native.py    the loops of these that are C
    chain.py    Sampler, which puts them together
"""

from ggufpy.sampling.chain import Sampler
from ggufpy.sampling.draws import Random, draw, pick
from ggufpy.sampling.dry import Breakers, dry, sequence_breakers
from ggufpy.sampling.filters import (
    Candidates,
    Floats,
    Ids,
    candidates,
    dynamic_temperature,
    in_order,
    min_p,
    probabilities,
    temperature,
    top_k,
    top_n_sigma,
    top_p,
    typical_p,
    xtc,
)
from ggufpy.sampling.logprobs import TokenLogprob, token_logprob
from ggufpy.sampling.params import LogitsProcessor, SamplingParams
from ggufpy.sampling.rows import add_bias, allow, ban, best_token, penalties, process, repeat_penalty
from ggufpy.sampling.targets import AdaptiveP, Mirostat, MirostatV2

__all__ = [
    "AdaptiveP",
    "Breakers",
    "Candidates",
    "Floats",
    "Ids",
    "LogitsProcessor",
    "Mirostat",
    "MirostatV2",
    "Random",
    "Sampler",
    "SamplingParams",
    "TokenLogprob",
    "add_bias",
    "allow",
    "ban",
    "best_token",
    "candidates",
    "draw",
    "dry",
    "dynamic_temperature",
    "in_order",
    "min_p",
    "penalties",
    "pick",
    "probabilities",
    "process",
    "repeat_penalty",
    "sequence_breakers",
    "temperature",
    "token_logprob",
    "top_k",
    "top_n_sigma",
    "top_p",
    "typical_p",
    "xtc",
]
