"""A Retro run and its project: settings are taken from config.json, what contradicts them is refused.

not typed     taken from the project: data, tokenizer, lengths, seed, batch, evaluation
typed         must agree, where the order of the samples depends on it; may be less, where it only says how many
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import TYPE_CHECKING

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.models.retro.config import problems_of_retro
from megatron_lite.training.families import family_of

if TYPE_CHECKING:
    from megatron_lite.datasets.retro_project import RetroProject

# Argument -> setting. Those of the first table decide the order of the samples and what their tokens mean.
_SAME = {
    "seed": "retro_gpt_seed",
    "seq_length": "retro_gpt_seq_length",
    "global_batch_size": "retro_gpt_global_batch_size",
    "tokenizer_type": "retro_gpt_tokenizer_type",
    "tokenizer_model": "retro_gpt_tokenizer_model",
    "vocab_file": "retro_gpt_vocab_file",
    "merge_file": "retro_gpt_merge_file",
    "vocab_size": "retro_gpt_vocab_size",
}
_OPEN = {
    "eval_interval": "retro_gpt_eval_interval",
    "eval_iters": "retro_gpt_eval_iters",
    "split": "retro_gpt_split",
    "data_cache_path": "retro_gpt_data_cache_path",
}
_FILES = ("tokenizer_model", "vocab_file", "merge_file")
_ADDED = {
    "retro_block_size": "retro_block_size",
    "retro_chunk_length": "retro_gpt_chunk_length",
    "retro_neighbor_dirs": "retro_neighbor_dirs",
    "retro_split_preprocessing": "retro_gpt_split",
    "retro_bert_tokenizer_type": "retro_bert_tokenizer_type",
    "retro_bert_vocab_file": "retro_bert_vocab_file",
}


def take_project(args: Namespace) -> list[ConfigError]:
    """Fill in what the project's config.json says; before the rules. Returns: what contradicts it."""
    if family_of(args) != "retro":
        return []
    if args.retro_project_dir is None:
        return [
            ConfigError(
                "--retro-project-dir is missing",
                why="it says which data, and which neighbours",
                fix="--retro-project-dir DIR, made by megatron-lite retro preprocess --retro-project-dir DIR ...",
            )
        ]
    from megatron_lite.datasets.retro_project import RetroProject  # numpy: --help of other models does without

    try:
        project = RetroProject.read(args.retro_project_dir)
    except DataError as error:
        return [
            ConfigError(f"--retro-project-dir {args.retro_project_dir}: {error.what}", why=error.why, fix=error.fix)
        ]
    problems = []
    for name, setting in _SAME.items():
        here, there = getattr(args, name), project[setting]
        if name in args.typed and here is not None and not _equal(name, here, there):
            problems.append(_contradiction(name, here, there, project))
        elif name not in args.typed or here is None:
            setattr(args, name, there)
    for name, setting in _OPEN.items():
        if name not in args.typed:
            setattr(args, name, project[setting])
    if args.data_cache_path is None:
        args.data_cache_path = str(project.folder / "cache")
    if not args.data_path:
        args.data_path = project.data_path
    for name, setting in _ADDED.items():
        setattr(args, name, project[setting])
    problems += _length(args, project)
    if args.max_position_embeddings is None:
        args.max_position_embeddings = _positions(args)
    return problems


def _equal(name: str, here: object, there: object) -> bool:
    if name in _FILES and isinstance(here, str) and isinstance(there, str):
        return os.path.realpath(here) == os.path.realpath(there)
    return here == there


def _contradiction(name: str, here: object, there: object, project: RetroProject) -> ConfigError:
    spelling = "--" + name.replace("_", "-")
    return ConfigError(
        f"{spelling} {here}, and {project.folder} was prepared for {there}",
        why="samples are known by their number, and their neighbours are those of the samples that were prepared",
        fix=f"leave {spelling} out, or preprocess with --retro-gpt-{name.replace('_', '-')} {here}",
    )


def _length(args: Namespace, project: RetroProject) -> list[ConfigError]:
    """How long the run is: as long as the project, a part of it, or (cyclic) as long as is asked for."""
    prepared, batch = project["retro_gpt_train_samples"], project["retro_gpt_global_batch_size"]
    if args.retro_cyclic_train_iters is not None:
        given = [name for name in ("train_iters", "train_samples") if name in args.typed]
        if given or args.retro_cyclic_train_iters < 1:
            return [
                ConfigError(
                    f"--retro-cyclic-train-iters {args.retro_cyclic_train_iters}"
                    + "".join(f" and --{name.replace('_', '-')}" for name in given),
                    why="it says how long the run is: 1 iteration or more",
                    fix="one of them",
                )
            ]
        args.train_samples = args.retro_cyclic_train_iters * batch
        return []
    if "train_iters" not in args.typed and "train_samples" not in args.typed:
        args.train_samples = prepared
        return []
    asked = args.train_samples or (args.train_iters or 0) * batch
    if asked <= prepared:
        return []
    return [
        ConfigError(
            f"{asked} samples, and {project.folder} was prepared for {prepared}",
            why="the neighbours of the others are not known",
            fix=f"--retro-cyclic-train-iters {-(-asked // batch)} goes through the prepared ones again and again",
        )
    ]


def _positions(args: Namespace) -> int:
    """Rows of a learned position table that serve samples and neighbours."""
    neighbor = args.retro_num_retrieved_chunks * args.retro_chunk_length if args.retro_add_retriever else 0
    return max(args.seq_length, neighbor)


def problems_of_retro_run(args: Namespace) -> list[ConfigError]:
    """What of a Retro run's arguments cannot be, after `derived.derive`."""
    if family_of(args) != "retro":
        return []
    problems = []
    for name in ("mock_data", "multiple_validation_sets"):
        if getattr(args, name):
            problems.append(
                ConfigError(
                    f"--{name.replace('_', '-')} with Retro",
                    why="samples are those of the project, a set for each split",
                    fix="leave it out",
                )
            )
    if any((args.train_data_path, args.valid_data_path, args.test_data_path, args.per_split_data_args_path)):
        problems.append(
            ConfigError(
                "corpora for each split with Retro",
                why="the splits of preprocessing and training are parts of the same corpora",
                fix="--retro-gpt-data-path and --retro-gpt-split, when the project is made",
            )
        )
    if not args.retro_add_retriever:
        return problems
    problems += problems_of_retro(args)
    length = getattr(args, "retro_chunk_length", None)
    if length and args.position_embedding_type == "learned_absolute":
        needed = _positions(args)
        if (args.max_position_embeddings or needed) < needed:
            problems.append(
                ConfigError(
                    f"--max-position-embeddings {args.max_position_embeddings}",
                    why=f"a neighbour has {args.retro_num_retrieved_chunks} chunks of {length} tokens",
                    fix=f"--max-position-embeddings {needed}",
                )
            )
    return problems
