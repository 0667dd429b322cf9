"""`megatron-lite generate` with a BERT: what stands where a text has [MASK], and texts as vectors.

    the [MASK] sat on the [MASK] --one pass--> words for both, the surer one is put in --again--> ...

The word of a mask is chosen as those of a GPT are where a flag of sampling is given, else it is the likeliest. Texts go
to standard output with their masks filled, what else was likely to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.cli.loaded_model import LoadedModel
from megatron_lite.cli.sampling import Sampling, next_token
from megatron_lite.errors import ConfigError

MASK = "[MASK]"
_SHOWN = 5  # likely words of a mask


@dataclass(frozen=True)
class Filler:
    """A BERT ready to fill masks.

    Args:
        model: (ids, padding mask, segments or None) -> logits `[1, s, v]` and what the other head says.
        tokenizer: knows `cls`, `sep` and `mask`.
        context_length: tokens that the model can see.
        segments: the model has them: everything is the first.
    """

    model: nn.Module
    tokenizer: Any
    context_length: int
    device: torch.device
    segments: bool

    def encode(self, text: str) -> list[int]:
        """[CLS], the text with its masks, [SEP]. Raises: ConfigError if the model does not see all of it."""
        ids = [self.tokenizer.cls]
        for number, part in enumerate(text.split(MASK)):
            ids += [self.tokenizer.mask] * (number > 0) + self.tokenizer.tokenize(part)
        ids.append(self.tokenizer.sep)
        if len(ids) > self.context_length:
            raise ConfigError(
                f"the text has {len(ids)} tokens and the model sees {self.context_length}",
                why="[CLS] and [SEP] among them",
                fix=f"a text of at most {self.context_length - 2} tokens",
            )
        return ids

    def _inputs(self, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        tokens = torch.tensor([list(ids)], device=self.device)
        return tokens, torch.ones_like(tokens), torch.zeros_like(tokens) if self.segments else None

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """`[s, v]`, real tokens only; fp32 on the CPU. What no text holds (special tokens) is never likely."""
        logits, _ = self.model(*self._inputs(ids))
        logits = logits[0, :, : self.tokenizer.vocab_size].float().cpu()
        tokenizer = self.tokenizer
        special = {*tokenizer.special_tokens_dict.values(), *tokenizer.additional_special_tokens_ids}
        logits[:, sorted(special)] = float("-inf")
        return logits

    def fill(
        self, ids: Sequence[int], sampling: Sampling, seed: int
    ) -> tuple[list[int], list[list[tuple[int, float]]]]:
        """The ids with every mask replaced, the surest first, each in the light of those before.

        Returns: the ids; for each mask, in the order of the text, the likeliest tokens with their probabilities, as
            they were when it was filled.
        """
        filled = list(ids)
        places = [place for place, id in enumerate(ids) if id == self.tokenizer.mask]
        likely: dict[int, list[tuple[int, float]]] = {}
        generator = torch.Generator().manual_seed(seed)
        while len(likely) < len(places):
            logits = self.logits(filled)
            open_places = [place for place in places if place not in likely]
            probabilities = logits[open_places].softmax(dim=-1)
            surest = int(probabilities.amax(dim=-1).argmax())
            place = open_places[surest]
            values, tokens = probabilities[surest].topk(min(_SHOWN, probabilities.shape[-1]))
            likely[place] = list(zip(tokens.tolist(), values.tolist()))
            filled[place] = next_token(logits[place], sampling, generator)
        return filled, [likely[place] for place in places]

    def text(self, text: str, ids: Sequence[int], filled: Sequence[int]) -> str:
        """The text as it was typed, with the words of its masks. A piece that goes on with a word is joined to it."""
        words = [self.tokenizer.inv_vocab[new] for old, new in zip(ids, filled) if old == self.tokenizer.mask]
        first, *rest = text.split(MASK)
        for word, part in zip(words, rest):
            first = (first.rstrip() + word[2:] if word.startswith("##") else first + word) + part
        return first

    @torch.inference_mode()
    def embedding(self, ids: Sequence[int]) -> list[float]:
        """The mean of the final hidden states of the text's tokens, without [CLS] and [SEP]."""
        self.model.return_embeddings = True  # type: ignore[assignment]
        try:
            return self.model(*self._inputs(ids))[0].tolist()
        finally:
            self.model.return_embeddings = False  # type: ignore[assignment]


def filler_of(loaded: LoadedModel) -> Filler:
    """The filler of a checkpoint."""
    args = loaded.args
    model = loaded.model.module if hasattr(loaded.model, "module") else loaded.model
    return Filler(
        model,  # type: ignore[arg-type]
        loaded.tokenizer,
        args.max_position_embeddings,
        args.device,
        args.bert_binary_head,
    )


def write_embeddings(filler: Filler, texts: Sequence[str]) -> None:
    """A line of JSON for each text, with its vector."""
    for text in texts:
        print(json.dumps({"text": text, "embedding": filler.embedding(filler.encode(text))}), flush=True)


def write_filled(filler: Filler, texts: Sequence[str], sampling: Sampling, seed: int) -> None:
    """Each text with its masks filled, then what was likely for each. Raises: ConfigError for a text without a mask."""
    for text in texts:
        if MASK not in text:
            raise ConfigError(
                f"the prompt {text!r} has no {MASK}",
                why="a BERT says what stands in its place",
                fix=f"--prompt 'import {MASK}'",
            )
    for number, text in enumerate(texts):
        if number:
            print("-" * 40)
        ids = filler.encode(text)
        filled, likely = filler.fill(ids, sampling, seed)
        print(filler.text(text, ids, filled), flush=True)
        for mask, tokens in enumerate(likely, start=1):
            shown = ", ".join(f"{filler.tokenizer.inv_vocab[id]} {share:.1%}" for id, share in tokens)
            print(f"[mask {mask}: {shown}]", file=sys.stderr, flush=True)
