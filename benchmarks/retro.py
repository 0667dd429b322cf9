"""How fast Retro's preprocessing is, stage by stage, and how much memory it takes; and how fast the model trains.

python benchmarks/retro.py --megabytes 100 --workers 2
python benchmarks/retro.py --megabytes 1000 --workers 2 --samples 1000 --index PCAR64,IVF4096,PQ32 --no-training

The corpus is made up: words of a Zipf distribution, a token each, about 5.5 bytes of text a token. Seconds are those of
the clock and of all processes' processor time. Memory is what all processes together held of their own at the worst
moment; pages of mapped files, which the kernel takes back when it likes, stand beside it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BYTES_PER_TOKEN, WORDS, DOCUMENT = 5.5, 60000, 600


def write_corpus(prefix: Path, megabytes: float) -> int:
    """Documents of 600 words. Returns: tokens."""
    from megatron_lite.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(0)
    documents = int(megabytes * 1e6 / BYTES_PER_TOKEN / DOCUMENT)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for _ in range(documents):
        tokens = np.minimum(generator.zipf(1.2, DOCUMENT), WORDS - 1).astype(np.uint16)
        builder.add_document(np.append(tokens, WORDS), [DOCUMENT + 1])
    builder.finalize(f"{prefix}.idx")
    return documents * (DOCUMENT + 1)


class Watch(threading.Thread):
    """Looks at this process and all below it, twice a second: processor seconds and the largest sums of memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds: dict[int, float] = {}
        self.own = self.mapped = 0.0  # MiB
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.5):
            self.look()

    def look(self) -> None:
        """Once."""
        parents, times, memory = {}, {}, {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            except OSError:  # ended meanwhile
                continue
            pid = int(folder.name)
            parents[pid] = int(stat[1])
            times[pid] = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
            memory[pid] = [int(status.get(key, "0").split()[0]) / 1024 for key in ("RssAnon", "RssFile")]
        family = {os.getpid()}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        self.seconds |= {pid: times[pid] for pid in family}
        self.own = max(self.own, sum(memory[pid][0] for pid in family))
        self.mapped = max(self.mapped, sum(memory[pid][1] for pid in family))

    def processor_seconds(self) -> float:
        """Of all so far, short-lived ones up to their last look."""
        self.look()
        return sum(self.seconds.values())


def preprocessing(args: argparse.Namespace) -> Path:
    """Each stage by itself."""
    from megatron_lite.cli.retro import main

    folder = args.folder / f"{args.megabytes:g}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokens = write_corpus(folder / "corpus", args.megabytes)
    words = f"""preprocess --retro-project-dir {folder / "project"} --retro-gpt-data-path {folder / "corpus"}
        --retro-gpt-tokenizer-type NullTokenizer --retro-gpt-vocab-size {WORDS} --retro-gpt-split 98,2,0
        --retro-gpt-seq-length 512 --retro-gpt-global-batch-size 8 --retro-gpt-train-samples {args.samples}
        --retro-gpt-eval-interval 1000000 --retro-gpt-eval-iters 1 --retro-doc-block-size 5000
        --retro-block-size 20000 --workers {args.workers}""".split()
    if args.index:
        words += [
            "--retro-index-str",
            args.index,
            "--retro-index-train-load-fraction",
            "0.2",
            "--retro-query-nprobe",
            "64",
        ]
    print(f"{args.megabytes:g} MB, {tokens} tokens, {args.samples} samples of 8 chunks, {args.workers} processes")
    print("| stage | s | processor s | MB/s of processor | chunks | MiB of their own | MiB mapped |")
    print("|---|---|---|---|---|---|---|")
    for stage in ("db", "index-train", "index-add", "query"):
        watch = Watch()
        watch.start()
        start, cpu = time.monotonic(), watch.processor_seconds()
        with open(folder / f"{stage}.log", "w") as log:
            sys.stdout, out = log, sys.stdout
            main([*words, "--retro-tasks", stage])
            sys.stdout = out
        cpu = watch.processor_seconds() - cpu
        watch.done.set()
        chunks = len(np.load(folder / "project/db/merged/train.npy", mmap_mode="r"))
        done = args.samples * 8 if stage == "query" else chunks
        rate = "" if stage == "query" else f"{args.megabytes / cpu:.2f}"
        print(f"| {stage} | {time.monotonic() - start:.1f} | {cpu:.1f} | {rate} | {done} "
              f"| {watch.own:.0f} | {watch.mapped:.0f} |", flush=True)  # fmt: skip
    size = sum(path.stat().st_size for path in (folder / "project").rglob("*") if path.is_file())
    print(f"the project takes {size / 1e6:.0f} MB on the disk")
    return folder / "project"


def training(steps: int = 8) -> None:
    """Seconds of a forward and backward with and without retrieval, best of some."""
    import torch

    from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
    from megatron_lite.models.retro import RetroConfig, RetroModel, get_retro_decoder_block_spec

    config = RetroConfig(num_layers=6, hidden_size=256, num_attention_heads=4, retro_chunk_length=64,
                         hidden_dropout=0.0, attention_dropout=0.0, retro_encoder_hidden_dropout=0.0,
                         retro_encoder_attention_dropout=0.0)  # fmt: skip
    b, s, k = 4, 256, config.retro_num_neighbors
    ids = torch.randint(0, 8192, (b, s))
    neighbors = torch.randint(0, 8192, (b * s // 64 * k, 128))
    models = {
        "GPT": (GPTModel(config, get_gpt_layer_local_spec(), 8192, s), ()),
        "Retro": (RetroModel(config, get_retro_decoder_block_spec(config), 8192, s), (neighbors,)),
    }
    best = {}
    for name, (model, more) in models.items():
        times = []
        for _ in range(steps):
            start = time.process_time()
            model(ids, torch.arange(s).expand(b, s), None, *more, labels=ids).mean().backward()
            times.append(time.process_time() - start)
        best[name] = min(times)
    tokens = b * s
    print(f"forward and backward, 6 layers of 256, one of them retrieves, {tokens} tokens, processor seconds, best:")
    for name, seconds in best.items():
        print(f"  {name}: {seconds * 1e3:.0f} ms, {tokens / seconds:.0f} tokens/s")
    print(f"  ratio {best['Retro'] / best['GPT']:.2f}; the encoder reads {2 * k} tokens for each of the decoder's")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Retro: preprocessing and a training step.")
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--index", help="a factory string of faiss; default: exact search")
    parser.add_argument("--folder", type=Path, default=Path("runs/retro_benchmark"))
    parser.add_argument("--no-training", action="store_true")
    options = parser.parse_args()
    preprocessing(options)
    if not options.no_training:
        training()
