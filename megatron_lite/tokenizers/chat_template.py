"""Conversations to text, by the Jinja templates that Hugging Face tokenizers carry."""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_lite.errors import DataError


def render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The text of a conversation.

    The template runs in Jinja's sandbox: it comes with the tokenizer, from whoever made that.

    Raises: DataError if the template is none, or refuses the conversation.
    """
    try:
        return _compiled(template).render(messages=messages, **variables)
    except TemplateError as error:
        raise DataError(
            f"the chat template refuses a conversation of {len(messages)} messages: {error}",
            why="; ".join(f"{message.get('role')}: {str(message.get('content'))[:40]!r}" for message in messages[:4]),
            fix="mend the conversation, or give another --chat-template",
        ) from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    """With the functions that templates expect, and blocks that leave no blank lines behind."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    # Hugging Face's marks around answers write nothing: blocks that are always there have the same blank lines.
    marks = {"generation": "if true", "endgeneration": "endif"}
    return environment.from_string(
        re.sub(
            r"(?<={%)([-+]?\s*)(generation|endgeneration)(?=\s*[-+]?%})",
            lambda mark: mark[1] + marks[mark[2]],
            template,
        )
    )


def _to_json(value: Any, **options: Any) -> str:
    """Plain JSON: Jinja's own filter writes for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
