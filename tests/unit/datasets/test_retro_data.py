"""The chunk database, its search and the samples of Retro: tables, brute force, properties."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.datasets.retro_blocks import Block, BlockTable, blocks_of, read_block, share, width_of, write_block
from megatron_lite.datasets.retro_chunks import (
    DatasetInfo,
    DBDataset,
    chunks_of_documents,
    count_chunks,
    cut,
    is_chunk_block,
    merge,
    share_of_samples,
    without_eod,
)
from megatron_lite.datasets.retro_dataset import RetroDataset, retrieved, tokens_of
from megatron_lite.datasets.retro_embedding import HashEmbedder, count_features
from megatron_lite.datasets.retro_search import (
    ExactIndex,
    FaissIndex,
    add_faiss,
    is_exact,
    keep_strangers,
    train_faiss,
    write_faiss,
)
from megatron_lite.errors import ConfigError, DataError
from tests.unit.datasets.corpora import EOD, write_corpus

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # faiss's, of SWIG


# -- blocks ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("rows", "width"), [(10, 2), (99, 3), (100, 3), (100000, 6), (1234567, 8)])
def test_numbers_in_file_names_have_one_width(rows, width):
    assert width_of(rows) == width


def test_blocks_and_who_makes_them(tmp_path):
    blocks = blocks_of(25, 10, tmp_path)
    assert [block.path.name for block in blocks] == ["000-010.npy", "010-020.npy", "020-025.npy"]
    assert [[block.start for block in share(blocks, q, 2)] for q in (0, 1)] == [[0, 20], [10]]
    assert blocks_of(0, 10, tmp_path) == []


@pytest.mark.parametrize("damage", ["torn", "foreign", "other rows", "missing"])
def test_a_block_is_never_trusted_by_its_name(tmp_path, damage):
    (block,) = blocks_of(5, 10, tmp_path)
    write_block(block.path, {"data": np.arange(10).reshape(5, 2)})
    assert read_block(block) is not None
    if damage == "torn":
        block.path.write_bytes(block.path.read_bytes()[:-8])
    elif damage == "foreign":
        block.path.write_text("no array")
    elif damage == "other rows":
        write_block(block.path, {"data": np.zeros((4, 2))})
    else:
        block.path.unlink()
    assert read_block(block) is None
    with pytest.raises(DataError, match="missing or torn"):
        BlockTable([block])


@settings(max_examples=8)
@given(rows=st.integers(1, 40), size=st.integers(1, 15), step=st.integers(1, 15))
def test_a_table_of_blocks_is_one_array(tmp_path_factory, rows, size, step):
    folder = tmp_path_factory.mktemp("blocks")
    whole = np.arange(2 * rows).reshape(rows, 2)
    blocks = blocks_of(rows, size, folder)
    for block in blocks:
        write_block(block.path, {"data": whole[block.start : block.end]})
    table = BlockTable(blocks)
    assert np.array_equal(np.concatenate([part for _, part in table.slices(step)]), whole)
    assert all(np.array_equal(table[row], whole[row]) for row in range(rows))


# -- chunks ------------------------------------------------------------------------------------------------------------
def letters(tokens):
    """A tokenizer of which some tokens have no text."""
    return " ".join(f"w{token}" for token in tokens if token < 900)


def chunked(corpus, start, end, m=64):
    return chunks_of_documents(corpus, start, end, m, EOD, letters, lambda text: len(text.split()))


def test_documents_of_130_64_and_10_tokens_are_five_chunks(tmp_path):
    documents = [[*range(1, 131), EOD], [*range(1, 65), EOD], [*range(1, 11), EOD]]
    corpus = IndexedDataset(write_corpus(tmp_path / "c", documents))
    made = chunked(corpus, 0, 3)
    assert made["chunks_valid"][:, :3].tolist() == [[0, 0, 64], [0, 64, 128], [0, 128, 130], [1, 0, 64], [2, 0, 10]]
    assert made["chunks_valid"][:, 3].tolist() == [64, 64, 2, 64, 10]
    assert made["doc_offsets"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert without_eod(np.array([EOD]), EOD).size == 0 and cut(0, 64) == []


def test_a_chunk_without_text_is_invalid_and_counted(tmp_path):
    corpus = IndexedDataset(write_corpus(tmp_path / "c", [[1, 2, 900, 901, 3, EOD], [950, 951, EOD]]))
    made = chunked(corpus, 0, 2, m=2)
    assert made["chunks_valid"][:, :3].tolist() == [[0, 0, 2], [0, 4, 5]]
    assert made["chunks_invalid"].tolist() == [[0, 2, 4, 0], [1, 0, 2, 0]]
    assert made["doc_offsets"].tolist() == [[0, 2], [1, 2]]


def database(tmp_path, corpora, train=(2, 1), ntrain=4, m=2, size=2):
    """A merged database of some corpora."""
    opened, infos, all_blocks = [], [], []
    for number, documents in enumerate(corpora):
        corpus = IndexedDataset(write_corpus(tmp_path / f"c{number}", documents))
        blocks = blocks_of(len(corpus), size, tmp_path / str(number), ".npz")
        for block in blocks:
            write_block(block.path, chunked(corpus, block.start, block.end, m))
        opened.append(corpus)
        infos.append(DatasetInfo(0.75 if number == 0 else 0.25, f"c{number}", len(corpus), train[number]))
        all_blocks.append(blocks)
    for info, blocks in zip(infos, all_blocks):
        count_chunks(info, blocks, lambda block: read_block(block, is_chunk_block))
    share_of_samples(infos, ntrain)
    merge(infos, all_blocks, lambda block: read_block(block, is_chunk_block), tmp_path / "merged")
    return infos, opened


CORPORA = (
    [[1, 2, 3, 4, 5, EOD], [6, 7, EOD], [8, 9, 10, EOD]],
    [[11, 12, 13, EOD], [14, EOD]],
)


def test_merged_files_hold_all_chunks_in_order(tmp_path):
    infos, _ = database(tmp_path, CORPORA)
    files = {name: np.load(tmp_path / "merged" / f"{name}.npy") for name in ("train", "valid", "sampled")}
    assert files["train"][:, :4].tolist() == [
        [0, 0, 0, 2], [0, 0, 2, 4], [0, 0, 4, 5], [0, 1, 0, 2], [1, 0, 0, 2], [1, 0, 2, 3],
    ]  # fmt: skip
    assert files["valid"][:, :4].tolist() == [[0, 2, 0, 2], [0, 2, 2, 3], [1, 1, 0, 1]]
    assert files["sampled"].tolist() == files["train"][[0, 1, 2, 4]].tolist(), "the first ones of each, by weight"
    assert [(i.n_chunks, i.n_chunks_train, i.n_chunks_valid, i.n_chunks_sampled) for i in infos] == [
        (6, 4, 2, 3), (3, 2, 1, 1),
    ]  # fmt: skip
    offsets = np.load(tmp_path / "merged" / "train_doc_offsets.npy")
    assert offsets.tolist() == [[0, 0, 3], [0, 1, 4], [1, 0, 6]]


# -- search ------------------------------------------------------------------------------------------------------------
def table(folder, vectors, size=1000):
    blocks = blocks_of(len(vectors), size, folder)
    for block in blocks:
        write_block(block.path, {"data": vectors[block.start : block.end]})
    return BlockTable(blocks)


def brute_force(queries, vectors, k):
    """fp64; ties to the lower row."""
    q, x = queries.astype(np.float64), vectors.astype(np.float64)
    distances = ((q[:, None] - x[None]) ** 2).sum(-1)
    return np.stack([np.lexsort((np.arange(len(x)), d))[:k] for d in distances])


def vectors_with_ties(rows=5000, dim=16, seed=0):
    """Small whole numbers: distances are exact, and many are equal."""
    return np.random.default_rng(seed).integers(-2, 3, (rows, dim)).astype(np.float32)


@pytest.mark.parametrize("k", [1, 7, 200])
def test_exact_search_is_brute_force_ties_included(tmp_path, k):
    vectors, queries = vectors_with_ties(), vectors_with_ties(40, seed=1)
    expected = brute_force(queries, vectors, k)
    for size in (333, 5000):  # neither the blocks nor the other queries have a say
        index = ExactIndex(table(tmp_path / str(size), vectors, size))
        distances, rows = index.search(queries, k)
        assert np.array_equal(rows, expected)
        assert np.array_equal(index.search(queries[3:5], k)[1], expected[3:5])
    reference = ((queries[:, None] - vectors[expected]) ** 2).sum(-1)
    assert np.array_equal(distances, reference)


def test_fewer_vectors_than_neighbours_are_filled_with_none(tmp_path):
    index = ExactIndex(table(tmp_path, vectors_with_ties(3)))
    distances, rows = index.search(vectors_with_ties(2, seed=1), 5)
    assert (rows[:, 3:] == -1).all() and np.isinf(distances[:, 3:]).all() and (np.sort(rows[:, :3]) == range(3)).all()


@pytest.mark.parametrize("factory", ["Flat", "IVF8,Flat", "HNSW16"])
def test_faiss_finds_what_the_exact_search_finds(tmp_path, factory):
    pytest.importorskip("faiss")
    vectors = np.random.default_rng(0).standard_normal((2000, 16)).astype(np.float32)
    queries = np.random.default_rng(1).standard_normal((30, 16)).astype(np.float32)
    index = train_faiss(vectors[:1000], factory)
    assert list(add_faiss(index, [vectors[:700], vectors[700:]])) == [700, 2000]
    write_faiss(index, tmp_path / "added.faissindex")
    found = FaissIndex(tmp_path / "added.faissindex", ef_search=256, nprobe=65536).search(queries, 10)[1]
    expected = ExactIndex(table(tmp_path, vectors)).search(queries, 10)[1]
    same = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, expected)])
    assert same == 1.0 if factory != "HNSW16" else same > 0.95
    with pytest.raises(ConfigError, match="--retro-index-str nonsense"):
        train_faiss(vectors, "nonsense")


def test_flat_strings_need_no_faiss():
    assert is_exact(None) and is_exact("Flat") and is_exact("IDMap, Flat") and not is_exact("IVF8,Flat")


def test_neighbours_of_the_own_documents_are_dropped_the_others_kept_in_order(tmp_path):
    """The worked example: documents 0 0 1 1 2 of data set 0, and document 0 of data set 1, which is another one."""
    vectors = np.array([[0, 0], [1, 0], [0.9, 0.1], [0, 1], [1, 1], [0.95, 0]], np.float32)
    documents = np.array([0, 0, 1, 1, 2, 1 << 32])
    index = ExactIndex(table(tmp_path, vectors))
    _, rows = index.search(np.array([[1, 0], [0, 0.9]], np.float32), 4)
    assert rows.tolist() == [[1, 5, 2, 0], [3, 0, 4, 2]]
    own = [np.array([0]), np.array([0])]
    assert keep_strangers(rows, documents[rows], own, 2).tolist() == [[5, 2], [3, 4]]
    assert keep_strangers(rows, documents[rows], [np.array([0, 1]), np.array([0, 1, 2])], 3).tolist() == [
        [5, -1, -1], [-1, -1, -1],
    ]  # fmt: skip


# -- the embedder that needs nothing -----------------------------------------------------------------------------------
TEXTS = [
    "The cat sat on the mat.",
    "the CAT sat on a mat",
    "Quarterly revenue rose sharply",
    "",
    "?!",
    "gradient " * 40,
]


def test_like_texts_have_near_vectors_and_no_vector_depends_on_others():
    embedder = HashEmbedder(256, count_features(TEXTS), len(TEXTS))
    vectors = embedder.embed(TEXTS)
    assert vectors.dtype == np.float32 and vectors.shape == (6, 256)
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > 0.6 > 0.2 > far
    assert not vectors[3:5].any(), "without words: zero"
    np.testing.assert_allclose(np.linalg.norm(vectors[[0, 1, 2, 5]], axis=1), 1, rtol=1e-6)
    again = HashEmbedder(256, count_features(TEXTS), len(TEXTS))
    assert np.array_equal(again.embed(TEXTS[::-1])[::-1], vectors)
    assert np.array_equal(again.embed_text(TEXTS[5]), vectors[5])


def slow_vector(text, dim):
    """Feature by feature, in Python's whole numbers."""
    salts = {name: 0xD1B54A32D192ED03 * (i + 1) % 2**64 for i, name in enumerate(("word", "pair", 3, 4, 5))}

    def polynomial(numbers):
        h = 0
        for number in numbers:
            h = (h * 0x9E3779B97F4A7C15 + number) % 2**64
        return h

    def mixed(x, kind):
        x = (x + salts[kind]) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    words = text.lower().split()
    hashes = [mixed(polynomial(map(ord, word)), "word") for word in words]
    features = hashes + [mixed((a * 0x9E3779B97F4A7C15 + b) % 2**64, "pair") for a, b in zip(hashes, hashes[1:])]
    for word in words:
        for n in (3, 4, 5):
            features += [mixed(polynomial(map(ord, word[i : i + n])), n) for i in range(len(word) - n + 1)]
    vector = np.zeros(dim)
    for h in features:
        vector[h % 2**32 % dim] += -1 if h >> 32 & 1 else 1
    return vector / np.linalg.norm(vector)


def test_vectors_are_the_sum_of_their_features():
    text = "Retrieval enhanced transformers look up zw\u00f6lf NAMES"
    np.testing.assert_allclose(HashEmbedder(32).embed_text(text), slow_vector(text, 32), atol=1e-6)


def test_vectors_are_those_of_every_platform():
    """Fixed numbers: another hash, or another order of its features, would make old projects useless."""
    vector = HashEmbedder(8).embed_text("Retrieval enhanced transformers")
    expected = [0.480384, -0.640513, -0.320256, 0.160128, -0.320256, -0.160128, -0.320256, 0.0]
    np.testing.assert_allclose(vector, expected, atol=1e-6)


def test_features_are_counted_once_a_text():
    once, twice = count_features(["alpha beta"]), count_features(["alpha beta alpha beta", "alpha"])
    assert once.max() == 1 and once.sum() == 2 + 1 + (3 + 2 + 1) + (2 + 1), "words, their pair, parts of alpha, of beta"
    assert twice.max() == 2 and (twice >= once).all()


def test_rare_words_weigh_more_than_common_ones():
    texts = [f"common word{i}" for i in range(50)]
    weighted = HashEmbedder(512, count_features(texts), 50)
    flat = HashEmbedder(512)
    for a, b in (("common word1", "common other"),):
        pair = [a, b]
        assert np.prod(weighted.embed(pair), 0).sum() < np.prod(flat.embed(pair), 0).sum()


def test_many_words_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr("megatron_lite.datasets.retro_embedding._WORDS_KEPT", 10)
    texts = [" ".join(f"t{i}x{j}" for j in range(6)) for i in range(30)]
    embedder = HashEmbedder(64)
    one_by_one = np.stack([embedder.embed_text(text) for text in texts])
    assert len(embedder._row) <= 12
    monkeypatch.undo()
    assert np.array_equal(HashEmbedder(64).embed(texts), one_by_one)


# -- samples -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def db(tmp_path):
    _, corpora = database(tmp_path, CORPORA)
    return DBDataset(tmp_path / "merged" / "train.npy", corpora, 2, EOD)


def test_chunks_are_padded_on_the_right_with_end_of_document(db):
    assert [db[i]["text"].tolist() for i in range(len(db))] == [[1, 2], [3, 4], [5, 0], [6, 7], [11, 12], [13, 0]]
    assert db[4]["doc_id"] == 0 and db.document_of(np.array([4, 5])).tolist() == [1 << 32, 1 << 32]


def test_continuations_stay_in_their_document(db):
    """With wrap, as in Megatron: what follows in the database; a missing neighbour is the last chunk and the first."""
    neighbors = np.array([[0, 2], [5, -1]])
    assert retrieved(neighbors, db, 2).tolist() == [[[0, 1], [2, -1]], [[5, -1], [-1, -1]]]
    assert retrieved(neighbors, db, 2, "wrap").tolist() == [[[0, 1], [2, 3]], [[5, 0], [5, 0]]]
    tokens = tokens_of(retrieved(neighbors, db, 2), db)
    assert tokens.tolist() == [[[1, 2, 3, 4], [5, 0, 0, 0]], [[13, 0, 0, 0], [0, 0, 0, 0]]]


class Samples:
    """Six tokens a sample, which are three chunks."""

    dataset_path = "somewhere"

    def __getitem__(self, idx):
        mask = np.zeros(6, np.float32) if idx is None else np.ones(6, np.float32)
        return {"tokens": np.arange(6) + 10 * (idx or 0), "loss_mask": mask}

    def __len__(self):
        return 2


def test_items_are_gpt_items_with_the_tokens_of_their_neighbours(db, tmp_path):
    neighbors = table(tmp_path / "q", np.array([[0, 3], [3, 0], [5, 4], [-1, -1], [2, 0], [0, 1]]), 4)
    dataset = RetroDataset(
        2, Samples(), neighbors, db, chunk_length=2, num_neighbors=2, num_retrieved_chunks=2, length=5
    )
    assert len(dataset) == 5
    item = dataset[1]
    assert item["neighbor_chunks"].shape == (3, 2, 2) and item["neighbor_tokens"].shape == (3, 2, 4)
    assert item["neighbor_chunks"].dtype == item["neighbor_tokens"].dtype == np.int64
    assert item["neighbor_tokens"][1].tolist() == [[5, 0, 0, 0], [1, 2, 3, 4]]
    assert np.array_equal(dataset[3]["neighbor_tokens"], item["neighbor_tokens"]), (
        "modulo the samples that were queried"
    )
    filler = dataset[None]
    assert not filler["loss_mask"].any() and np.array_equal(filler["neighbor_chunks"], dataset[0]["neighbor_chunks"])


def test_samples_travel_to_the_loaders_workers(db, tmp_path):
    import pickle

    neighbors = table(tmp_path / "q", np.zeros((6, 2), np.int64), 4)
    dataset = RetroDataset(2, Samples(), neighbors, db, chunk_length=2, num_neighbors=1, num_retrieved_chunks=1)
    data = pickle.dumps(dataset)
    assert len(data) < 4000, "files are opened again, not copied"
    loader = torch.utils.data.DataLoader(pickle.loads(data), batch_size=2)
    assert next(iter(loader))["neighbor_tokens"].shape == (2, 3, 1, 2)
    assert Block(0, 0, 4, neighbors.blocks[0].path).rows == 4
