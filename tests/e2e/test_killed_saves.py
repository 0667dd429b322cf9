"""A run that saves after every step is killed again and again: each start goes on from a complete checkpoint.

What is trained in the end is what an uninterrupted run trains, to the bit. MEGATRON_LITE_KILLS says how many kills.
"""

import contextlib
import json
import os
import random
import time
from multiprocessing import connection, get_context

import pytest

from megatron_lite.checkpointing import folders
from tests.e2e.launch import TINY

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("MEGATRON_LITE_KILLS", "2"))
ASYNC = ["--async-save", "--use-persistent-ckpt-worker"]
# 1.6 million parameters, 20 MB a save: half of a step's time and more is saving
FLAGS = [*TINY, *"--hidden-size 256 --hidden-dropout 0.1 --save-interval 1 --save-keep-last 2".split()]
FLAGS += ["--train-iters", str(8 + 2 * KILLS)]


def _train(words, log):
    """`pretrain_gpt.py WORDS`, in a process that has torch already."""
    import pretrain_gpt
    from megatron_lite.enums import ModelType
    from megatron_lite.training.entry import read_arguments
    from megatron_lite.training.initialize import finish
    from megatron_lite.training.training import run, start

    with open(log, "a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        args = read_arguments(argv=[str(word) for word in words], args_defaults=pretrain_gpt.ARGS_DEFAULTS)
        start(args)
        providers = (pretrain_gpt.train_valid_test_datasets_provider, pretrain_gpt.model_provider)
        run(args, *providers, ModelType.encoder_or_decoder, pretrain_gpt.forward_step)
        finish()


def _losses(save):
    """Iteration -> every loss that was ever logged for it."""
    found = {}
    for line in (save / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "lm loss" in row:
            found.setdefault(row["iteration"], set()).add(row["lm loss"])
    return found


def _begin(save, log, *more):
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "megatron_lite.training.training"])
    cache = save.parent / "cache"
    words = [*FLAGS, "--save", save, "--load", save, "--data-cache-path", cache, *more]
    process = context.Process(target=_train, args=(words, log))
    process.start()
    return process


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of the run that nobody kills."""
    save = tmp_path_factory.mktemp("whole") / "save"
    process = _begin(save, save.parent / "log")
    process.join()
    assert process.exitcode == 0, (save.parent / "log").read_text()[-3000:]
    return _losses(save)


@pytest.mark.parametrize("more", [[], ASYNC], ids=["sync", "async"])
def test_killed_at_random_moments_the_run_ends_as_if_nothing_had_happened(tmp_path, more, expected):
    save, log = tmp_path / "killed", tmp_path / "log"
    numbers, reached, seen = random.Random(os.environ.get("MEGATRON_LITE_SEED", "7")), 0, set()
    for _ in range(KILLS):
        process = _begin(save, log, *more)
        start = time.monotonic()
        while folders.read_tracker(save) in (None, reached):  # its first save of its own
            assert process.is_alive(), log.read_text()[-3000:]
            time.sleep(0.005)
            assert time.monotonic() - start < 120
        connection.wait([process.sentinel], numbers.uniform(0.0, 0.25))
        assert process.is_alive(), log.read_text()[-3000:]
        process.kill()
        process.join()
        seen |= {path.name.split("-")[0] for path in save.iterdir() if path.name.startswith(".iter")}
        tracked = folders.read_tracker(save)
        manifest = folders.read_manifest(folders.find(save, tracked))
        assert not folders.damaged_files(folders.find(save, tracked), manifest["files"], manifest)
        assert tracked > reached
        reached = tracked
    process = _begin(save, log, *more)
    process.join()
    assert process.exitcode == 0, log.read_text()[-3000:]
    assert log.read_text().count("successfully loaded checkpoint") == KILLS
    assert not [path for path in save.iterdir() if path.name.startswith(".iter")]  # rubbish of kills is gone
    assert (
        _losses(save) == expected and len(expected) == 8 + 2 * KILLS and all(len(of) == 1 for of in expected.values())
    )
    print(f"{KILLS} kills, of which some left {sorted(seen)}")
