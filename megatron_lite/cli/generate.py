"""`megatron-lite generate`: prompt -> text, from a checkpoint.

    --load --> arguments, tokenizer, weights of the checkpoint
    prompt --tokenizer--> ids --model, all at once--> logits --sampling--> id --model, one token--> logits ...
                                 \\----- keys and values of every layer stay in an InferenceContext -----/

Text goes to standard output as it comes, notes to standard error. The same seed gives the same text.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_lite.cli.fill_masks import filler_of, write_embeddings, write_filled
from megatron_lite.cli.fill_spans import write_spans
from megatron_lite.cli.loaded_model import LoadedModel, load_model
from megatron_lite.cli.sampling import Sampling, next_token, sampling_of
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.training.families import FAMILIES, family_of
from megatron_lite.transformer.inference_context import InferenceContext

_NUM_TOKENS = 128


@dataclass(frozen=True)
class Generator:
    """A model ready to write.

    Args:
        model: takes ids and positions `[1, s]`, gives logits `[1, s, v]`.
        tokenizer: as training had it.
        context_length: tokens that the model can see, prompt included.
    """

    model: nn.Module
    tokenizer: Any
    context_length: int
    device: torch.device

    def encode(self, prompt: str) -> list[int]:
        """The prompt's ids.

        Raises: ConfigError if it leaves no room in the context.
        """
        ids = prompt_ids(self.tokenizer, prompt)
        if len(ids) >= self.context_length:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens and the model sees {self.context_length}",
                why="at least one place must be left for the text to come",
                fix=f"a prompt of at most {self.context_length - 1} tokens",
            )
        return ids

    @torch.inference_mode()
    def tokens(self, prompt: Sequence[int], limit: int, sampling: Sampling, seed: int) -> Iterator[int]:
        """The ids that follow, one by one, until the end of the document, `limit`, or a full context.

        The end-of-document id is the last one given out, when the model comes to it.
        """
        end = min(len(prompt) + limit, self.context_length)
        generator = torch.Generator().manual_seed(seed)
        context = InferenceContext(max_batch_size=1, max_sequence_length=end)
        new = list(prompt)
        for length in range(len(prompt), end):
            ids = torch.tensor([new], device=self.device)
            positions = torch.arange(length - len(new), length, device=self.device)[None]
            logits = self.model(ids, positions, None, inference_context=context)
            context.increment_sequence_len_offset(len(new))
            token = next_token(logits[0, -1, : self.tokenizer.vocab_size], sampling, generator)
            yield token
            if token == self.tokenizer.eod:
                return
            new = [token]

    def text(self, prompt: Sequence[int], ids: Iterator[int]) -> Iterator[str]:
        """The text that the ids add to the prompt, in pieces that are whole characters; without the end of document."""
        so_far = list(prompt)
        shown = self.tokenizer.detokenize(so_far)
        for token in ids:
            if token == self.tokenizer.eod:
                break
            so_far.append(token)
            text = self.tokenizer.detokenize(so_far)
            if not text.endswith("\ufffd"):  # else a character of several bytes is not complete yet
                yield text[len(shown) :]
                shown = text
        rest = self.tokenizer.detokenize(so_far)[len(shown) :]
        if rest:
            yield rest


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """A prompt's ids, open at its end; an empty one is the start of a document, that is, the end of the one before."""
    ids: list[int] = tokenizer.tokenize(prompt)
    if ids and tokenizer.appends_eod:
        ids = ids[:-1]
    return ids or [tokenizer.eod]


def prompts_of(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line, or those of a file, one a line."""
    if args.prompts_file is None:
        return args.prompt or [""]
    try:
        lines = args.prompts_file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(
            f"cannot read --prompts-file {args.prompts_file}: {problem}", fix="a text file with one prompt a line"
        ) from None
    if not lines:
        raise DataError(f"--prompts-file {args.prompts_file} is empty", fix="one prompt a line")
    return lines


def write(generator: Generator, prompt: str, limit: int, sampling: Sampling, seed: int) -> None:
    """Prints prompt and continuation as it comes, then a note on why it ended."""
    ids = generator.encode(prompt)
    produced: list[int] = []
    start = time.monotonic()

    def watched() -> Iterator[int]:
        for token in generator.tokens(ids, limit, sampling, seed):
            produced.append(token)
            yield token

    print(prompt, end="", flush=True)
    for piece in generator.text(ids, watched()):
        print(piece, end="", flush=True)
    print(flush=True)
    if produced and produced[-1] == generator.tokenizer.eod:
        reason = "the model ended the document"
    elif len(produced) < limit:
        reason = f"the model's context of {generator.context_length} tokens is full"
    else:
        reason = "as many as asked for"
    rate = len(produced) / max(time.monotonic() - start, 1e-9)
    print(f"[{len(produced)} tokens: {reason}; {rate:.0f} tokens/s]", file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    """The verb's own flags; all others are those of training."""
    parser = argparse.ArgumentParser(
        "megatron-lite generate",
        description="Prompt -> text, from a checkpoint. Training's flags, such as --ckpt-step or --bf16, work too.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="the folder that --save named")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--prompt", nargs="+", metavar="TEXT", help="one or several (default: the start of a document)")
    which.add_argument("--prompts-file", type=Path, metavar="FILE", help="one prompt a line")
    add("--num-tokens-to-generate", type=int, metavar="N", help=f"at most (default: {_NUM_TOKENS})")
    add("--temperature", type=float, help="below 1 likelier, above 1 wilder text; 0: greedy (default: 1; masks: 0)")
    add("--top_k", "--top-k", type=int, default=0, metavar="K", help="draw among the K likeliest tokens (0: all)")
    add(
        "--top_p",
        "--top-p",
        type=float,
        default=0.0,
        metavar="P",
        help="draw among the likeliest with this sum (0: all)",
    )
    add("--greedy", action="store_true", help="always the likeliest token: --temperature 0")
    add(
        "--random-seed", type=int, default=1234, metavar="N", help="the same seed, the same text (default: %(default)s)"
    )
    add("--output-bert-embeddings", action="store_true", help="BERT: the vector of each prompt, as a line of JSON")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Raises: ConfigError, before a model is loaded."""
    sampling_of(args)
    if args.num_tokens_to_generate is not None and args.num_tokens_to_generate < 1:
        raise ConfigError(f"--num-tokens-to-generate {args.num_tokens_to_generate}", fix="1 or more")
    if args.random_seed < 1:
        raise ConfigError(f"--random-seed {args.random_seed}", why="seeds are positive", fix="--random-seed 1234")


def write_texts(loaded: LoadedModel, args: argparse.Namespace, prompts: Sequence[str]) -> None:
    """GPT: each prompt with the text that follows it."""
    if args.output_bert_embeddings:
        raise ConfigError(
            "--output-bert-embeddings with a checkpoint of GPT", why="a BERT gives vectors of texts", fix="leave it out"
        )
    _write_all(
        Generator(loaded.model, loaded.tokenizer, loaded.args.max_position_embeddings, loaded.args.device),
        args,
        prompts,
    )


def _write_all(generator: Generator, args: argparse.Namespace, prompts: Sequence[str]) -> None:
    sampling, limit = sampling_of(args), args.num_tokens_to_generate or _NUM_TOKENS
    for number, prompt in enumerate(prompts):
        if number:
            print("-" * 40)
        write(generator, prompt, limit, sampling, args.random_seed)


def fill_masks(loaded: LoadedModel, args: argparse.Namespace, prompts: Sequence[str]) -> None:
    """BERT: each prompt with its masks filled, or as a vector."""
    if args.num_tokens_to_generate is not None:
        raise ConfigError(
            f"--num-tokens-to-generate {args.num_tokens_to_generate} with a checkpoint of BERT",
            why="it fills the masks that a text has",
            fix="leave it out",
        )
    filler = filler_of(loaded)
    if args.output_bert_embeddings:
        write_embeddings(filler, prompts)
        return
    drawn = args.temperature is not None or args.top_k or args.top_p  # else the likeliest: the best guess is asked for
    write_filled(filler, prompts, sampling_of(args) if drawn else Sampling(temperature=0.0), args.random_seed)


def write_retrieving(loaded: LoadedModel, args: argparse.Namespace, prompts: Sequence[str]) -> None:
    """Retro: as GPT, with the neighbours of what is there so far; a GPT of pretrain_retro.py has none."""
    if args.output_bert_embeddings or not loaded.args.retro_add_retriever:
        return write_texts(loaded, args, prompts)  # which refuses vectors of texts
    from megatron_lite.cli.retro_generate import retro_generator  # its database and index

    _write_all(retro_generator(loaded), args, prompts)


# Family -> what its models do with prompts.
WRITERS: dict[str, Callable[[LoadedModel, argparse.Namespace, Sequence[str]], None]] = {
    "gpt": write_texts,
    "bert": fill_masks,
    "retro": write_retrieving,
    "t5": write_spans,
}


def main(argv: Sequence[str]) -> int:
    """The verb."""
    args, flags = build_parser().parse_known_args(list(argv))
    _check(args)
    prompts = prompts_of(args)
    loaded = load_model(args.load, flags, args.random_seed)
    family = family_of(loaded.args)
    if family not in WRITERS:
        raise ConfigError(
            f"{args.load} holds a model of {FAMILIES[family].title}",
            why=f"this verb writes with {', '.join(FAMILIES[name].title for name in WRITERS)}",
            fix="a checkpoint of such a model",
        )
    WRITERS[family](loaded, args, prompts)
    return 0
