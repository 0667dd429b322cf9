"""`megatron-lite retro preprocess`: corpora -> neighbours of every chunk that training will see.

    db            documents --cut in chunks--> text --embedder reads something of it?--> db/
    index-train   hash: how often features occur;  faiss: the empty index, trained
    index-add     chunks of db/ --embedder--> vectors, searched as they are (exact) or added to the index (faiss)
    query         samples --cut in chunks--> embedder --search--> not of the sample's own documents --> query/

Every stage is made of blocks (retro_blocks), by processes and ranks (retro_workers): a run that was stopped goes on
where it was. What a stage was made from is written beside it; other settings are refused, not mixed in. At the end
config.json names everything that training needs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.cli.retro_config import RetroPreprocessingConfig, read_config
from megatron_lite.cli.retro_embedders import hash_counts_path
from megatron_lite.cli.retro_tasks import (
    State,
    added_path,
    chunk_block,
    count_block,
    dataset_config,
    embed_block,
    index_folder,
    is_exact,
    query_block,
    vector_blocks,
)
from megatron_lite.cli.retro_workers import Crew, remove
from megatron_lite.datasets import retro_search
from megatron_lite.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron_lite.datasets.retro_blocks import ONE, Arrays, Block, blocks_of, read_block
from megatron_lite.datasets.retro_chunks import DatasetInfo, count_chunks, is_chunk_block, merge, share_of_samples
from megatron_lite.datasets.retro_embedding import HashEmbedder
from megatron_lite.datasets.retro_project import SPLITS, RetroProject, hash_of, read_json, samples_of, write_json
from megatron_lite.errors import DataError
from megatron_lite.log import print_rank_0
from megatron_lite.training.launch import read_launch

_NOT_SETTINGS = ("retro_project_dir", "retro_tasks", "bert_embedder_type", "retro_task_validate", "workers",
                 "retro_gpt_data_path")  # fmt: skip


@dataclass
class Stages:
    """The stages of one run over a project."""

    project: RetroProject
    crew: Crew

    def run(self, tasks: Sequence[str]) -> None:
        """In the order of the pipeline, whatever the order of the words. Says what each did and how long it took."""
        for name, work in self._all().items():
            if name in tasks:
                print_rank_0(f"\n[{name}]")
                begin = time.monotonic()
                work()
                print_rank_0(f"  {name}: {time.monotonic() - begin:.1f} s")

    def _all(self) -> dict[str, Callable[[], None]]:
        return {
            "db": self.make_db,
            "index-train": self.train_index,
            "index-add": self.add_to_index,
            "query": self.query,
        }

    # -- db
    def make_db(self) -> None:
        """Chunks of every data set, then all together."""
        project, state = self.project, self.crew.state()
        folder = project.folder / "db"
        self._is_made_from(folder, self.db_identity())
        infos, all_blocks = [], []
        train_share = parse_and_normalize_split(project["retro_gpt_split"])[0]
        prefixes, weights = project.blend
        for number, (prefix, corpus) in enumerate(zip(prefixes, state.corpora)):
            name = project["retro_gpt_data_path"][number * (2 if weights else 1) + (1 if weights else 0)]
            blocks = blocks_of(
                len(corpus), project["retro_doc_block_size"], folder / "individual" / f"{number}", ".npz"
            )
            made = self.crew.make(
                f"cutting {os.path.basename(prefix)}",
                blocks,
                partial(chunk_block, number),
                "documents",
                is_chunk_block,
            )
            print_rank_0(f"  {prefix}: {len(corpus)} documents in {len(blocks)} blocks, {made} made now")
            infos.append(
                DatasetInfo(weights[number] if weights else 1.0, name, len(corpus), int(train_share * len(corpus)))
            )
            all_blocks.append(blocks)
        if self.crew.is_first:
            self._merge(infos, all_blocks)
        self.crew.wait_for("the merged database", lambda: self._merged_infos() is not None)
        for record in self._merged_infos() or []:
            print_rank_0(
                f"  {record['prefix']}: {record['n_chunks']} chunks, {record['n_chunks_train']} of them to retrieve "
                f"from, {record['n_chunks_invalid']} without text"
            )
        if not sum(record["n_chunks_train"] for record in self._merged_infos() or []):
            raise DataError(
                "there is no chunk to retrieve from",
                why=f"--retro-gpt-split {project['retro_gpt_split']} leaves no document to train on, or none has text",
                fix="more documents",
            )

    def _merge(self, infos: list[DatasetInfo], blocks: list[list[Block]]) -> None:
        for info, own in zip(infos, blocks):
            count_chunks(info, own, _chunks)
        share_of_samples(infos, self.project["retro_index_ntrain"])
        records = [asdict(info) for info in infos]
        if self._merged_infos() != records or not self._merged_is_whole(records):
            merge(infos, blocks, _chunks, self.project.merged("train").parent)
            write_json(self.project.folder / "db" / "indexed_dataset_infos.json", records)

    def _merged_infos(self) -> Any:
        return read_json(self.project.folder / "db" / "indexed_dataset_infos.json")

    def _merged_is_whole(self, records: list[dict[str, Any]]) -> bool:
        for name in ("train", "valid", "sampled"):
            try:
                rows = len(np.load(self.project.merged(name), mmap_mode="r"))
            except (OSError, ValueError):
                return False
            if rows != sum(record[f"n_chunks_{name}"] for record in records):
                return False
        return True

    def db_identity(self) -> dict[str, Any]:
        """What the database depends on."""
        project, state = self.project, self.crew.state()
        corpora = [[len(one), int(one.sequence_lengths.sum(dtype=np.int64))] for one in state.corpora]
        return {
            "data": project["retro_gpt_data_path"],
            "sequences and tokens": corpora,
            "split": project["retro_gpt_split"],
            "chunk length": state.chunk_length,
            "documents of a block": project["retro_doc_block_size"],
            "chunks to train on": project["retro_index_ntrain"],
            "what reads texts": project["retro_embedder"],
        }

    # -- index
    def index_identity(self) -> dict[str, Any]:
        """What the index depends on."""
        project = self.project
        identity = {
            "db": hash_of(read_json(project.folder / "db" / "made_from.json") or {}),
            "rows of a block": project["retro_block_size"],
            **self.crew.state().embedder.identity(),
        }
        if not is_exact(project):
            fractions = [project["retro_index_train_load_fraction"], project["retro_index_add_load_fraction"]]
            identity |= {"index": project["retro_index_str"] or "Flat", "fractions": fractions}
        return identity

    def train_index(self) -> None:
        """What is learned from a part of the chunks."""
        project, folder = self.project, index_folder(self.project)
        self._needs(project.merged("sampled"), "db")
        self._is_made_from(folder, self.index_identity())
        if project["retro_embedder"] == "hash":
            self._count()
        if is_exact(project):
            print_rank_0("  exact search: there is no index to train")
            return
        if self._trained_path().exists() or added_path(project).exists():
            print_rank_0(f"  {self._trained_path().name}: there")
            return
        blocks = vector_blocks(project, "sampled", project.folder / "index" / "train_emb" / "blocks")
        self.crew.make("embedding chunks to train on", blocks, partial(embed_block, "sampled"))
        if self.crew.is_first:
            share = project["retro_index_train_load_fraction"]
            parts = [np.asarray(read_block(block)[ONE][: int(share * block.rows)]) for block in blocks]  # type: ignore[index]
            vectors = np.concatenate(parts)
            print_rank_0(f"  training {folder.name} on {len(vectors)} vectors")
            retro_search.write_faiss(retro_search.train_faiss(vectors, folder.name), self._trained_path())
            if project["retro_index_delete_training_embeddings"]:
                remove(blocks[0].path.parent)
        self.crew.wait_for("the trained index", lambda: self._trained_path().exists())

    def _count(self) -> None:
        """How often features occur, which `hash` weighs them by."""
        path = hash_counts_path(self.project)
        identity = hash_of(read_json(self.project.folder / "db" / "made_from.json") or {})
        done = path.with_suffix(".json")
        if not (path.exists() and read_json(done) == {"db": identity}):
            blocks = vector_blocks(self.project, "sampled", path.parent / "counts")
            self.crew.make("counting features", blocks, count_block, check=lambda _, arrays: arrays[ONE].ndim == 1)
            if self.crew.is_first:
                counts = np.sum([_any_block(block) for block in blocks], axis=0)
                HashEmbedder.save_counts(path, counts, blocks[-1].end if blocks else 0)
                write_json(done, {"db": identity})
                remove(path.parent / "counts")
            self.crew.wait_for("the features' counts", lambda: read_json(done) == {"db": identity})
            self.crew.forget_state()
        print_rank_0("  features are counted")

    def _trained_path(self) -> Path:
        return index_folder(self.project) / f"empty_{self.project['retro_index_train_load_fraction']:.3f}.faissindex"

    def add_to_index(self) -> None:
        """Vectors of all chunks."""
        project, folder = self.project, index_folder(self.project)
        self._needs(project.merged("train"), "db")
        if project["retro_embedder"] == "hash":
            self._needs(hash_counts_path(project), "index-train")
        if not is_exact(project):
            if added_path(project).exists():
                print_rank_0(f"  {added_path(project).name}: there")
                return
            self._needs(self._trained_path(), "index-train")
        self._is_made_from(folder, self.index_identity())
        blocks = vector_blocks(project, "train", folder / "vectors")
        made = self.crew.make("embedding chunks", blocks, partial(embed_block, "train"))
        print_rank_0(f"  {blocks[-1].end} vectors in {len(blocks)} blocks, {made} made now")
        if is_exact(project):
            return
        if self.crew.is_first:
            self._add(blocks)
        self.crew.wait_for("the index", lambda: added_path(project).exists())

    def _add(self, blocks: list[Block]) -> None:
        faiss = retro_search.faiss_module()
        index = faiss.read_index(str(self._trained_path()))
        share = self.project["retro_index_add_load_fraction"]
        if share < 1:
            # Rows keep their numbers: what is left out of a block leaves a gap, so numbers are given with the vectors.
            numbers = [np.arange(block.start, block.start + int(share * block.rows)) for block in blocks]
            for block, ids in zip(blocks, numbers):
                index.add_with_ids(np.array(read_block(block)[ONE][: len(ids)]), ids)  # type: ignore[index]
        else:
            for _ in retro_search.add_faiss(index, (read_block(block)[ONE] for block in blocks)):  # type: ignore[index]
                pass
        retro_search.write_faiss(index, added_path(self.project))
        if self.project["retro_index_delete_added_codes"]:
            remove(blocks[0].path.parent)

    # -- query
    def query(self) -> None:
        """Neighbours of every split's samples; then config.json says where they are."""
        project = self.project
        self._needs(project.merged("train"), "db")
        if is_exact(project):
            last = vector_blocks(project, "train", index_folder(project) / "vectors")[-1]
            self._needs(last.path, "index")
        else:
            self._needs(added_path(project), "index")
        state: State = self.crew.state()
        config = dataset_config(project, state.tokenizer)
        chunks = project["retro_gpt_seq_length"] // state.chunk_length
        directories: dict[str, str | None] = {}
        for split, size in zip(SPLITS, project.sizes):
            if not size or state.dataset(split) is None:
                directories[split] = None
                print_rank_0(f"  {split}: no samples")
                continue
            samples = samples_of(config, split, size, state.chunk_length)
            search = {
                "index": self.index_identity(),
                "rows of a block": project["retro_block_size"],
                "searched": project["retro_query_num_neighbors_query"],
                "kept": project["retro_query_num_neighbors_save"],
            }
            if not is_exact(project):
                search |= {"ef": project["retro_query_ef_search"], "nprobe": project["retro_query_nprobe"]}
            directories[split] = f"{split}_{hash_of({'samples': samples, 'search': search})}"
            folder = project.folder / "query" / str(directories[split])
            if self.crew.is_first:
                write_json(folder / "samples.json", samples)
            blocks = blocks_of(size * chunks, project["retro_block_size"], folder)
            made = self.crew.make(f"searching for {split}", blocks, partial(query_block, split))
            print_rank_0(f"  {split}: {size} samples of {chunks} chunks in {len(blocks)} blocks, {made} made now")
            print_rank_0("  " + " " * len(split) + "  " + found(blocks))
        project.settings["retro_neighbor_dirs"] = directories
        if self.crew.is_first:
            project.write()
            print_rank_0(f"  wrote {project.folder / 'config.json'}")

    # -- order and identity
    def _needs(self, path: Path, stage: str) -> None:
        if not path.exists():
            raise DataError(
                f"{path} is not there",
                why=f"the stage {stage} makes it",
                fix=f"--retro-tasks {stage} first, or --retro-tasks build for all",
            )

    def _is_made_from(self, folder: Path, identity: dict[str, Any]) -> None:
        """Write down what a stage is made from, or compare.

        Raises: DataError that names what has changed.
        """
        path = folder / "made_from.json"
        before = read_json(path)
        if before is None:
            if self.crew.is_first:
                write_json(path, identity)
            self.crew.wait_for(str(path), path.exists)
        elif before != identity:
            changed = [f"{name}: {before.get(name)} then, {value} now" for name, value in identity.items()
                       if before.get(name) != value]  # fmt: skip
            raise DataError(
                f"{folder} was made from something else\n    " + "\n    ".join(changed),
                why="its files would be mixed with those of other settings",
                fix=f"the settings of then, another --retro-project-dir, or: rm -r {folder}",
            )


def _any_block(block: Block) -> np.ndarray:
    """An array that has another number of rows than its block."""
    arrays = read_block(block, lambda *_: True)
    assert arrays is not None, f"{block.path} was there a moment ago"
    return np.asarray(arrays[ONE])


def _chunks(block: Block) -> Arrays:
    arrays = read_block(block, is_chunk_block)
    assert arrays is not None, f"{block.path} was there a moment ago"
    return arrays


def found(blocks: Sequence[Block]) -> str:
    """How many chunks have neighbours, for the log."""
    rows = some = full = total = 0
    for block in blocks:
        arrays = read_block(block)
        assert arrays is not None
        counts = (np.asarray(arrays[ONE]) >= 0).sum(1)
        rows, some, full = rows + len(counts), some + int((counts > 0).sum()), full + int((counts > 1).sum())
        total += int(counts.sum())
    return f"{some} of {rows} chunks have a neighbour, {full} two or more; {total / max(rows, 1):.1f} on average"


def project_of(config: RetroPreprocessingConfig) -> RetroProject:
    """The project that the flags describe; what an earlier run found out is kept."""
    assert config.retro_project_dir is not None and config.retro_gpt_data_path is not None
    settings = {name: value for name, value in asdict(config).items() if name not in _NOT_SETTINGS}
    project = RetroProject(config.retro_project_dir, settings)
    for name in ("retro_gpt_tokenizer_model", "retro_gpt_vocab_file", "retro_gpt_merge_file", "retro_bert_vocab_file",
                 "retro_gpt_data_cache_path", "retro_embedder_path"):  # fmt: skip
        project.put_path(name, settings[name])
    project.put_data_path(config.retro_gpt_data_path)
    before = read_json(project.folder / "config.json") or {}
    settings["retro_neighbor_dirs"] = before.get("retro_neighbor_dirs", {})
    return project


def main(argv: Sequence[str]) -> int:
    """The verb."""
    config, stages = read_config(argv)
    project = project_of(config)
    if not is_exact(project):
        retro_search.faiss_module()  # hours before it is used
    launch = read_launch()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # --workers says how many processors are used
    make_state = partial(State, str(project.folder), project.settings)
    workers = config.workers or max(1, (os.cpu_count() or 1) // launch.local_world_size)
    crew = Crew(make_state, workers, launch.rank, launch.world_size, config.retro_task_validate)
    begin = time.monotonic()
    Stages(project, crew).run(stages)
    size = sum(path.stat().st_size for path in project.folder.rglob("*") if path.is_file() and not path.is_symlink())
    print_rank_0(
        f"\n{', '.join(stages)}: done in {time.monotonic() - begin:.1f} s with {workers} processes"
        + (f" on each of {launch.world_size} ranks" if launch.world_size > 1 else "")
        + f"; {project.folder} holds {size / 1e6:,.1f} MB"
    )
    if "query" in stages:
        print_rank_0(f"train with: pretrain_retro.py --retro-project-dir {project.folder} --retro-add-retriever ...")
    return 0
