"""The model families: each has a script, defaults of its own, and flags that the others do not read.

    pretrain_bert.py --ARGS_DEFAULTS--> args.model_family = "bert" --> refused: flags of other families
                                                 |                     taken: the parts of `model_parts`
                                                 +--> checkpoint --> generate, convert, resume

A new family is a row here, one in `model_parts`, and what these name. A script of the user's own names its family the
same way; without a name no flag is refused, and what has to be assumed is GPT. No torch here: `--help` must be quick.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.config import Flag
from megatron_lite.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is special about the runs of one kind of model, as data.

    defaults: of flags, by name in the namespace. reads_sentences: its corpora are split into sentences, and its
    tokenizer is WordPiece. every_stage_reads: each pipeline stage needs a part of every micro-batch, as a mask.
    splits_sequences: context parallelism is defined for it.
    """

    title: str
    script: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    reads_sentences: bool = False
    every_stage_reads: bool = False
    splits_sequences: bool = False


FAMILIES: dict[str, Family] = {
    "gpt": Family(
        title="GPT", script="pretrain_gpt.py", defaults={"tokenizer_type": "GPT2BPETokenizer"}, splits_sequences=True
    ),
    "bert": Family(
        title="BERT",
        script="pretrain_bert.py",
        defaults={"tokenizer_type": "BertWordPieceLowerCase"},
        reads_sentences=True,
        every_stage_reads=True,
        splits_sequences=True,
    ),
    "t5": Family(
        title="T5",
        script="pretrain_t5.py",
        defaults={"tokenizer_type": "BertWordPieceLowerCase"},
        reads_sentences=True,
        every_stage_reads=True,
        splits_sequences=True,
    ),
    "retro": Family(
        title="Retro",
        script="pretrain_retro.py",
        defaults={"tokenizer_type": "GPT2BPETokenizer"},
        every_stage_reads=True,
    ),
}

# Families, and flags that no other family reads. A flag that is in no row is everybody's.
OWN_FLAGS: tuple[tuple[str, str], ...] = (
    (
        "gpt",
        "--fim-data --fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix "
        "--fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token --sft "
        "--per-dataset-sequences-path --dataloader-inter-document-masking",
    ),
    (
        "t5",
        "--decoder-num-layers --decoder-seq-length --relative-attention-num-buckets --relative-attention-max-distance "
        "--no-lm-head-bias --scaled-logits",
    ),
    ("bert t5", "--mask-prob --short-seq-prob"),
    ("bert", "--bert-no-binary-head --output-bert-embeddings"),
    ("gpt", "--num-experts --multi-latent-attention --mtp-num-layers"),
    ("gpt retro", "--use-rope-scaling --rope-scaling-factor"),
    (
        "retro",
        "--retro-project-dir --retro-add-retriever --retro-off --retro-cyclic-train-iters --retro-encoder-layers "
        "--retro-encoder-hidden-dropout --retro-encoder-attention-dropout --retro-encoder-residual "
        "--retro-num-neighbors --retro-num-retrieved-chunks --retro-missing-chunks --retro-layers "
        "--retro-attention-gate --retro-no-verify-neighbor-count",
    ),
    ("gpt retro", "--reset-position-ids --reset-attention-mask --eod-mask-loss --allow-ambiguous-pad-tokens"),
)


def family_of(args: Namespace) -> str:
    """The name of the run's family; GPT for a script that does not say."""
    return getattr(args, "model_family", None) or "gpt"


def defaults_of(name: str) -> dict[str, Any]:
    """`args_defaults` of a family's script."""
    return {"model_family": name, **FAMILIES[name].defaults}


def owners(spellings: Iterable[str]) -> list[str]:
    """The families that read a flag; empty: all of them."""
    names = set(spellings)
    return [family for families, flags in OWN_FLAGS if names & set(flags.split()) for family in families.split()]


def foreign_flag(flag: Flag, value: Any, shown: str, args: Namespace) -> ConfigError | None:
    """The error about a flag of other families, given a value of its own in a script that names its family."""
    mine, theirs = args.model_family, owners((*flag.spellings, *flag.negations))
    if mine is None or not theirs or mine in theirs or value in (flag.default, [flag.default]):
        return None
    return ConfigError(
        f"{shown} is a flag of {_and(FAMILIES[name].title for name in theirs)}",
        why=f"{FAMILIES[mine].script} trains {FAMILIES[mine].title}, and nothing in it reads this flag",
        fix=f"leave it out, or train with {' or '.join(FAMILIES[name].script for name in theirs)}",
    )


def _and(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
