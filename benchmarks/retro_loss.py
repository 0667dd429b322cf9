"""What retrieval is good for: validation loss with and without it, at equal steps, on text that repeats itself.

python benchmarks/retro_loss.py --output docs/retro.png

A corpus of passages of random words: every document tells some of its own and, in its second half, some that an earlier
document told. A model of this size cannot keep them in its weights, and nobody can guess them; who looks them up can
copy. Both runs are pretrain_retro.py on the same samples, with and without --retro-add-retriever.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

VOCABULARY, PASSAGE, M, LENGTH, BATCH = 400, 16, 8, 64, 16


def write_corpus(prefix: Path, documents: int, seed: int = 0) -> None:
    """Documents of eight passages, half of them told before."""
    from megatron_lite.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(seed)
    told = list(generator.integers(0, VOCABULARY, (64, PASSAGE)))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for _ in range(documents):
        own = list(generator.integers(0, VOCABULARY, (4, PASSAGE)))
        again = [told[i] for i in generator.integers(0, len(told), 4)]
        tokens = [*np.concatenate(own + again).tolist(), VOCABULARY]  # the last id ends a document
        builder.add_document(tokens, [len(tokens)])
        told += own
    builder.finalize(f"{prefix}.idx")


def prepare(folder: Path, iterations: int, every: int) -> Path:
    """The project."""
    from megatron_lite.cli.retro import main

    folder.mkdir(parents=True, exist_ok=True)
    write_corpus(folder / "repeats", max(400, iterations * BATCH * LENGTH // 129 + 200))
    project = folder / "project"
    words = f"""preprocess --retro-project-dir {project} --retro-gpt-data-path {folder / "repeats"}
        --retro-gpt-tokenizer-type NullTokenizer --retro-gpt-vocab-size {VOCABULARY} --retro-gpt-split 95,5,0
        --retro-gpt-seq-length {LENGTH} --retro-gpt-chunk-length {M} --retro-gpt-global-batch-size {BATCH}
        --retro-gpt-train-samples {iterations * BATCH} --retro-gpt-eval-interval {every} --retro-gpt-eval-iters 12
        --retro-query-num-neighbors-query 40 --retro-query-num-neighbors-save 2 --workers 1"""
    main(words.split())
    return project


def train(project: Path, iterations: int, every: int, *more: str) -> dict[int, float]:
    """Iteration -> validation loss."""
    words = f"""--retro-project-dir {project} --num-layers 2 --hidden-size 128 --num-attention-heads 4
        --retro-layers 1 2 --retro-encoder-layers 1 --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.09
        --retro-encoder-hidden-dropout 0 --retro-encoder-attention-dropout 0 --micro-batch-size {BATCH}
        --lr 2e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --clip-grad 1.0 --adam-beta2 0.98
        --eval-before-training --eval-interval {every} --eval-iters 12 --log-interval 50 --num-workers 0"""
    command = [sys.executable, str(ROOT / "pretrain_retro.py"), *words.split(), *more]
    print("$", " ".join(command), flush=True)
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if out.returncode:
        raise SystemExit(out.stdout[-2000:] + out.stderr)
    found = re.findall(r"validation loss at iteration (\d+) \| lm loss value: (\S+)", out.stdout)
    print(*(line for line in out.stdout.splitlines() if "elapsed time" in line), sep="\n")
    return {int(iteration): float(loss) for iteration, loss in found}


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    """The picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, colour in (("without retrieval", "#888888"), ("with retrieval", "#1f77b4")):
        curve = curves[name]
        axes.plot(list(curve), list(curve.values()), color=colour, marker="o", markersize=3)
        last = max(curve)
        axes.annotate(
            f"{name}: {curve[last]:.2f}", (last, curve[last]), xytext=(-8, 8), textcoords="offset points",
            ha="right", color=colour,
        )  # fmt: skip
    axes.set(xlabel="iteration", ylabel="validation loss", title="Text that repeats earlier passages, equal steps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Validation loss with and without retrieval.")
    parser.add_argument("--output", type=Path, default=Path("retro.png"))
    parser.add_argument("--folder", type=Path, default=Path("runs/retro_loss"), help="corpus and project")
    parser.add_argument("--iters", type=int, default=600)
    args = parser.parse_args()
    every = max(1, args.iters // 12)
    project = prepare(args.folder, args.iters, every)
    curves = {
        "with retrieval": train(project, args.iters, every, "--retro-add-retriever"),
        "without retrieval": train(project, args.iters, every),
    }
    for name, curve in curves.items():
        print(f"{name}: " + ", ".join(f"{iteration}: {loss:.3f}" for iteration, loss in curve.items()))
    (args.folder / "curves.json").write_text(json.dumps(curves))
    draw(curves, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
