"""`megatron-lite <verb> ...`, also `python -m megatron_lite <verb> ...`: finds the verb and hands it the rest.

    megatron-lite generate --load runs/stdlib/checkpoints --prompt "def "
                  |        |--------- cli.generate.main(argv) ----------|
                  VERBS

A verb's file is imported only when it is called, so that `--help` needs neither torch nor anything else that is slow.
What the user did wrong ends as one text on standard error with the error's own exit status; a traceback is our bug.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from megatron_lite import __version__
from megatron_lite.errors import ConfigError, MegatronLiteError

# verb -> (module with `main(argv) -> int | None`, what `--help` says)
VERBS: dict[str, tuple[str, str]] = {
    "quickstart": (
        "megatron_lite.cli.quickstart",
        "raw text in, trained model out: all the steps below, one after the other",
    ),
    "corpus": (
        "megatron_lite.cli.corpus",
        "write a JSONL corpus: the Python standard library's source, or your own text",
    ),
    "train-tokenizer": ("megatron_lite.cli.train_tokenizer", "train a tokenizer on a JSONL corpus"),
    "preprocess": ("megatron_lite.cli.preprocess", "JSONL -> tokenized .bin/.idx files for --data-path"),
    "data": ("megatron_lite.cli.data", "merge | inspect | index: work on .bin/.idx files"),
    "retro": ("megatron_lite.cli.retro", "preprocess: chunk database, index and neighbours for Retro"),
    "convert": ("megatron_lite.cli.convert", "Hugging Face model <-> checkpoint"),
    "checkpoint": ("megatron_lite.cli.checkpoint", "inspect | verify: what a checkpoint folder holds, and is it whole"),
    "generate": ("megatron_lite.cli.generate", "prompt -> text, from a checkpoint"),
    "serve": ("megatron_lite.cli.serve", "answer prompts over HTTP, many at once"),
    "verify": (
        "megatron_lite.cli.verify",
        "does a layout train what one process trains? Tries it with a small copy of your model",
    ),
    "plan": ("megatron_lite.cli.plan", "what the stages of a pipeline do and when, with a picture"),
    "dry-run": (
        "megatron_lite.cli.dry_run",
        "may a run of N ranks start, and what would each hold? Needs none of them",
    ),
    "heartbeat": ("megatron_lite.cli.heartbeat", "does the run that writes this --heartbeat-file live?"),
    "report": ("megatron_lite.cli.report", "loss.png and report.html of a run"),
}


def usage() -> str:
    """The text of `megatron-lite --help`."""
    verbs = "\n".join(f"  {verb:<16} {text}" for verb, (_, text) in VERBS.items())
    return (
        f"usage: megatron-lite <verb> [options]\n\n{verbs}\n\n"
        "`megatron-lite <verb> --help` lists a verb's options. Training itself is `python pretrain_gpt.py --help`, or\n"
        "`torchrun pretrain_gpt.py ...` for several processes."
    )


def find_verb(verb: str) -> Callable[[Sequence[str]], int | None]:
    """The verb's `main`. Raises: ConfigError for an unknown verb, with the nearest one that exists."""
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.5)
        raise ConfigError(
            f"megatron-lite has no verb {verb!r}" + (f"; did you mean {close[0]!r}?" if close else ""),
            why=f"the verbs are {', '.join(VERBS)}",
            fix=f"megatron-lite {close[0]} --help" if close else "megatron-lite --help",
        )
    return importlib.import_module(VERBS[verb][0]).main


def run(work: Callable[[], int | None]) -> int:
    """`work()` and its exit status; an error that is the user's to mend becomes its text on standard error."""
    try:
        return work() or 0
    except MegatronLiteError as error:
        sys.stdout.flush()
        print(f"megatron-lite: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("megatron-lite: interrupted", file=sys.stderr)
        return 130  # as shells report a SIGINT
    except BrokenPipeError:  # `megatron-lite generate ... | head`: the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `argv` (by default the command line's) and returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"megatron-lite {__version__}")
        return 0
    return run(lambda: find_verb(words[0])(words[1:]))


if __name__ == "__main__":
    sys.exit(main())
