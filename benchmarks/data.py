"""The data path beside what it cannot do without: preprocessing, index building, loading.

    python benchmarks/data.py                         all parts, tables on standard output
    python benchmarks/data.py preprocess --rounds 5   one part

A part is a function in PARTS: it takes the arguments and returns the lines of its table. Contestants of a part take
turns in one run, so that other load meets all alike; times are medians over the rounds. CPU times count all processes
of a contestant; on a machine with other load they say more than the wall's.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism

import argparse
import contextlib
import io
import itertools
import json
import multiprocessing
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Lines = list[str]


@contextlib.contextmanager
def stopwatch(times: list[tuple[float, float]]) -> Iterator[None]:
    """Appends (wall, CPU) seconds of the block, those of its processes included."""

    def cpu() -> float:
        return sum(
            sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )  # user and system

    wall, used = time.perf_counter(), cpu()
    yield
    times.append((time.perf_counter() - wall, cpu() - used))


def table(head: list[str], rows: list[list[str]]) -> Lines:
    """A table in markdown."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


# -- preprocess --------------------------------------------------------------------------------------------------

_tokenizer: Any = None


def _have_tokenizer(config: Any) -> None:
    global _tokenizer
    from megatron_lite.tokenizers.build_tokenizer import build_tokenizer

    _tokenizer = build_tokenizer(config)


def _count(texts: list[str]) -> int:
    return sum(map(len, _tokenizer.tokenize_batch(texts)))


def _encode_line(line: str) -> tuple[list[int], list[int]]:
    ids = _tokenizer.tokenize(json.loads(line)["text"])
    ids.append(_tokenizer.eod)
    return ids, [len(ids)]


def bare(config: Any, batches: list[list[str]], workers: int) -> None:
    """The tokenizer and nothing else: texts that are in memory go to the workers, ids are counted and dropped."""
    with multiprocessing.get_context("fork").Pool(workers, _have_tokenizer, (config,)) as pool:
        sum(pool.imap(_count, batches))
        pool.close()
        pool.join()


def line_by_line(config: Any, source: str, prefix: str, workers: int) -> None:
    """What megatron-core's script does: `Pool.imap` over the lines in chunks of 32, a document written at a time."""
    from megatron_lite.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron_lite.tokenizers.build_tokenizer import build_tokenizer

    dtype = DType.optimal_dtype(build_tokenizer(config).vocab_size)
    with (
        multiprocessing.get_context("fork").Pool(workers, _have_tokenizer, (config,)) as pool,
        open(source, encoding="utf-8") as lines,
        IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder,
    ):
        for ids, lengths in pool.imap(_encode_line, lines, 32):
            builder.add_document(ids, lengths)
        builder.finalize(f"{prefix}.idx")
        pool.close()
        pool.join()


def ours(config: Any, source: str, prefix: str, workers: int) -> None:
    from megatron_lite.cli.encoder import Recipe
    from megatron_lite.cli.preprocess import preprocess

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        preprocess([source], prefix, Recipe(tokenizer=config, append_eod=True), workers=workers)


def _tokenizers(folder: Path, source: str) -> dict[str, Any]:
    """A SentencePiece model and a byte-level BPE of 8192 tokens each, trained on the corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig
    from megatron_lite.tokenizers.train_sentencepiece import train_sentencepiece

    with open(source, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in itertools.islice(lines, 300)]
    train_sentencepiece(texts, str(folder / "sp.model"), vocab_size=8192)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8192, special_tokens=["</s>"], show_progress=False))
    (folder / "hf").mkdir()
    bpe.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "hf" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return {
        "SentencePiece": TokenizerConfig(
            tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / "sp.model")
        ),
        "Hugging Face": TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "hf")),
    }


def _ratios(times: dict[str, list[tuple[float, float]]], clock: int) -> str:
    """Speed of ours over the bare tokenizer's and over line by line: medians of the rounds' own ratios."""
    return " / ".join(
        f"{statistics.median(a[clock] / b[clock] for a, b in zip(times[who], times['ours'])):.2f}"
        for who in ("bare", "lines")
    )


def preprocess_part(args: argparse.Namespace) -> Lines:
    """`megatron-lite preprocess` beside the bare tokenizer and beside line-by-line `Pool.imap`; targets 0.8 and 1.0."""
    from megatron_lite.cli.corpus import documents, standard_library
    from megatron_lite.cli.jsonl import BLOCK_BYTES

    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, size = str(folder / "in.jsonl"), 0
        with open(source, "w", encoding="utf-8") as out:
            for _, text in documents(standard_library()):
                size += out.write(json.dumps({"text": text}) + "\n")
                if size > args.megabytes * 1e6:
                    break
        batches: list[list[str]] = [[]]
        held = 0
        with open(source, encoding="utf-8") as lines:
            for line in lines:  # as many to a call of the tokenizer as ours has
                if held > BLOCK_BYTES:
                    batches, held = [*batches, []], 0
                batches[-1].append(json.loads(line)["text"])
                held += len(line)
        for kind, config in _tokenizers(folder, source).items():
            for workers in args.workers:
                contestants: dict[str, Callable[[], None]] = {
                    "bare": lambda: bare(config, batches, workers),  # noqa: B023 called before the next turn
                    "lines": lambda: line_by_line(config, source, str(folder / "theirs"), workers),  # noqa: B023
                    "ours": lambda: ours(config, source, str(folder / "ours"), workers),  # noqa: B023
                }
                times: dict[str, list[tuple[float, float]]] = {who: [] for who in contestants}
                for _ in range(args.rounds):
                    for who, run in contestants.items():
                        with stopwatch(times[who]):
                            run()
                for ending in ("bin", "idx"):
                    theirs = (folder / f"theirs.{ending}").read_bytes()
                    assert (folder / f"ours_text_document.{ending}").read_bytes() == theirs, "not the same corpus"
                speed = {who: size / 1e6 / statistics.median(used for _, used in taken) for who, taken in times.items()}
                rows.append(
                    [kind, str(workers)]
                    + [f"{speed[who]:.2f}" for who in contestants]
                    + [_ratios(times, clock) for clock in (1, 0)]
                )
                print(f"{kind}, {workers} workers, (wall, CPU) seconds: {times}", file=sys.stderr)
    head = ["tokenizer", "workers", "bare, MB/s of CPU time", "line by line", "ours"]
    head += ["ours / bare, ours / line by line", "the same, wall"]
    return [f"preprocess: {size / 1e6:.0f} MB of JSONL, {args.rounds} rounds", "", *table(head, rows)]


# -- index -------------------------------------------------------------------------------------------------------

_INDEX_SECONDS, _INDEX_MB = 10.0, 500.0  # targets for 10 million documents

_BUILD_INDEX = """
import json, resource, sys, time
import numpy as np
from megatron_lite.datasets import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig
from megatron_lite.tokenizers.null import NullTokenizer

prefix, cache, samples, sequence_length = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
megabytes = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
loaded = megabytes()
config = GPTDatasetConfig(
    random_seed=1, sequence_length=sequence_length, blend=([prefix], None), split="1,0,0", path_to_cache=cache,
    tokenizer=NullTokenizer(50000), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    create_attention_mask=False,
)
begun = time.perf_counter()
dataset = BlendedMegatronDatasetBuilder(GPTDataset, [samples or None, 0, 0], lambda: True, config).build()[0]
took = time.perf_counter() - begun
arrays = sum(a.nbytes for a in (dataset.document_index, dataset.sample_index, dataset.shuffle_index)) / 1e6
found = [dataset.num_epochs, len(dataset), dataset.built_anew_on_cache_miss, took, loaded, megabytes(), arrays]
print(json.dumps(found))
"""


def index_part(args: argparse.Namespace) -> Lines:
    """Opening a corpus, building its index, writing the cache and mapping it; then once more with the cache."""
    import numpy as np

    from megatron_lite.datasets.indexed_dataset import move_pair, write_index

    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Lengths as of web pages: many short, few long. The tokens are a hole in the file: nobody reads them.
        lengths = np.random.default_rng(0).lognormal(6.0, 1.2, args.documents).astype(np.int32)
        marks = np.arange(len(lengths) + 1, dtype=np.int64)
        write_index(str(folder / "idx"), np.dtype(np.uint16), lengths, marks)
        tokens = int(lengths.sum(dtype=np.int64))
        with open(folder / "bin", "wb") as hole:
            hole.truncate(2 * tokens)
        move_pair(str(folder / "bin"), str(folder / "c.bin"), str(folder / "idx"), str(folder / "c.idx"))
        for sequence_length, epochs in ((2048, 1.0), (8192, 1.0), (2048, 2.5)):
            samples = 0 if epochs == 1.0 else int(epochs * tokens / sequence_length)
            taken: dict[bool, list[list[float]]] = {True: [], False: []}
            for turn in range(args.rounds):
                words = [str(folder / "c"), str(folder / f"cache{turn}"), str(samples), str(sequence_length)]
                for built in (True, False):
                    out = subprocess.run(
                        [sys.executable, "-c", _BUILD_INDEX, *words], check=True, capture_output=True, text=True
                    ).stdout.splitlines()[-1]
                    found = json.loads(out)
                    assert found[2] == built, "the cache was not made, or not used"
                    taken[built].append(found)
                shutil.rmtree(folder / f"cache{turn}")
            middle = {built: [statistics.median(column) for column in zip(*runs)] for built, runs in taken.items()}
            number, items, _, took, loaded, peak, arrays = middle[True]
            beyond = (peak - loaded - arrays) * 1e6 - lengths.nbytes
            rows.append(
                [str(sequence_length), f"{number:.0f}", f"{items:.0f}", f"{took:.2f} (at most {_INDEX_SECONDS:g})"]
                + [f"{middle[False][3]:.2f}", f"{loaded:.0f}", f"{peak:.0f} (at most {_INDEX_MB:g})", f"{arrays:.0f}"]
                + [f"{beyond / len(lengths):.1f}"]
            )
    head = ["sequence", "epochs", "samples", "build, s", "with cache, s", "code loaded, MB", "peak, MB"]
    head += ["arrays, MB", "beyond arrays and lengths, bytes a document"]
    return [
        f"index: {len(lengths)} documents, {tokens / 1e9:.1f} G tokens, {args.rounds} rounds",
        "",
        *table(head, rows),
    ]


# -- load --------------------------------------------------------------------------------------------------------

_LOAD_TARGET = 20.0  # tokens/s delivered for each that a step of the quickstart consumes
_ROOT = Path(__file__).parents[1]
_VOCABULARY = 8191


def _quickstart(prefix: str, *more: str) -> list[str]:
    """The words of the quickstart's run, on the corpus at `prefix`."""
    words = ["--config", str(_ROOT / "configs" / "gpt_small.yaml"), "--data-path", prefix]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(_VOCABULARY), "--eval-iters", "0"]
    return [*words, *more]


def _consumed(prefix: str, folder: Path, rounds: int) -> float:
    """Tokens/s of the quickstart's training step, from the metrics of a run: the median after the first iterations."""
    words = ["--train-iters", str(4 + 4 * rounds), "--log-interval", "4", "--save-interval", "1000"]
    subprocess.run(
        [sys.executable, str(_ROOT / "pretrain_gpt.py"), *_quickstart(prefix, *words, "--save", str(folder / "run"))],
        check=True,
        capture_output=True,
    )
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["tokens_per_s"] for row in rows if row["iteration"] > 4)


def _delivered(prefix: str, workers: int, batches: int) -> Iterator[float]:
    """Tokens/s of the run's own training iterator over `batches` micro-batches, again and again."""
    import torch

    from megatron_lite.datasets import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig
    from megatron_lite.process_groups_config import ProcessGroupCollection
    from megatron_lite.tokenizers.null import NullTokenizer
    from megatron_lite.training.arguments import parse_args, validate_args
    from megatron_lite.training.data_loading import build_train_valid_test_data_iterators

    words = _quickstart(prefix, "--train-iters", "1000000", "--num-workers", str(workers))

    def provider(sizes: list[int | None]) -> Any:
        config = GPTDatasetConfig(
            random_seed=args.seed, sequence_length=args.seq_length, blend=([prefix], None), split=args.split,
            tokenizer=NullTokenizer(_VOCABULARY), reset_position_ids=False, reset_attention_mask=False,
            eod_mask_loss=False, create_attention_mask=False,
        )  # fmt: skip
        return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        args = validate_args(parse_args(words), 1)
        args.device = torch.device("cpu")
        train = build_train_valid_test_data_iterators(provider, args, ProcessGroupCollection()).train
    assert train is not None
    for _ in range(10):  # the workers have started, and are ahead
        next(train)
    while True:
        begun, tokens = time.perf_counter(), 0
        for _ in range(batches):
            tokens += next(train)["tokens"].numel()
        yield tokens / (time.perf_counter() - begun)


def load_part(args: argparse.Namespace) -> Lines:
    """What the loader delivers beside what the quickstart's step (configs/gpt_small.yaml) consumes; target 20."""
    import numpy as np

    from megatron_lite.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder, prefix = Path(name), str(Path(name) / "corpus")
        builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
        for length in generator.lognormal(6.0, 1.2, 10_000).astype(int):
            builder.add_document(generator.integers(0, _VOCABULARY, length), [int(length)])
        builder.finalize(f"{prefix}.idx")
        consumed = _consumed(prefix, folder, args.rounds)
        contestants = {workers: _delivered(prefix, workers, args.batches) for workers in (0, 1, 2)}
        taken: dict[int, list[float]] = {workers: [] for workers in contestants}
        for _ in range(args.rounds):
            for workers, speeds in contestants.items():
                taken[workers].append(next(speeds))
    rows = [
        [str(workers), f"{statistics.median(speeds):,.0f}", f"{statistics.median(speeds) / consumed:,.0f}"]
        for workers, speeds in taken.items()
    ]
    return [
        f"load: micro-batches as of configs/gpt_small.yaml, whose step consumes {consumed:,.0f} tokens/s; "
        f"{args.rounds} rounds of {args.batches} micro-batches",
        "",
        *table(["--num-workers", "delivered, tokens/s", f"delivered / consumed (at least {_LOAD_TARGET:g})"], rows),
    ]


# -- the parts ---------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[argparse.Namespace], Lines]] = {
    "preprocess": preprocess_part,
    "index": index_part,
    "load": load_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="preprocess: numbers of processes")
    parser.add_argument("--megabytes", type=float, default=12.0, help="preprocess: size of the corpus")
    parser.add_argument("--documents", type=int, default=10_000_000, help="index: documents of the corpus")
    parser.add_argument("--batches", type=int, default=1000, help="load: micro-batches of a round")
    args = parser.parse_args()
    for name in args.parts or PARTS:
        print("\n".join(["", *PARTS[name](args)]), flush=True)


if __name__ == "__main__":
    main()
