"""SFTTokenizer: conversations to ids, and which of them are answers to learn from.

    text    <SPECIAL_10>System\\n...\\n<SPECIAL_11>User\\n...\\n<SPECIAL_11>Assistant\\nfour\\n
    target  -100 ................................................................. four\\n

A conversation becomes one text by a template and is tokenised once; an answer is where the text grows when its message
is added. So a token that joins two characters is what the model will see, and no token is counted by guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.huggingface import HuggingFaceTokenizer

IGNORE_INDEX = -100  # the target of a token that is not trained


@dataclass(frozen=True)
class PromptFormat:
    """How messages become one text.

    Args:
        template: Jinja; None: the tokenizer's own.
        pad: the token that fills samples; None: the tokenizer's pad token, or else its eos token.
        answers_only: train on the answers; False: on everything.
    """

    template: str | None
    pad: str | None
    answers_only: bool = True


# Formats by Megatron's names. Texts are those that its models were tuned on.
PROMPT_FORMATS = {
    "nemotron-h-aligned": PromptFormat(
        "{% for m in messages %}"
        "{% if m.role == 'system' %}<SPECIAL_10>System\n{{ m.content | trim }}\n"
        "{% elif m.role == 'user' %}<SPECIAL_11>User\n{{ m.content | trim }}\n<SPECIAL_11>Assistant\n"
        "{% elif m.role == 'assistant' %}{{ m.content | trim }}\n"
        "{% endif %}{% endfor %}",
        "<SPECIAL_233>",
    ),
    "nemotron-nano-v2": PromptFormat(
        "{% for m in messages %}"
        "{% set asked = m.content | replace('/think', '') | replace('/no_think', '') | trim %}"
        "{% if m.role == 'system' %}<SPECIAL_10>System\n{{ asked }}\n"
        "{% elif m.role == 'user' %}<SPECIAL_11>User\n{{ asked }}\n"
        "{% elif m.role == 'assistant' %}<SPECIAL_11>Assistant\n{{ m.content | trim }}\n<SPECIAL_12>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<SPECIAL_11>Assistant\n{% endif %}",
        "<unk>",
    ),
    "identity": PromptFormat("{% for m in messages %}{{ m.content }}{% endfor %}", "<unk>", answers_only=False),
    "default": PromptFormat(None, None),
}


class SFTTokenizer(HuggingFaceTokenizer):
    """A Hugging Face tokenizer that knows conversations.

    Args:
        path: as HuggingFaceTokenizer.
        prompt_format: a key of PROMPT_FORMATS. `default` is the tokenizer's own template.
        chat_template: Jinja template instead of the format's.

    Raises: ConfigError for an unknown format, and for one whose tokens the tokenizer lacks.
    """

    def __init__(self, path: str, prompt_format: str = "nemotron-h-aligned", **options: Any):
        super().__init__(path, **options)
        self.unique_identifiers["prompt_format"] = prompt_format
        if prompt_format not in PROMPT_FORMATS:
            raise ConfigError(
                f"--sft-tokenizer-prompt-format {prompt_format} is not known",
                fix=f"one of {', '.join(PROMPT_FORMATS)}; default is the tokenizer's own chat template",
            )
        form = PROMPT_FORMATS[prompt_format]
        self._answers_only = form.answers_only
        if options.get("chat_template") is None and form.template is not None:
            self.chat_template = form.template
        self._pad = self._pad_of(prompt_format, form)
        self.apply_chat_template([{"role": "user", "content": "a"}])  # the template is there

    def _pad_of(self, name: str, form: PromptFormat) -> int:
        if form.pad is None:
            own = self.special_tokens_dict.get("pad_token")
            return self.eod if own is None else own
        pad: int | None = self.tokenizer.token_to_id(form.pad)
        if pad is None:
            raise ConfigError(
                f"--sft-tokenizer-prompt-format {name} with the tokenizer {self.path}, which has no token {form.pad}",
                why="the format fills samples with it: it was made for another tokenizer",
                fix="--sft-tokenizer-prompt-format default, which takes the tokenizer's own chat template",
            )
        return pad

    @property
    def pad(self) -> int:
        return self._pad

    def tokenize_conversation(
        self, conversation: Sequence[Mapping[str, Any]], return_target: bool, add_generation_prompt: bool
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """The ids of a conversation, int64 `[n]`; with `return_target` also what is trained, `IGNORE_INDEX` elsewhere.

        Raises: DataError if the template writes a conversation anew when a message is added: where are its answers?
        """
        text = self.apply_chat_template(conversation, add_generation_prompt=add_generation_prompt, tokenize=False)
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        tokens = np.array(encoding.ids, np.int64)
        if not return_target:
            return tokens
        if not self._answers_only:
            return tokens, tokens.copy()
        begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
        trained = np.zeros(len(tokens), bool)
        for number, message in enumerate(conversation):
            if message["role"] == "assistant":
                begin, end = self._answer(conversation, number, str(text))
                trained |= (begins >= begin) & (begins < end)
        return tokens, np.where(trained, tokens, IGNORE_INDEX)

    def _answer(self, conversation: Sequence[Mapping[str, Any]], number: int, text: str) -> tuple[int, int]:
        """First character of answer `number`, and the one after its last."""
        before = str(
            self.apply_chat_template(conversation[:number], add_generation_prompt=True, tokenize=False)
            if number
            else ""
        )
        until = str(self.apply_chat_template(conversation[: number + 1], tokenize=False))
        if not (until.startswith(before) and text.startswith(until)):
            raise DataError(
                f"message {number + 1} of a conversation cannot be found in its text",
                why="the chat template changes what it wrote when a message is added, "
                f"here {until[:60]!r} became {text[:60]!r}",
                fix="--chat-template FILE.jinja, one that only appends, or --sft-tokenizer-prompt-format",
            )
        return len(before), len(until)
