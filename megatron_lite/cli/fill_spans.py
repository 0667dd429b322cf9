"""`megatron-lite generate` with a T5: text with gaps -> the same text, gaps filled.

    "def <extra_id_0>(self): return <extra_id_1>"
        ids with sentinels --encoder, once--> hidden states
        [BOS] <0> --decoder--> name of the first gap, token by token, until it wants the next sentinel or the end
        [BOS] <0> name <1> --decoder--> ...

The model decides what stands in a gap and how long it is; that gaps come in their order, and that none stays empty, is
seen to here.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.cli.loaded_model import LoadedModel
from megatron_lite.cli.sampling import Sampling, next_token, sampling_of
from megatron_lite.datasets.t5_dataset import first_and_last
from megatron_lite.errors import ConfigError
from megatron_lite.transformer.inference_context import InferenceContext

_GAP = re.compile(r"<extra_id_(\d+)>")


@dataclass
class _Decoder:
    """A decoder over one encoded text: takes ids, gives the logits of what follows."""

    model: nn.Module
    encoded: Tensor
    context: InferenceContext
    vocab_size: int

    def __call__(self, ids: Sequence[int]) -> Tensor:
        tokens = torch.tensor([list(ids)], device=self.encoded.device)
        logits = self.model(
            None, tokens, None, None, None, encoder_hidden_states=self.encoded, inference_context=self.context
        )
        self.context.increment_sequence_len_offset(len(ids))
        return logits[0, -1, : self.vocab_size]


class SpanFiller:
    """A T5 ready to fill gaps.

    Args:
        model: takes what T5Model takes.
        tokenizer: as training had it.
        encoder_length, decoder_length: tokens of training's samples.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, encoder_length: int, decoder_length: int, device: torch.device
    ):
        self.model, self.tokenizer, self.device = model, tokenizer, device
        self.encoder_length, self.decoder_length = encoder_length, decoder_length
        self.sentinels: list[int] = list(tokenizer.additional_special_tokens_ids)
        self.begin, self.end = first_and_last(tokenizer)

    def encode(self, prompt: str) -> list[int]:
        """Ids of a text with gaps.

        Raises: ConfigError unless it has gaps <extra_id_0>, <extra_id_1>, ... in this order, and fits.
        """
        gaps = [int(number) for number in _GAP.findall(prompt)]
        if not gaps or gaps != list(range(len(gaps))) or len(gaps) > len(self.sentinels):
            raise ConfigError(
                f"the prompt has the gaps {gaps}" if gaps else f"the prompt {prompt[:40]!r} has no gap",
                why=f"a T5 fills up to {len(self.sentinels)} gaps of a text, in the order of its sentinels",
                fix="--prompt 'The <extra_id_0> sat on the <extra_id_1>.'",
            )
        ids: list[int] = []
        for number, text in enumerate(_GAP.split(prompt)[::2]):
            part = self.tokenizer.tokenize(text) if text.strip() else []
            if part and self.tokenizer.appends_eod:
                part = part[:-1]
            ids += part + ([self.sentinels[number]] if number < len(gaps) else [])
        if len(ids) > self.encoder_length:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens and the encoder was trained on {self.encoder_length}",
                why="it has not learned what stands further apart",
                fix="a shorter text around the gaps",
            )
        return ids

    @torch.inference_mode()
    def spans(self, ids: Sequence[int], gaps: int, limit: int, sampling: Sampling, seed: int) -> list[list[int]]:
        """The tokens of each gap, `limit` in all at most; a gap that there is no room for stays empty.

        A gap that the model does not end takes no more than its share of the decoder's places.
        """
        generator = torch.Generator().manual_seed(seed)
        text = torch.tensor([list(ids)], device=self.device)
        encoded = self.model(text, None, None, None, None, output_encoder_hidden_only=True)
        decode = _Decoder(self.model, encoded, InferenceContext(1, self.decoder_length), self.tokenizer.vocab_size)
        stops = torch.tensor(sorted({*self.sentinels, self.end, self.begin} - {-1}), device=self.device)
        spans: list[list[int]] = []
        share = (self.decoder_length - 1 - gaps) // gaps
        new = [self.begin]
        for gap in range(gaps):
            spans.append([])
            new.append(self.sentinels[gap])
            while (
                limit > 0
                and len(spans[-1]) < share
                and decode.context.sequence_len_offset + len(new) <= self.decoder_length
            ):
                logits = decode(new)
                if not spans[-1]:
                    logits = logits.index_fill(0, stops, -torch.inf)
                token = next_token(logits, sampling, generator)
                new = []
                if token in stops:
                    break
                spans[-1].append(token)
                new = [token]
                limit -= 1
        return spans


def fill(prompt: str, texts: Sequence[str]) -> str:
    """The prompt with each gap's text in its place; `...` where nothing was found."""
    return _GAP.sub(lambda match: texts[int(match.group(1))] or "...", prompt)


def write_spans(loaded: LoadedModel, args: argparse.Namespace, prompts: Sequence[str]) -> None:
    """T5: each prompt with its gaps filled, and on standard error what stands in which."""
    sampling = sampling_of(args)
    filler = SpanFiller(
        loaded.model, loaded.tokenizer, loaded.args.seq_length, loaded.args.decoder_seq_length, loaded.args.device
    )
    encoded = [filler.encode(prompt) for prompt in prompts]
    limit = args.num_tokens_to_generate or filler.decoder_length
    for number, (prompt, ids) in enumerate(zip(prompts, encoded)):
        if number:
            print("-" * 40)
        start = time.monotonic()
        gaps = len(_GAP.findall(prompt))
        spans = filler.spans(ids, gaps, limit, sampling, args.random_seed)
        texts = [filler.tokenizer.detokenize(span) for span in spans]
        print(fill(prompt, texts), flush=True)
        for gap, text in enumerate(texts):
            print(f"  <extra_id_{gap}>  {text or '(no room was left)'}", file=sys.stderr)
        count = sum(map(len, spans))
        rate = count / max(time.monotonic() - start, 1e-9)
        print(f"[{count} tokens in {gaps} gap(s); {rate:.0f} tokens/s]", file=sys.stderr, flush=True)
