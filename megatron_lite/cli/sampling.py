"""From a model's logits to the next token: temperature, top-k, top-p. Pure functions.

logits / temperature --> keep the k largest --> keep the likeliest whose probabilities reach p --> draw
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: divides the logits; 0: always the likeliest token.
        top_k: draw among the k likeliest; 0: among all.
        top_p: draw among the likeliest tokens that together reach this probability; 0 or 1: among all.
    Raises: ConfigError for values outside these ranges.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"--temperature {self.temperature}", why="it divides the logits", fix="0 (greedy) or more, such as 0.8"
            )
        if self.top_k < 0:
            raise ConfigError(f"--top_k {self.top_k}", why="it is a number of tokens", fix="0 (no limit) or more")
        if not 0.0 <= self.top_p <= 1.0:
            raise ConfigError(f"--top_p {self.top_p}", why="it is a probability", fix="from 0 (no limit) to 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """`[v]`, all but the k largest at -inf. Ties with the k-th are broken by `topk`, so that exactly k remain."""
    values, indices = logits.topk(min(k, logits.numel()))
    return torch.full_like(logits, float("-inf")).scatter(0, indices, values)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """`[v]`, all at -inf but the smallest set of likeliest tokens whose probabilities sum to at least p.

    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration".
    """
    ordered, indices = logits.sort(descending=True)
    probabilities = ordered.softmax(0)
    before = probabilities.cumsum(0) - probabilities  # of all likelier tokens: the first always stays
    return torch.full_like(logits, float("-inf")).scatter(0, indices, ordered.masked_fill(before >= p, float("-inf")))


def next_token_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """`[v]` -> `[v]` fp32, what `next_token` draws from; one-hot when greedy."""
    logits = logits.float()
    if sampling.is_greedy:
        return torch.zeros_like(logits).scatter(0, logits.argmax(0, keepdim=True), 1.0)
    # From the largest one, and by no less than fp32 can hold: a tiny temperature makes -inf of the others, never NaN.
    logits = (logits - logits.max()) / max(sampling.temperature, torch.finfo(torch.float32).tiny)
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if 0.0 < sampling.top_p < 1.0:
        logits = keep_top_p(logits, sampling.top_p)
    return logits.softmax(0)


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token's id.

    Args:
        logits: `[v]`, real tokens only: padding of the vocabulary must be cut off before.
        generator: on the CPU; it advances by one draw unless the choice is greedy.
    """
    if sampling.is_greedy:
        return int(logits.float().argmax())
    return int(torch.multinomial(next_token_probabilities(logits.cpu(), sampling), 1, generator=generator))


def sampling_of(args: Namespace) -> Sampling:
    """How tokens are chosen. Raises: ConfigError for numbers that mean nothing."""
    temperature = 1.0 if args.temperature is None else args.temperature
    return Sampling(temperature=0.0 if args.greedy else temperature, top_k=args.top_k, top_p=args.top_p)
