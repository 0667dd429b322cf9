"""The flags of `megatron-lite retro preprocess`: Megatron's, and a few of ours for what needs no other package."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lite.config import did_you_mean, flag, flags_of, from_namespace
from megatron_lite.datasets.retro_search import is_exact
from megatron_lite.errors import ConfigError
from megatron_lite.log import print_rank_0, warn_rank_0
from megatron_lite.tokenizers.build_tokenizer import missing_fields
from megatron_lite.tokenizers.tokenizer_config import TOKENIZER_TYPES, TokenizerConfig
from megatron_lite.training.flag_aliases import translate

INDEX_TYPES = ("exact", "faiss", "faiss-base", "faiss-par-add")
# Words of --retro-tasks -> stages.
TASKS = {
    "build": ("db", "index-train", "index-add", "query"),
    "db": ("db",),
    "db-build": ("db",),
    "index": ("index-train", "index-add"),
    "index-build": ("index-train", "index-add"),
    "index-train": ("index-train",),
    "index-add": ("index-add",),
    "query": ("query",),
    "query-neighbors": ("query",),
    "query-pretraining-neighbors": ("query",),
}


@dataclass(kw_only=True)
class RetroPreprocessingConfig:
    """What is retrieved from, how, and for which samples."""

    retro_project_dir: str | None = flag(None, "Project directory: results, and what training reads.")
    retro_tasks: str = flag(
        "build", "Stages, with commas between: db, index, query; build: all. A stage goes on where it was stopped."
    )
    retro_task_validate: float | None = flag(
        None, "Make this share of the blocks that are there again, and compare bit for bit."
    )
    retro_block_size: int = flag(100000, "Rows of a file of vectors or neighbours.", unit="chunks")
    retro_doc_block_size: int = flag(100000, "Documents of a file of the chunk database.", unit="documents")
    workers: int | None = flag(None, "Processes. Default: one a core.")

    # -- the samples that training will draw
    retro_gpt_seed: int = flag(1234, "Training's --seed.")
    retro_gpt_data_path: list[str] | None = flag(
        None, "Training's --data-path: prefixes here or below PROJECT/data, with weights before them.", nargs="*"
    )
    retro_gpt_data_cache_path: str | None = flag(None, "Folder of the index caches. Default: PROJECT/cache.")
    retro_gpt_split: str = flag("969,30,1", "Training's --split. The database is made of the train part.")
    retro_gpt_train_samples: int | None = flag(None, "Samples of training.", unit="samples")
    retro_gpt_eval_interval: int | None = flag(None, "Training's --eval-interval.", unit="iterations")
    retro_gpt_eval_iters: int | None = flag(None, "Training's --eval-iters.", unit="iterations")
    retro_gpt_tokenizer_type: str | None = flag(
        None, "Tokenizer of the data.", choices=tuple(sorted({*TOKENIZER_TYPES}))
    )
    retro_gpt_tokenizer_model: str | None = flag(None, "Its model.")
    retro_gpt_vocab_file: str | None = flag(None, "Its vocabulary (GPT2BPETokenizer).")
    retro_gpt_merge_file: str | None = flag(None, "Its merges (GPT2BPETokenizer).")
    retro_gpt_vocab_size: int | None = flag(None, "Its size (NullTokenizer).")
    retro_gpt_seq_length: int | None = flag(None, "Training's --seq-length.", unit="tokens")
    retro_gpt_global_batch_size: int | None = flag(None, "Training's --global-batch-size.", unit="samples")
    retro_gpt_chunk_length: int = flag(64, "Tokens of a chunk.", unit="tokens")

    # -- how texts become vectors
    retro_embedder: str = flag(
        "hash",
        "hash (words and parts of words, needs no model), bert (a checkpoint of pretrain_bert.py), sentence (a model "
        "of transformers in a local folder), or MODULE:NAME, a class of yours.",
    )
    bert_embedder_type: str | None = flag(
        None,
        "Megatron's name: megatron is --retro-embedder bert, huggingface is sentence.",
        choices=("megatron", "huggingface"),
    )
    retro_embedder_path: str | None = flag(None, "Checkpoint of bert, or folder of sentence.")
    retro_embedder_dim: int = flag(512, "Size of hash's vectors.")
    retro_bert_tokenizer_type: str | None = flag(
        None, "Tokenizer of bert.", choices=("BertWordPieceLowerCase", "BertWordPieceCase")
    )
    retro_bert_vocab_file: str | None = flag(None, "Its vocabulary.")
    retro_bert_batch_size: int = flag(128, "Texts at once, of bert and sentence.")
    retro_bert_max_chunk_length: int = flag(256, "Longest text of bert and sentence.", unit="tokens")

    # -- index
    retro_index_type: str | None = flag(
        None,
        "exact looks at every vector; the others are faiss's (faiss-cpu). Default: by --retro-index-str.",
        choices=INDEX_TYPES,
    )
    retro_index_str: str | None = flag(
        None, "faiss's factory string, such as IVF256,Flat. Default: Flat, which exact does by itself."
    )
    retro_index_ntrain: int = flag(
        1_000_000, "Chunks that an index is trained on, and features of hash are counted in.", unit="chunks"
    )
    retro_index_train_load_fraction: float = flag(1.0, "faiss: share of those that is loaded.")
    retro_index_add_load_fraction: float = flag(1.0, "faiss: share of the chunks that is added.")
    retro_index_delete_training_embeddings: bool = flag(
        True, "Keep the vectors that a faiss index was trained on.", off="--no-retro-index-delete-training-embeddings"
    )
    retro_index_delete_added_codes: bool = flag(
        True, "Keep the vectors that were added to a faiss index.", off="--no-retro-index-delete-added-codes"
    )

    # -- query
    retro_query_ef_search: int = flag(256, "faiss: breadth of the search in HNSW.")
    retro_query_nprobe: int = flag(65536, "faiss: cells of IVF that are looked into.")
    retro_query_num_neighbors_query: int = flag(200, "Neighbours that are searched.")
    retro_query_num_neighbors_save: int = flag(
        20, "Neighbours of other documents that are kept, -1 where there are less."
    )


# -- command line ------------------------------------------------------------------------------------------------------
_REQUIRED = (
    "retro_project_dir",
    "retro_gpt_data_path",
    "retro_gpt_tokenizer_type",
    "retro_gpt_seq_length",
    "retro_gpt_train_samples",
    "retro_gpt_eval_interval",
    "retro_gpt_eval_iters",
    "retro_gpt_global_batch_size",
)
_FAISS_ALONE = ("--retro-index-train-load-fraction", "--retro-index-add-load-fraction", "--retro-query-ef-search",
                "--retro-query-nprobe", "--no-retro-index-delete-training-embeddings",
                "--no-retro-index-delete-added-codes")  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The verb's parser."""
    parser = argparse.ArgumentParser(
        "megatron-lite retro preprocess",
        description="Chunk database, index, and the neighbours of every chunk that training will see.",
        allow_abbrev=False,
    )
    for one in flags_of(RetroPreprocessingConfig):
        one.add_to(parser)
    for one in flags_of(RetroPreprocessingConfig):  # the form that says what is done anyway
        if one.is_switch:
            parser.add_argument("--" + one.dest.replace("_", "-"), dest=one.dest, action="store_true",
                                default=one.default, help=argparse.SUPPRESS)  # fmt: skip
    return parser


def read_config(argv: Sequence[str]) -> tuple[RetroPreprocessingConfig, list[str]]:
    """The flags, and the stages that they ask for. Raises: ConfigError with every problem."""
    parser = build_parser()
    words, notices, problems = translate(list(argv))
    args, unknown = parser.parse_known_args(words)
    if unknown:
        known = [spelling for action in parser._actions for spelling in action.option_strings]
        close = did_you_mean(unknown[0], known, 1)
        raise ConfigError(
            f"megatron-lite retro preprocess has no flag {unknown[0]}"
            + (f"; did you mean {close[0]}?" if close else ""),
            fix="megatron-lite retro preprocess --help",
        )
    for notice in notices:
        print_rank_0(notice)
    config = from_namespace(RetroPreprocessingConfig, args)
    if config.bert_embedder_type is not None:
        meant = {"megatron": "bert", "huggingface": "sentence"}[config.bert_embedder_type]
        if config.retro_embedder not in ("hash", meant):
            problems.append(
                ConfigError(
                    f"--bert-embedder-type {config.bert_embedder_type} with --retro-embedder {config.retro_embedder}",
                    why=f"it means --retro-embedder {meant}",
                    fix="one of them",
                )
            )
        config.retro_embedder = meant
    problems += list(_problems(config))
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigError("\n".join(map(str, problems)))
    stages = [stage for word in config.retro_tasks.split(",") for stage in TASKS[word.strip()]]
    exact = config.retro_index_type == "exact" or (config.retro_index_type is None and is_exact(config.retro_index_str))
    if exact:
        typed = {word.partition("=")[0] for word in words}
        for name in _FAISS_ALONE:
            if name in typed:
                warn_rank_0(f"{name} has no effect: the exact search looks at every vector")
    return config, stages


def _problems(config: RetroPreprocessingConfig) -> Iterator[ConfigError]:
    for name in _REQUIRED:
        if getattr(config, name) in (None, []):
            yield ConfigError(f"--{name.replace('_', '-')} is missing", fix=f"--{name.replace('_', '-')} ...")
    unknown = [word for word in config.retro_tasks.split(",") if word.strip() not in TASKS]
    if unknown:
        yield ConfigError(
            f"--retro-tasks {','.join(unknown)}", why="no such stage", fix="build, or some of db,index,query"
        )
    for name in ("retro_block_size", "retro_doc_block_size", "retro_gpt_chunk_length", "retro_embedder_dim",
                 "retro_gpt_train_samples", "retro_gpt_seq_length", "retro_gpt_global_batch_size", "retro_index_ntrain",
                 "retro_query_num_neighbors_query", "retro_query_num_neighbors_save", "retro_bert_batch_size",
                 "retro_bert_max_chunk_length", "workers"):  # fmt: skip
        value = getattr(config, name)
        if value is not None and value < 1:
            yield ConfigError(f"--{name.replace('_', '-')} {value}", fix="give 1 or more")
    length, m = config.retro_gpt_seq_length, config.retro_gpt_chunk_length
    if length and m > 0 and length % m:
        yield ConfigError(
            f"--retro-gpt-seq-length {length} with --retro-gpt-chunk-length {m}",
            why="a sample is cut into whole chunks",
            fix=f"--retro-gpt-seq-length {-(-length // m) * m}",
        )
    for name in ("retro_index_train_load_fraction", "retro_index_add_load_fraction", "retro_task_validate"):
        value = getattr(config, name)
        if value is not None and not 0 < value <= 1:
            yield ConfigError(f"--{name.replace('_', '-')} {value}", why="a share in (0, 1]", fix="1.0: all of it")
    if config.retro_index_type == "exact" and not is_exact(config.retro_index_str):
        yield ConfigError(
            f"--retro-index-type exact with --retro-index-str {config.retro_index_str}",
            why="the exact search looks at every vector, as the factory string Flat says",
            fix="--retro-index-type faiss, or leave --retro-index-str out",
        )
    tokenizer = TokenizerConfig(
        tokenizer_type=config.retro_gpt_tokenizer_type,
        tokenizer_model=config.retro_gpt_tokenizer_model,
        vocab_file=config.retro_gpt_vocab_file,
        merge_file=config.retro_gpt_merge_file,
        vocab_size=config.retro_gpt_vocab_size,
    )
    for name in missing_fields(tokenizer):
        yield ConfigError(
            f"--retro-gpt-tokenizer-type {config.retro_gpt_tokenizer_type} without "
            f"--retro-gpt-{name.replace('_', '-')}",
            why="the tokenizer is made from it",
            fix=f"--retro-gpt-{name.replace('_', '-')} ...",
        )
