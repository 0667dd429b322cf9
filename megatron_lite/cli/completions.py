"""POST /v1/completions: the requests of OpenAI's completions, which clients and evaluation harnesses speak.

    {"model": "any", "prompt": "def ", "max_tokens": 1, "echo": true, "logprobs": 1}    how likely is a text?

A prompt may be a text, a list of texts, tokens, or a list of lists of tokens. Unknown fields are refused, as in /api.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.cli.sampling import Sampling
from megatron_lite.cli.text_engine import Job
from megatron_lite.cli.text_requests import (
    MAX_PROMPTS,
    TextRequest,
    by_text,
    check_fields,
    is_flag,
    is_number,
    is_text,
    is_whole,
)
from megatron_lite.errors import ConfigError


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(is_whole(token) and token >= 0 for token in value)


def _prompts(value: Any) -> list[str | list[int]] | None:
    """The prompts of the field `prompt`; None: it is none of what it may be."""
    if is_text(value) or _is_tokens(value):
        return [value]
    if (
        isinstance(value, list)
        and 0 < len(value) <= MAX_PROMPTS
        and (all(map(is_text, value)) or all(map(_is_tokens, value)))
    ):
        return value
    return None


def _stops(value: Any) -> tuple[str, ...] | None:
    texts = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(texts) if len(texts) <= 4 and all(is_text(text) and text for text in texts) else None


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (is_text, "a text; there is one model, whatever it says"),
    "user": (is_text, "a text, which nobody reads"),
    "prompt": (
        lambda v: _prompts(v) is not None,
        f"a text, tokens, or a list of 1 to {MAX_PROMPTS} of either",
    ),
    "max_tokens": (lambda v: v is None or (is_whole(v) and v >= 0), "a whole number, 0 or more"),
    "temperature": (lambda v: v is None or (is_number(v) and 0.0 <= v <= 100.0), "a number from 0 (greedy) to 100"),
    "top_p": (lambda v: v is None or (is_number(v) and 0.0 < v <= 1.0), "a number above 0 and at most 1 (all)"),
    "logprobs": (lambda v: v is None or (is_whole(v) and 0 <= v <= 100), "a whole number from 0 to 100"),
    "echo": (is_flag, "true or false"),
    "stop": (lambda v: _stops(v) is not None, "a text, or up to 4 texts"),
    "seed": (lambda v: v is None or (is_whole(v) and 0 <= v < 2**32), "a whole number from 0 to 2**32 - 1"),
}
NOT_HERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((None, 1), "the prompt several times"),
    "best_of": ((None, 1), "the prompt several times, with logprobs"),
    "stream": ((None, False), "stream: false"),
    "stream_options": ((None,), "leave it out"),
    "suffix": ((None, ""), "leave it out"),
    "presence_penalty": ((None, 0, 0.0), "0"),
    "frequency_penalty": ((None, 0, 0.0), "0"),
    "logit_bias": ((None, {}), "leave it out"),
}
_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Completion(TextRequest):
    """A TextRequest, and how it is answered. echo: the prompt is part of the text."""

    model: str = ""
    echo: bool = False


def read_completion(body: Any) -> Completion:
    """The request of a JSON body.

    Raises: ConfigError that says what is wrong with it.
    """
    check_fields(body, FIELDS, NOT_HERE)
    given = {name: value for name, value in body.items() if value is not None}
    prompts = _prompts(given.get("prompt"))
    if prompts is None:
        raise ConfigError("prompt is missing", why=f"it is {FIELDS['prompt'][1]}", fix='{"prompt": "..."}')
    request = Completion(
        prompts=prompts,
        tokens_to_generate=given.get("max_tokens", 16),
        sampling=Sampling(temperature=float(given.get("temperature", 1.0)), top_p=float(given.get("top_p", 1.0))),
        logprobs="logprobs" in given,
        top_n_logprobs=given.get("logprobs", 0),
        ends_of_text=_stops(given.get("stop")) or (),
        random_seed=given.get("seed"),
        model=given.get("model", ""),
        echo=given.get("echo", False),
    )
    if request.tokens_to_generate == 0 and not request.echo:
        raise ConfigError("max_tokens: 0 without echo", why="nothing is left to answer", fix='"echo": true')
    return request


def completion_of(request: TextRequest, jobs: Sequence[Job], tokenizer: Any) -> dict[str, Any]:
    """What is answered when the jobs of a request are done."""
    assert isinstance(request, Completion)
    prompt_tokens, answered = sum(len(job.prompt) for job in jobs), sum(len(job.answer) for job in jobs)
    return {
        "id": f"cmpl-{next(_numbers)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [_choice(request, number, job, tokenizer) for number, job in enumerate(jobs)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answered,
            "total_tokens": prompt_tokens + answered,
        },
    }


def _choice(request: Completion, number: int, job: Job, tokenizer: Any) -> dict[str, Any]:
    prompt, answer = list(job.prompt), job.answer
    kept = answer[:-1] if answer and answer[-1] == tokenizer.eod else answer
    before = tokenizer.detokenize(prompt)
    text = tokenizer.detokenize(prompt + kept)[len(before) :]
    at = min((text.find(stop) for stop in request.ends_of_text if stop in text), default=None)
    ended = at is not None or len(kept) < len(answer) or len(answer) < job.limit
    choice = {
        "index": number,
        "text": (before if request.echo else "") + (text if at is None else text[:at]),
        "finish_reason": "stop" if ended else "length",
        "logprobs": None,
    }
    if request.logprobs:
        first = 0 if request.echo else len(prompt)
        tokens = [tokenizer.detokenize([token]) for token in job.ids]
        offsets = [0, *itertools.accumulate(map(len, tokens[first:]))][: len(tokens) - first]
        choice["logprobs"] = {
            "tokens": tokens[first:],
            "token_logprobs": [None, *job.logprobs][first:],  # the first token follows nothing
            "top_logprobs": [None, *(by_text(place, tokenizer) for place in job.top)][first:] if job.num_top else None,
            "text_offset": offsets,
        }
    return choice
