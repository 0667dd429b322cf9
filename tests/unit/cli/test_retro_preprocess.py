"""`megatron-lite retro preprocess` on 50 documents: what it leaves, what it refuses, and that it survives."""

from __future__ import annotations

import hashlib
import json
import random
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.cli import retro_workers
from megatron_lite.cli.retro import main as retro
from megatron_lite.cli.retro_config import read_config
from megatron_lite.cli.retro_preprocess import Stages, project_of
from megatron_lite.cli.retro_tasks import State, dataset_config
from megatron_lite.cli.retro_workers import Crew
from megatron_lite.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron_lite.datasets.retro_blocks import BlockTable, blocks_on_disk
from megatron_lite.datasets.retro_dataset import get_retro_datasets, gpt_datasets, mid_of
from megatron_lite.datasets.retro_project import SPLITS, RetroProject
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.byte_level import ByteTokenizer

_SENTENCES = 40


def write_texts(prefix: Path, count: int, seed: int) -> str:
    """Documents of sentences that several of them share."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(3, 8))) for _ in range(500)]
    sentences = [" ".join(generator.choices(words, k=8)) + "." for _ in range(_SENTENCES)]
    generator = random.Random(seed)
    tokenizer = ByteTokenizer()
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for _ in range(count):
        text = " ".join(generator.choices(sentences, k=generator.randint(2, 5)))
        tokens = [*tokenizer.tokenize(text), tokenizer.eod]
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpora")
    return [write_texts(folder / "a", 30, 1), write_texts(folder / "b", 20, 2)]


def words(folder: Path, corpora: list[str], *more: str) -> list[str]:
    return [
        "--retro-project-dir", str(folder),
        "--retro-gpt-data-path", "0.7", corpora[0], "0.3", corpora[1],
        *"""--retro-gpt-tokenizer-type ByteTokenizer --retro-gpt-seq-length 64 --retro-gpt-chunk-length 16
            --retro-gpt-train-samples 40 --retro-gpt-eval-interval 5 --retro-gpt-eval-iters 1
            --retro-gpt-global-batch-size 4 --retro-gpt-split 90,10,0 --retro-block-size 50 --retro-doc-block-size 7
            --retro-query-num-neighbors-query 60 --retro-query-num-neighbors-save 4 --retro-embedder-dim 64
            --workers 1""".split(),
        *more,
    ]  # fmt: skip


def digests(folder: Path) -> dict[str, str]:
    """Of every file but the index caches, which have a time in them."""
    return {
        str(path.relative_to(folder)): hashlib.md5(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "cache" not in path.parts
    }


@pytest.fixture(scope="module")
def project(tmp_path_factory, corpora) -> Path:
    """A whole run."""
    folder = tmp_path_factory.mktemp("projects") / "whole"
    assert retro(["preprocess", *words(folder, corpora)]) == 0
    return folder


def state_of(folder: Path) -> State:
    return State(str(folder), RetroProject.read(folder).settings)


def test_no_saved_neighbour_shares_a_document_with_its_sample(project):
    """Every chunk of every sample, against the documents of its whole sample, in both data sets."""
    state, checked = state_of(project), 0
    db = state.db()
    for split in ("train", "valid"):
        dataset, folder = state.dataset(split), state.project.neighbor_dir(split)
        table = BlockTable(blocks_on_disk(folder))
        for sample in range(len(table) // 4):
            mid, number = mid_of(dataset, sample)
            which = [Path(prefix).name for prefix in state.project.blend[0]].index(Path(mid.dataset_path).name)
            # By hand: which documents the sample's tokens come from.
            k = int(mid.shuffle_index[number])
            (first, _), (last, _) = mid.sample_index[k].tolist(), mid.sample_index[k + 1].tolist()
            own = {(which, int(document)) for document in mid.document_index[first : last + 1]}
            for row in table.rows_between(sample * 4, sample * 4 + 4):
                found = row[row >= 0]
                assert not own & {(int(db.chunks[n, 0]), int(db.chunks[n, 1])) for n in found}
                assert (row[len(found) :] == -1).all(), "missing ones are at the end"
                checked += len(found)
    assert checked > 500


def test_neighbours_are_the_nearest_of_other_documents(project):
    """Brute force in fp64 over all vectors, for some chunks."""
    state = state_of(project)
    db, dataset = state.db(), state.dataset("train")
    vectors = np.concatenate([np.load(p) for p in sorted((project / "index/exact/vectors").glob("*.npy"))])
    table = BlockTable(blocks_on_disk(state.project.neighbor_dir("train")))
    for sample in range(0, 40, 7):
        mid, number = mid_of(dataset, sample)
        item = mid[number]
        which = 0 if mid.dataset_path == state.project.blend[0][0] else 1
        for chunk in range(4):
            query = state.embedder.embed_text(state.text(item["tokens"][chunk * 16 : chunk * 16 + 16].tolist()))
            distances = ((vectors.astype(np.float64) - query) ** 2).sum(1)
            order = np.lexsort((np.arange(len(vectors)), np.round(distances, 5)))[:60]
            strangers = [n for n in order if not (db.chunks[n, 0] == which and db.chunks[n, 1] in item["document_ids"])]
            found = table[sample * 4 + chunk]
            np.testing.assert_allclose(distances[found[found >= 0]], distances[strangers[:4]], atol=1e-4)


def test_ranks_and_processes_leave_the_same_bytes(project, corpora, tmp_path, world):
    """Two ranks that share a directory, and two processes of one."""
    ranks, processes = tmp_path / "ranks", tmp_path / "processes"
    world(2).run(_on_a_rank, words(ranks, corpora))
    assert retro(["preprocess", *words(processes, corpora), "--workers", "2"]) == 0
    expected = digests(project)
    assert len(expected) > 20 and digests(ranks) == expected and digests(processes) == expected


def _on_a_rank(argv: list[str]) -> None:
    import torch.distributed as dist

    config, stages = read_config(argv)
    project = project_of(config)
    make_state = partial(State, str(project.folder), project.settings)
    Stages(project, Crew(make_state, 1, dist.get_rank(), dist.get_world_size())).run(stages)


@pytest.mark.parametrize("after", [2, 9, 20])
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(project, corpora, tmp_path, monkeypatch, after):
    """Killed before its `after`-th block has its name."""
    written = []

    def dies(path, arrays):
        written.append(path)
        if len(written) == after:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.1.tmp").write_bytes(b"half of a block")
            raise KeyboardInterrupt
        write_block(path, arrays)

    write_block = retro_workers.write_block
    monkeypatch.setattr(retro_workers, "write_block", dies)
    folder = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        retro(["preprocess", *words(folder, corpora)])
    again = []
    monkeypatch.setattr(
        retro_workers, "write_block", lambda path, arrays: (again.append(path), write_block(path, arrays))
    )
    retro(["preprocess", *words(folder, corpora)])
    assert not set(written[: after - 1]) & set(again), "what was done is not made again"
    for leftover in folder.rglob(".*.tmp"):
        leftover.unlink()
    assert digests(folder) == digests(project)


def test_a_second_run_makes_nothing_and_validation_finds_damage(project, corpora, tmp_path, capsys):
    folder = tmp_path / "copy"
    retro(["preprocess", *words(folder, corpora)])
    capsys.readouterr()
    retro(["preprocess", *words(folder, corpora), "--retro-task-validate", "1.0"])
    out = capsys.readouterr().out
    assert "blocks, 0 made now" in out and " 1 made now" not in out
    vectors = sorted((folder / "index/exact/vectors").glob("*.npy"))[1]
    damaged = np.load(vectors)
    damaged[3, 3] += 1e-6
    np.save(vectors, damaged)
    with pytest.raises(DataError, match="comes out otherwise") as error:
        retro(["preprocess", *words(folder, corpora), "--retro-task-validate", "1.0"])
    assert vectors.name in str(error.value)


def test_a_stage_alone_needs_the_one_before(corpora, tmp_path):
    folder = tmp_path / "stages"
    for before, stage, needs in (
        (None, "index", "db"), ("db-build", "query", "index"), ("index-build", "query-pretraining-neighbors", None)
    ):  # fmt: skip
        if before:
            retro(["preprocess", *words(folder, corpora), "--retro-tasks", before])
        with pytest.raises(DataError, match=f"--retro-tasks {needs} first") if needs else nullcontext():
            retro(["preprocess", *words(folder, corpora), "--retro-tasks", stage])
    assert json.loads((folder / "config.json").read_text())["retro_neighbor_dirs"]["train"].startswith("train_")


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--retro-gpt-chunk-length", "8"], "chunk length: 16 then, 8 now"),
        (["--retro-embedder-dim", "32"], "dim: 64 then, 32 now"),
        (["--retro-gpt-split", "80,20,0"], "split: 90,10,0 then, 80,20,0 now"),
    ],
)
def test_other_settings_are_not_mixed_into_a_project(project, corpora, more, what):
    before = digests(project)
    with pytest.raises(DataError) as error:
        retro(["preprocess", *words(project, corpora), *more])
    assert what in str(error.value) and "another --retro-project-dir" in str(error.value)
    assert digests(project) == before


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--retro-gpt-seq-length", "60"], "--retro-gpt-seq-length 64"),
        (["--retro-tasks", "db,indx"], "no such stage"),
        (["--retro-index-type", "exact", "--retro-index-str", "IVF8,Flat"], "--retro-index-type faiss"),
        (["--retro-gpt-tokenizer-type", "GPT2BPETokenizer"], "--retro-gpt-vocab-file"),
        (["--retro-indx-str", "Flat"], "did you mean --retro-index-str"),
        (["--retro-embedder", "nowhere:Thing"], "nowhere"),
        (["--retro-embedder", "sentence"], "--retro-embedder-path"),
        (["--retro-gpt-data-path", "not/there"], "there is no not/there.bin"),
    ],
)
def test_what_cannot_be_is_said_with_a_way_out(corpora, tmp_path, more, what):
    with pytest.raises((ConfigError, DataError)) as error:
        retro(["preprocess", *words(tmp_path / "p", corpora), *more])
    assert what in str(error.value)


def test_every_missing_flag_is_named_at_once():
    with pytest.raises(ConfigError) as error:
        retro(["preprocess"])
    for flag in ("--retro-project-dir", "--retro-gpt-data-path", "--retro-gpt-train-samples"):
        assert f"{flag} is missing" in str(error.value)


def test_faiss_is_asked_for_before_hours_of_work(corpora, tmp_path, monkeypatch):
    import importlib

    def missing(name, *rest):
        if name == "faiss":
            raise ImportError(name)
        return real(name, *rest)

    real = importlib.import_module
    monkeypatch.setattr("megatron_lite.datasets.retro_search.importlib.import_module", missing)
    with pytest.raises(ConfigError, match="faiss-cpu"):
        retro(["preprocess", *words(tmp_path / "p", corpora), "--retro-index-str", "OPQ32_64,IVF65536_HNSW8,PQ32"])
    assert not (tmp_path / "p").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_faiss_flat_finds_what_the_exact_search_found(project, corpora, tmp_path):
    pytest.importorskip("faiss")
    folder = tmp_path / "faiss"
    retro(["preprocess", *words(folder, corpora), "--retro-index-type", "faiss-par-add", "--retro-index-str", "Flat"])
    tables = [BlockTable(blocks_on_disk(RetroProject.read(at).neighbor_dir("train"))) for at in (project, folder)]
    a, b = (table.rows_between(0, len(table)) for table in tables)
    assert (a == b).mean() > 0.9, "but for ties"
    assert not (folder / "index/faiss/Flat/vectors").exists(), "added vectors have served"
    assert not (folder / "index/train_emb/blocks").exists()


def test_a_folder_of_a_sentence_model_embeds(corpora, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *"abcdefghijklmnopqrstuvwxyz",
        *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
        ".",
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    tokenizer = transformers.BertTokenizerFast.from_pretrained(tmp_path)
    model = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=len(tokens), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
    )
    tokenizer.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    folder = tmp_path / "p"
    more = [
        "--retro-embedder",
        "sentence",
        "--retro-embedder-path",
        str(tmp_path / "model"),
        "--retro-tasks",
        "db,index",
    ]
    retro(["preprocess", *words(folder, corpora), *more])
    config, _ = read_config(words(folder, corpora, *more))
    state = State(str(folder), project_of(config).settings)
    text = state.text(state.db().tokens(5).tolist())
    ids = tokenizer(text, return_tensors="pt")
    hidden = model.eval()(**ids).last_hidden_state[0, 1:-1].mean(0)
    vectors = np.load(sorted((folder / "index/exact/vectors").glob("*.npy"))[0])
    np.testing.assert_allclose(vectors[5], hidden.detach().numpy(), atol=1e-5)


# -- what training reads -----------------------------------------------------------------------------------------------
def training_config(folder: Path, **changes):
    project = RetroProject.read(folder)
    config = dataset_config(project, ByteTokenizer())
    config.return_document_ids = False
    for name, value in changes.items():
        setattr(config, name, value)
    return project, config


def test_training_reads_what_preprocessing_left(project):
    data = get_retro_datasets(*training_config(project), num_neighbors=2, num_retrieved_chunks=2)
    train, valid, test = data
    assert len(train) == 40 and len(valid) == 16 and test is None
    item = train[7]
    assert item["tokens"].shape == (64,) and item["neighbor_tokens"].shape == (4, 2, 32)
    plain = gpt_datasets(training_config(project)[1], RetroProject.read(project).sizes)[0]
    assert np.array_equal(plain[7]["tokens"], item["tokens"]), "the plain GPT sees the same samples"
    assert SPLITS == ("train", "valid", "test")


def test_other_samples_than_those_that_were_queried_are_refused(project):
    with pytest.raises(DataError, match="seed: 1234 there, 7 here"):
        get_retro_datasets(
            *training_config(project, random_seed=7, path_to_cache=None), num_neighbors=2, num_retrieved_chunks=2
        )
    with pytest.raises(ConfigError, match="--retro-num-neighbors 5"):
        get_retro_datasets(*training_config(project), num_neighbors=5, num_retrieved_chunks=2)


def test_too_few_neighbours_are_refused_or_gone_through_again(corpora, tmp_path):
    folder = tmp_path / "p"
    retro(["preprocess", *words(folder, corpora)])
    sorted(RetroProject.read(folder).neighbor_dir("train").glob("*.npy"))[-1].unlink()
    arguments = dict(num_neighbors=2, num_retrieved_chunks=1)
    with pytest.raises(DataError, match="--retro-no-verify-neighbor-count"):
        get_retro_datasets(*training_config(folder), **arguments)
    train = get_retro_datasets(*training_config(folder), **arguments, verify_neighbor_count=False)[0]
    assert train.num_queried_samples == 150 // 4 and len(train) == 40
    assert np.array_equal(train[39]["tokens"], train[39 - 37]["tokens"])


def test_a_project_can_be_moved_with_its_data(tmp_path):
    import shutil

    folder = tmp_path / "first"
    prefix = write_texts(folder / "data" / "a", 30, 1)
    arguments = words(folder, [prefix, prefix])
    at = arguments.index("--retro-gpt-data-path")
    arguments[at + 1 : at + 5] = ["a"]  # below PROJECT/data
    retro(["preprocess", *arguments])
    shutil.move(folder, tmp_path / "second")
    train = get_retro_datasets(*training_config(tmp_path / "second"), num_neighbors=2, num_retrieved_chunks=2)[0]
    assert train[0]["neighbor_tokens"].shape == (4, 2, 32)
