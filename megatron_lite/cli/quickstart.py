"""`megatron-lite quickstart`, which is `make train`: raw text in, trained model out.

    1 corpus     --text, or the standard library's source   -> RUN/data/corpus.jsonl
    2 tokenizer  a SentencePiece model of that corpus       -> RUN/data/tokenizer.model
    3 tokens     the corpus in token ids                    -> RUN/data/corpus_text_document.bin, .idx
    4 training   pretrain_gpt.py --config configs/...yaml   -> RUN/checkpoints, RUN/tensorboard
    5 sample     what the trained model writes              -> RUN/sample.txt
    6 report     picture and page                           -> RUN/loss.png, RUN/report.html

(GPT's; `quickstart_recipes` tells what other models do in steps 2 to 5.)

Every step is a command that is shown before it runs, so that it can be run by hand. A step whose output is there is
not repeated: a second start continues a run that was stopped, or says that it is done. What the outputs were made from
is in RUN/state.json; when that changes, the data are made anew and the old training is kept under another name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

import megatron_lite
from megatron_lite.cli import corpus, preprocess, report, retro, train_tokenizer
from megatron_lite.cli.quickstart_recipes import RECIPES, Recipe
from megatron_lite.errors import ConfigError, DataError, MegatronLiteError
from megatron_lite.training.report_metrics import duration

CHECKOUT = Path(megatron_lite.__file__).resolve().parent.parent
_LOOK = 8  # evaluation steps of a run whose length was given: a look, not a measurement
FEWEST_DOCUMENTS = 20  # below that the held-out twentieth is empty
STEPS = ("corpus", "tokenizer", "tokens", "neighbours", "training", "sample", "report")


class TrainingEnded(MegatronLiteError):
    """The training process ended with an error, which it has told itself."""


class State:
    """`state.json` of a run: what its outputs were made from, and how long each step took."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.values: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            self.values = {}

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def set(self, **values: Any) -> None:
        """Remember, on disk too."""
        self.values |= values
        temporary = self.path.with_name(self.path.name + ".partial")
        temporary.write_text(json.dumps(self.values, indent=1) + "\n")
        temporary.replace(self.path)


class Quickstart:
    """One run of all steps.

    Args:
        run: the folder of the results.
        text: the user's text, or None for the standard library.
        config: YAML file of training flags.
        recipe: how this kind of model is trained and used.
        iterations: None: as the config says.
        flags: further flags of training.
    """

    def __init__(
        self,
        run: Path,
        text: Path | None,
        config: Path,
        iterations: int | None,
        flags: list[str],
        recipe: Recipe = RECIPES["gpt"],
    ):
        self.recipe = recipe
        self.run, self.text, self.config, self.flags = run, text, config, flags
        settings = _settings(config)
        self.iterations_given = iterations is not None
        self.iterations: int = iterations if iterations is not None else settings["train-iters"]
        self.data, self.checkpoints = run / "data", run / "checkpoints"
        self.corpus, self.tokenizer = self.data / "corpus.jsonl", self.data / recipe.tokenizer_file
        self.tokens = self.data / f"corpus_text_{recipe.unit}"
        self.project = run / "project"
        self.steps_of_model = [step for step in STEPS if step != "neighbours" or recipe.neighbors]
        self.settings = settings
        self.sample = run / "sample.txt"
        self.source = corpus.user_text(text) if text else corpus.standard_library()
        try:
            self.data.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise DataError(f"cannot write to {run}: {problem.strerror}", fix="another folder, RUN=...") from problem
        self.state = State(run / "state.json")

    # -- what is there already ---------------------------------------------------------------------------------
    def forget_what_no_longer_fits(self) -> None:
        """Outputs made from other inputs go: data are deleted, a training is put aside."""
        data = {"source": self.source.fingerprint(), "vocab_size": self.recipe.vocab_size}
        if self.state.get("data") != data:
            if self.state.get("data"):
                print(f"the text has changed since {self.data} was made: making it anew")
            for file in (self.corpus, self.tokenizer, *self._token_files()):
                file.unlink(missing_ok=True)
            shutil.rmtree(self.project, ignore_errors=True)
            self.state.set(data=data)
        training = {
            "data": hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16],
            "config": hashlib.sha256(self.config.read_bytes()).hexdigest()[:16],
            "flags": self.flags,
        }
        if self.state.get("training") != training:
            if self._trained():
                aside = _free_name(self.run / "checkpoints-before")
                self.checkpoints.rename(aside)
                print(f"text, {self.config.name} or flags have changed: the training so far is kept in {aside}")
                if (self.run / "tensorboard").exists():
                    (self.run / "tensorboard").rename(aside / "tensorboard")
            self.state.set(training=training, precision=fast_precision(), sampled_at=None, timings={})

    def _token_files(self) -> list[Path]:
        return [self.tokens.with_suffix(end) for end in (".bin", ".idx")]

    def _trained(self) -> int:
        """Iteration of the newest checkpoint; 0: none."""
        try:
            return int((self.checkpoints / "latest_checkpointed_iteration.txt").read_text())
        except (OSError, ValueError):
            return 0

    # -- the steps ---------------------------------------------------------------------------------------------
    def steps(self) -> None:
        """All of them, or what is left of them."""
        self.forget_what_no_longer_fits()
        trained = self._trained()
        if trained >= self.iterations and self._report_is_of(trained):
            print(f"done before: {trained} iterations are trained (more: ITERS={2 * trained}; anew: another RUN=)")
            return self._show()
        self._step("corpus", self.corpus.exists(), self._make_corpus)
        self._step("tokenizer", self.tokenizer.exists(), self._make_tokenizer)
        self._step("tokens", all(file.exists() for file in self._token_files()), self._make_tokens)
        if self.recipe.neighbors:
            self._step("neighbours", self.state.get("neighbours") == self._samples(), self._find_neighbors)
        self._step("training", trained >= self.iterations, self._train)
        trained = self._trained()
        self._step("sample", self.state.get("sampled_at") == trained and self.sample.exists(), self._write_sample)
        self._step("report", False, self._make_report)
        self._show()

    def _report_is_of(self, iteration: int) -> bool:
        there = all((self.run / name).exists() for name in ("sample.txt", "loss.png", "report.html"))
        return there and self.state.get("reported_at") == iteration

    def _step(self, name: str, is_done: bool, work: Callable[[], None]) -> None:
        title = f"[{self.steps_of_model.index(name) + 1}/{len(self.steps_of_model)}] {name}"
        if is_done:
            print(f"{title}: done before", flush=True)
            return
        print(f"\n{title}", flush=True)
        start = time.monotonic()
        work()
        seconds = time.monotonic() - start
        timings = self.state.get("timings", {})
        if name == "training":  # a resumed training adds up
            seconds += timings.get(name, 0.0)
        self.state.set(timings=timings | {name: seconds})
        print(f"    {name}: {duration(seconds)}", flush=True)

    def _make_corpus(self) -> None:
        words = ["--output", _short(self.corpus), *(["--text", str(self.text)] if self.text else [])]
        _verb("corpus", corpus.main, words)
        with self.corpus.open("rb") as lines:
            count = sum(1 for _ in zip(range(FEWEST_DOCUMENTS), lines))
        if count < FEWEST_DOCUMENTS:
            self.corpus.unlink()
            raise DataError(
                f"{self.source.root} holds {count} documents",
                why=f"a twentieth is held out for validation, so that {FEWEST_DOCUMENTS} are needed",
                fix="more text",
            )

    def _make_tokenizer(self) -> None:
        words = ["--input", _short(self.corpus), "--output", _short(self.tokenizer)]
        words += ["--vocab-size", str(self.recipe.vocab_size), *self.recipe.train_tokenizer]
        _verb("train-tokenizer", train_tokenizer.main, words)

    def _make_tokens(self) -> None:
        words = ["--input", _short(self.corpus), "--output-prefix", _short(self.data / "corpus")]
        words += self.recipe.preprocess(self.text is not None)
        words += ["--tokenizer-type", self.recipe.tokenizer_type, self.recipe.tokenizer_flag, _short(self.tokenizer)]
        _verb("preprocess", preprocess.main, words)

    def _samples(self) -> dict[str, str]:
        """Retro: the samples of this run, as flags of `retro preprocess`, whose neighbours have to be known."""
        n, batch = self.iterations, self.settings["global-batch-size"]
        interval, evaluation = self.settings["eval-interval"], self.settings["eval-iters"]
        if self.iterations_given:
            interval, evaluation = max(1, n // 3), _LOOK
        values = {
            "seed": self.settings["seed"],
            "split": self.settings["split"],
            "seq-length": self.settings["seq-length"],
            "global-batch-size": batch,
            "train-samples": n * batch,
            "eval-interval": interval,
            "eval-iters": evaluation,
        }
        return {f"--retro-gpt-{name}": str(value) for name, value in values.items()}

    def _find_neighbors(self) -> None:
        words = [
            "preprocess",
            "--retro-project-dir",
            _short(self.project),
            "--retro-gpt-data-path",
            _short(self.tokens),
        ]
        words += ["--retro-gpt-tokenizer-type", self.recipe.tokenizer_type]
        words += ["--retro-gpt-tokenizer-model", _short(self.tokenizer)]
        words += [word for pair in self._samples().items() for word in pair]
        _verb("retro", retro.main, words + list(self.recipe.neighbors))
        self.state.set(neighbours=self._samples())

    def _train(self) -> None:
        words = [self.recipe.script, "--config", _short(self.config), "--data-path", _short(self.tokens)]
        words += [self.recipe.tokenizer_flag, _short(self.tokenizer)]
        if self.recipe.neighbors:
            words += ["--retro-project-dir", _short(self.project), "--retro-add-retriever"]
        words += ["--save", _short(self.checkpoints), "--load", _short(self.checkpoints)]
        words += ["--tensorboard-dir", _short(self.run / "tensorboard"), "--override-opt_param-scheduler"]
        if self.state.get("precision") == "bf16":
            words.append("--bf16")
        if self.iterations_given:
            n = self.iterations
            words += ["--train-iters", str(n), "--log-interval", str(max(1, n // 30))]
            words += ["--eval-interval", str(max(1, n // 3)), "--save-interval", str(max(1, n // 3))]
            words += ["--eval-iters", str(_LOOK)]
        words += self.flags
        print("    $ python " + shlex.join(words), flush=True)
        words[0] = str(CHECKOUT / words[0])
        status = subprocess.run([sys.executable, *words]).returncode
        if status or self._trained() < self.iterations:
            ended = TrainingEnded(
                f"training ended with status {status} after iteration {self._trained()} of {self.iterations}",
                why="see the messages above",
                fix="the same command goes on from the last checkpoint",
            )
            ended.exit_status = status if status > 0 else 1
            raise ended

    def _write_sample(self) -> None:
        words = ["generate", "--load", _short(self.checkpoints), *self.recipe.sample(self.text is not None)]
        print("    $ megatron-lite " + shlex.join(words), flush=True)
        temporary = self.sample.with_name("sample.partial")
        with temporary.open("wb") as out:
            status = subprocess.run([sys.executable, "-m", "megatron_lite", *words], stdout=out).returncode
        if status:
            ended = TrainingEnded(f"the sample could not be written: status {status}", why="see the message above")
            ended.exit_status = status
            raise ended
        temporary.replace(self.sample)
        self.state.set(sampled_at=self._trained())

    def _make_report(self) -> None:
        (self.run / "timings.json").write_text(json.dumps(self.state.get("timings", {})))
        _verb("report", report.main, [_short(self.checkpoints), "--output", _short(self.run)])
        self.state.set(reported_at=self._trained())

    def _show(self) -> None:
        print("\nThe model writes:\n")
        print("\n".join("    " + line for line in self.sample.read_text(encoding="utf-8").splitlines()))
        print("\n  picture      ", _short(self.run / "loss.png"))
        print("  report       ", _short(self.run / "report.html"))
        print("  TensorBoard   tensorboard --logdir", _short(self.run / "tensorboard"))
        more = shlex.join(["megatron-lite", "generate", "--load", _short(self.checkpoints), *self.recipe.more])
        print("  more text    ", more, flush=True)


def fast_precision() -> str:
    """ "bf16" where the device is fast in it, else "fp32": CUDA says so, a CPU is asked with a small product."""
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(256, 256, dtype=dtype)
        torch.mm(a, a)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            torch.mm(a, a)
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return "bf16" if seconds[torch.bfloat16] < 0.75 * seconds[torch.float32] else "fp32"


def _settings(config: Path) -> dict[str, Any]:
    """The file's settings without their sections. Raises: ConfigError if there are none."""
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
        flat: dict[str, Any] = {}
        for section, value in content.items():
            flat |= value if isinstance(value, dict) else {section: value}
        if not isinstance(flat.get("train-iters"), int):
            raise ConfigError(f"{config} does not say train-iters", fix="--iters N")
        return flat
    except (OSError, yaml.YAMLError, AttributeError) as problem:
        raise ConfigError(
            f"cannot read {config}: {problem}", fix="a YAML file such as configs/gpt_small.yaml"
        ) from None


def _verb(name: str, main: Callable[[Sequence[str]], int], words: list[str]) -> None:
    print(f"    $ megatron-lite {name} {shlex.join(words)}", flush=True)
    main(words)


def _short(path: Path) -> str:
    """As one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _free_name(path: Path) -> Path:
    return next(p for n in range(1, 10**6) if not (p := path.with_name(f"{path.name}-{n}")).exists())


def main(argv: Sequence[str]) -> int:
    """The verb."""
    models = sorted(name for name in RECIPES if (CHECKOUT / "configs" / f"{name}_small.yaml").exists())
    parser = argparse.ArgumentParser(
        "megatron-lite quickstart",
        description="Raw text in, trained model out. Unknown flags go to the training script.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="gpt", help=f"{', '.join(models)}: configs/MODEL_small.yaml (default: gpt)")
    parser.add_argument("--text", type=Path, metavar="PATH", help="your text: a file, a .jsonl file, or a folder")
    parser.add_argument("--iters", type=int, metavar="N", help="iterations of training (default: as the config says)")
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="folder of the results (default: runs/<name of the text>)"
    )
    args, flags = parser.parse_known_args(list(argv))
    if args.model not in models:
        raise ConfigError(f"--model {args.model}", why=f"models are {', '.join(models)}", fix="MODEL=gpt")
    recipe = RECIPES[args.model]
    if not (CHECKOUT / recipe.script).exists():
        raise ConfigError(
            f"there is no {recipe.script} in {CHECKOUT}",
            why="the quickstart trains with the entry script of a source checkout",
            fix="git clone the repository, then make train",
        )
    if args.iters is not None and args.iters < 1:
        raise ConfigError(f"--iters {args.iters}", why="it is a number of training steps", fix="ITERS=300")
    name = args.text.resolve().stem if args.text else "stdlib"
    run = args.run or Path("runs") / (name if args.model == "gpt" else f"{name}-{args.model}")
    start = time.monotonic()
    config = CHECKOUT / "configs" / f"{args.model}_small.yaml"
    try:
        Quickstart(run, args.text, config, args.iters, flags, recipe).steps()
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the last finished step or checkpoint", file=sys.stderr)
        return 130
    print(f"\nall in all {duration(time.monotonic() - start)}")
    return 0
