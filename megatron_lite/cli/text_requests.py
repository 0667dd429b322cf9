"""What a client asks for: Megatron's JSON of PUT /api, read strictly.

    {"prompts": ["def ", "class "], "tokens_to_generate": 32, "temperature": 0.8, "top_p": 0.9, "random_seed": 7}

A field that is not known, has another type, or cannot be done here is an error that names it: an answer to another
question than the one that was asked is worth nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.cli.sampling import Sampling
from megatron_lite.cli.text_engine import Job
from megatron_lite.config import did_you_mean
from megatron_lite.errors import ConfigError

MAX_PROMPTS = 128


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A request whose fields are as they should be.

    Args:
        prompts: texts, or their tokens.
        ends_of_text: the answer ends with any of these texts.
        random_seed: None: the server's choice.
    """

    prompts: Sequence[str | list[int]]
    tokens_to_generate: int = 64
    sampling: Sampling = Sampling()
    logprobs: bool = False
    top_n_logprobs: int = 0
    add_BOS: bool = False
    ends_of_text: tuple[str, ...] = ()
    stop_token: int | None = None
    random_seed: int | None = None
    no_log: bool = False


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)  # halves of characters


def _is_prompts(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MAX_PROMPTS and all(map(is_text, value))


# Field -> (is a value right, what it is).
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompts": (_is_prompts, f"a list of 1 to {MAX_PROMPTS} texts"),
    "tokens_to_generate": (lambda v: is_whole(v) and v >= 0, "a whole number, 0 or more"),
    "temperature": (lambda v: is_number(v) and 0.0 <= v <= 100.0, "a number from 0 (greedy) to 100"),
    "top_k": (lambda v: is_whole(v) and 0 <= v <= 1000, "a whole number from 0 (all) to 1000; 1 is greedy"),
    "top_p": (lambda v: is_number(v) and 0.0 <= v <= 1.0, "a number from 0 (all) to 1"),
    "logprobs": (is_flag, "true or false"),
    "top_n_logprobs": (lambda v: is_whole(v) and 0 <= v <= 100, "a whole number from 0 to 100"),
    "add_BOS": (is_flag, "true or false"),
    "stop_on_eol": (is_flag, "true or false"),
    "stop_on_double_eol": (is_flag, "true or false"),
    "stop_token": (lambda v: is_whole(v) and v >= 0, "a token's number"),
    "random_seed": (
        lambda v: is_whole(v) and (v == -1 or 0 < v < 2**63),
        "a whole number above 0, or -1 for the server's",
    ),
    "no_log": (is_flag, "true or false"),
}
# Field -> (the values that ask for nothing, what to do instead).
NOT_HERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "beam_width": ((None, 0), "top_k, top_p and temperature: there is no beam search"),
    "length_penalty": ((None, 1, 1.0), "leave it out: there is no beam search"),
    "top_p_decay": ((None, 0, 0.0), "a constant top_p"),
    "top_p_bound": ((None, 0, 0.0), "a constant top_p"),
    "prevent_newline_after_colon": ((None, False), "leave it out"),
    "sentences": ((), "prompts"),
    "max_len": ((), "tokens_to_generate"),
}


def read_request(body: Any) -> TextRequest:
    """The request of a JSON body of /api.

    Raises: ConfigError that says what is wrong with it.
    """
    check_fields(body, FIELDS, NOT_HERE)
    given = {name: value for name, value in body.items() if name in FIELDS}
    if "prompts" not in given:
        raise ConfigError("prompts is missing", why=f"it is {FIELDS['prompts'][1]}", fix='{"prompts": ["..."]}')
    top_k, top_p = given.pop("top_k", 0), given.pop("top_p", 0.0)
    if top_k > 0 and top_p > 0.0:
        raise ConfigError(
            f"top_k: {top_k} with top_p: {top_p}",
            why="each says on its own which tokens are drawn from",
            fix="one of them",
        )
    sampling = Sampling(temperature=float(given.pop("temperature", 1.0)), top_k=top_k, top_p=float(top_p))
    if given.get("random_seed") == -1:
        del given["random_seed"]
    line, lines = given.pop("stop_on_eol", False), given.pop("stop_on_double_eol", False)
    request = TextRequest(sampling=sampling, ends_of_text=("\n",) if line else ("\n\n",) if lines else (), **given)
    if request.tokens_to_generate == 0 and not (request.logprobs or request.top_n_logprobs):
        raise ConfigError(
            "tokens_to_generate: 0 without logprobs",
            why="nothing is left to answer",
            fix='"logprobs": true, which judges the prompts, or more tokens',
        )
    return request


def answer_of(request: TextRequest, jobs: Sequence[Job], tokenizer: Any) -> dict[str, Any]:
    """What /api answers when the jobs of a request are done: texts without the end of document, segments with it."""
    shown = [job.ids[:-1] if job.answer and job.ids[-1] == tokenizer.eod else job.ids for job in jobs]
    found: dict[str, Any] = {
        "text": [tokenizer.detokenize(ids) for ids in shown],
        "segments": [[tokenizer.detokenize([token]) for token in job.ids] for job in jobs],
    }
    if request.logprobs:
        found["logprobs"] = [job.logprobs for job in jobs]
    if request.top_n_logprobs:
        found["top_n_logprobs"] = [[by_text(place, tokenizer) for place in job.top] for job in jobs]
    return found


def by_text(place: dict[int, float], tokenizer: Any) -> dict[str, float]:
    """Log-probabilities by the token's text; of two tokens with one text the likelier one counts."""
    found: dict[str, float] = {}
    for token, value in place.items():  # the likeliest first
        found.setdefault(tokenizer.detokenize([token]), value)
    return found


def check_fields(
    body: Any, fields: dict[str, tuple[Callable[[Any], bool], str]], not_here: dict[str, tuple[tuple[Any, ...], str]]
) -> None:
    """Holds a JSON body against tables such as FIELDS and NOT_HERE. Raises: ConfigError for the first that is wrong."""
    if not isinstance(body, dict):
        raise ConfigError(f"the body is a JSON {type(body).__name__}", why="fields have names", fix='{"name": value}')
    for name, value in body.items():
        if name in not_here:
            nothing, instead = not_here[name]
            if value not in nothing or not nothing:
                raise ConfigError(f"{name}: {_short(value)} cannot be done here", fix=instead)
        elif name not in fields:
            near = did_you_mean(name, fields)
            raise ConfigError(
                f"unknown field {name}",
                why=f"the fields are {', '.join(fields)}",
                fix=f"did you mean {' or '.join(near)}?" if near else "leave it out",
            )
        elif not fields[name][0](value):
            raise ConfigError(f"{name}: {_short(value)}", why=f"it is {fields[name][1]}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
