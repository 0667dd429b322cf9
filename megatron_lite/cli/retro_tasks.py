"""What one process of Retro's preprocessing knows, and how it makes one block of a stage: (state, block, advance) ->
arrays. See `retro_preprocess` for the order of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.cli.retro_embedders import make_embedder
from megatron_lite.cli.retro_workers import Advance
from megatron_lite.datasets import retro_search
from megatron_lite.datasets.retro_blocks import ONE, Arrays, Block, BlockTable, blocks_of
from megatron_lite.datasets.retro_chunks import DBDataset, chunks_of_documents
from megatron_lite.datasets.retro_dataset import MultiSplitGPTDatasetConfig, gpt_datasets, mid_of
from megatron_lite.datasets.retro_embedding import Embedder, count_features
from megatron_lite.datasets.retro_project import SPLITS, RetroProject
from megatron_lite.tokenizers.build_tokenizer import build_tokenizer
from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig

_TEXTS_AT_ONCE = 1000
_QUERIES_AT_ONCE = 16384


# -- what every process needs ------------------------------------------------------------------------------------------
class State:
    """Tokenizer, corpora and embedder of a project, in one process.

    Args:
        folder, settings: of the project.
    """

    def __init__(self, folder: str, settings: dict[str, Any]):
        self.project = RetroProject(folder, settings)
        self.tokenizer = build_tokenizer(tokenizer_config(self.project))
        self.corpora = self.project.corpora()
        self.embedder: Embedder = make_embedder(self.project)
        self.chunk_length: int = self.project["retro_gpt_chunk_length"]
        self._datasets: list[Any] | None = None
        self._index: retro_search.Index | None = None

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens -> text, without end-of-document tokens."""
        eod = self.tokenizer.eod
        return self.tokenizer.detokenize([token for token in tokens if token != eod])

    def db(self, name: str = "train") -> DBDataset:
        """A file of the merged database."""
        return DBDataset(self.project.merged(name), self.corpora, self.chunk_length, self.tokenizer.eod)

    def dataset(self, split: str) -> Any:
        """The GPT samples of a split, with their documents."""
        if self._datasets is None:
            self._datasets = gpt_datasets(dataset_config(self.project, self.tokenizer), self.project.sizes)
        return self._datasets[SPLITS.index(split)]

    def index(self) -> retro_search.Index:
        """What is searched."""
        if self._index is None:
            self._index = open_index(self.project)
        return self._index


def tokenizer_config(project: RetroProject) -> TokenizerConfig:
    """The tokenizer of the data."""
    return TokenizerConfig(
        tokenizer_type=project["retro_gpt_tokenizer_type"],
        tokenizer_model=project["retro_gpt_tokenizer_model"],
        vocab_file=project["retro_gpt_vocab_file"],
        merge_file=project["retro_gpt_merge_file"],
        vocab_size=project["retro_gpt_vocab_size"],
    )


def dataset_config(project: RetroProject, tokenizer: Any) -> MultiSplitGPTDatasetConfig:
    """The options of the samples, as far as their order depends on them."""
    prefixes, weights = project.blend
    return MultiSplitGPTDatasetConfig(
        random_seed=project["retro_gpt_seed"],
        sequence_length=project["retro_gpt_seq_length"],
        blend=(prefixes, weights),
        split=project["retro_gpt_split"],
        split_preprocessing=project["retro_gpt_split"],
        path_to_cache=project["retro_gpt_data_cache_path"] or str(project.folder / "cache"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        return_document_ids=True,
    )


# -- tasks: (state, block, advance) -> arrays of the block -------------------------------------------------------------
def chunk_block(dataset: int, state: State, block: Block, advance: Advance) -> Arrays:
    """Documents of a data set, cut."""
    return chunks_of_documents(
        state.corpora[dataset],
        block.start,
        block.end,
        state.chunk_length,
        state.tokenizer.eod,
        state.text,
        state.embedder.length,
        advance,
    )


def count_block(state: State, block: Block, advance: Advance) -> Arrays:
    """How many chunks have each feature."""
    return {ONE: sum(map(count_features, _texts(state, "sampled", block, advance)), np.int64(0))}


def embed_block(name: str, state: State, block: Block, advance: Advance) -> Arrays:
    """Vectors of the chunks of a merged file."""
    vectors = np.empty((block.rows, state.embedder.dim), np.float32)
    at = 0
    for texts in _texts(state, name, block, advance):
        vectors[at : at + len(texts)] = state.embedder.embed(texts)
        at += len(texts)
    return {ONE: vectors}


def _texts(state: State, name: str, block: Block, advance: Advance) -> Any:
    db = state.db(name)
    for start in range(block.start, block.end, _TEXTS_AT_ONCE):
        end = min(start + _TEXTS_AT_ONCE, block.end)
        yield [state.text(db.tokens(row).tolist()) for row in range(start, end)]
        advance(end - start)


def query_block(split: str, state: State, block: Block, advance: Advance) -> Arrays:
    """Neighbours of the chunks of samples."""
    project, db, dataset = state.project, state.db(), state.dataset(split)
    number_of = {prefix: number for number, prefix in enumerate(project.blend[0])}
    m = state.chunk_length
    chunks = project["retro_gpt_seq_length"] // m
    keep, k = project["retro_query_num_neighbors_save"], project["retro_query_num_neighbors_query"]
    neighbors = np.empty((block.rows, keep), np.int64)
    for start in range(block.start, block.end, _QUERIES_AT_ONCE):
        end = min(start + _QUERIES_AT_ONCE, block.end)
        texts: list[str] = []
        own: list[np.ndarray] = []
        for sample in range(start // chunks, -(-end // chunks)):
            mid, number = mid_of(dataset, sample)
            item = mid[number]
            documents = (number_of[str(mid.dataset_path)] << 32) | item["document_ids"]
            for chunk in range(chunks):
                if start <= sample * chunks + chunk < end:
                    texts.append(state.text(item["tokens"][chunk * m : (chunk + 1) * m].tolist()))
                    own.append(documents)
        _, rows = state.index().search(state.embedder.embed(texts), min(k, len(db)))
        documents_of_rows = db.document_of(np.where(rows < 0, 0, rows))
        at = start - block.start
        neighbors[at : at + end - start] = retro_search.keep_strangers(rows, documents_of_rows, own, keep)
        advance(end - start)
    return {ONE: neighbors}


# -- the index ---------------------------------------------------------------------------------------------------------
def is_exact(project: RetroProject) -> bool:
    """Whether every vector is looked at by our own search."""
    kind = project["retro_index_type"]
    return kind == "exact" or (kind is None and retro_search.is_exact(project["retro_index_str"]))


def index_folder(project: RetroProject) -> Path:
    """Where the index of these settings lies."""
    if is_exact(project):
        return project.folder / "index" / "exact"
    return project.folder / "index" / "faiss" / (project["retro_index_str"] or "Flat")


def added_path(project: RetroProject) -> Path:
    """The file of a complete faiss index."""
    train, add = project["retro_index_train_load_fraction"], project["retro_index_add_load_fraction"]
    return index_folder(project) / f"added_{train:.3f}_{add:.3f}.faissindex"


def vector_blocks(project: RetroProject, name: str, folder: Path) -> list[Block]:
    """The blocks of the vectors of a merged file."""
    rows = len(np.load(project.merged(name), mmap_mode="r"))
    return blocks_of(rows, project["retro_block_size"], folder)


def open_index(project: RetroProject) -> retro_search.Index:
    """The index that `index-add` made. Raises: DataError where it is not whole."""
    folder = index_folder(project)
    if is_exact(project):
        return retro_search.ExactIndex(BlockTable(vector_blocks(project, "train", folder / "vectors")))
    return retro_search.FaissIndex(added_path(project), project["retro_query_ef_search"], project["retro_query_nprobe"])
