"""What a client asks for: Megatron's JSON of PUT /api, read strictly.

    {"prompts": ["def ", "class "], "tokens_to_generate": 32, "temperature": 0.8, "top_p": 0.9, "random_seed": 7}

A field that is not known, has another type, or cannot be done here is an error that names it: an answer to another
question than the one that was asked is worth nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_lite.cli.sampling import Sampling
from megatron_lite.config import did_you_mean
from megatron_lite.errors import ConfigError

MAX_PROMPTS = 128


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A request whose fields are as they should be. random_seed: None: the server's choice."""

    prompts: list[str]
    tokens_to_generate: int = 64
    sampling: Sampling = Sampling()
    logprobs: bool = False
    top_n_logprobs: int = 0
    add_BOS: bool = False
    stop_on_eol: bool = False
    stop_on_double_eol: bool = False
    stop_token: int | None = None
    random_seed: int | None = None
    no_log: bool = False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)  # halves of characters


def _is_prompts(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MAX_PROMPTS and all(map(_is_text, value))


# Field -> (is a value right, what it is).
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompts": (_is_prompts, f"a list of 1 to {MAX_PROMPTS} texts"),
    "tokens_to_generate": (lambda v: _is_whole(v) and v >= 0, "a whole number, 0 or more"),
    "temperature": (lambda v: _is_number(v) and 0.0 <= v <= 100.0, "a number from 0 (greedy) to 100"),
    "top_k": (lambda v: _is_whole(v) and 0 <= v <= 1000, "a whole number from 0 (all) to 1000; 1 is greedy"),
    "top_p": (lambda v: _is_number(v) and 0.0 <= v <= 1.0, "a number from 0 (all) to 1"),
    "logprobs": (_is_flag, "true or false"),
    "top_n_logprobs": (lambda v: _is_whole(v) and 0 <= v <= 100, "a whole number from 0 to 100"),
    "add_BOS": (_is_flag, "true or false"),
    "stop_on_eol": (_is_flag, "true or false"),
    "stop_on_double_eol": (_is_flag, "true or false"),
    "stop_token": (lambda v: _is_whole(v) and v >= 0, "a token's number"),
    "random_seed": (
        lambda v: _is_whole(v) and (v == -1 or 0 < v < 2**63),
        "a whole number above 0, or -1 for the server's",
    ),
    "no_log": (_is_flag, "true or false"),
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
    """The request of a JSON body.

    Raises: ConfigError that says what is wrong with it.
    """
    if not isinstance(body, dict):
        raise ConfigError(
            f"the body is a JSON {type(body).__name__}", why="fields have names", fix='{"prompts": ["..."]}'
        )
    for name, value in body.items():
        if name in NOT_HERE:
            nothing, instead = NOT_HERE[name]
            if value not in nothing or not nothing:
                raise ConfigError(f"{name}: {_short(value)} cannot be done here", fix=instead)
        elif name not in FIELDS:
            near = did_you_mean(name, FIELDS)
            raise ConfigError(
                f"unknown field {name}",
                why=f"the fields are {', '.join(FIELDS)}",
                fix=f"did you mean {' or '.join(near)}?" if near else "leave it out",
            )
        elif not FIELDS[name][0](value):
            raise ConfigError(f"{name}: {_short(value)}", why=f"it is {FIELDS[name][1]}")
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
    request = TextRequest(sampling=sampling, **given)
    if request.tokens_to_generate == 0 and not (request.logprobs or request.top_n_logprobs):
        raise ConfigError(
            "tokens_to_generate: 0 without logprobs",
            why="nothing is left to answer",
            fix='"logprobs": true, which judges the prompts, or more tokens',
        )
    return request


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
