"""From data sets to micro-batches: where reading starts, in what portions, and by whom."""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.data_loading import (
    build_train_valid_test_data_iterators,
    get_blend_and_blend_per_split,
    train_valid_test_num_samples,
)
from megatron_lite.training.derived import phase_of

BASE = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --max-position-embeddings 4 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 7 --lr 1e-3 --micro-batch-size 2 --global-batch-size 8 --num-workers 0"
)
ALONE = ProcessGroupCollection()
ROOT = Path(__file__).parents[3]


def arguments(flags: str, *, world_size: int = 1, **position: int) -> Namespace:
    """Resolved arguments; `position`: what a checkpoint would say."""
    args = validate_args(parse_args([*BASE.split(), *flags.split()]), world_size)
    args.device = torch.device("cpu")
    vars(args).update(position)
    return args


class Numbers:
    """Sample i is its number, and who read it; the filler is -1."""

    def __init__(self, total: int, filler: bool = True):
        self.total, self.filler = total, filler

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, idx: int | None) -> dict[str, np.ndarray]:
        if idx is None and not self.filler:
            raise TypeError("an integer is needed")
        return {"id": np.array(-1 if idx is None else idx), "pid": np.array(os.getpid())}


def data(args: Namespace, train=None, valid=None, test=None, groups=ALONE):
    return build_train_valid_test_data_iterators(lambda sizes: (train, valid, test), args, groups)


def ids(iterator, batches: int) -> list[list[int]]:
    return [batch["id"].tolist() for batch in islice(iterator, batches)]


# -- how many samples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        # the last part of an interval counts: 11 evaluations
        ("--train-iters 1000 --eval-interval 100 --eval-iters 5", [8000, 11 * 40, 40]),
        ("--train-iters 1000 --eval-interval 300 --eval-iters 5", [8000, 4 * 40, 40]),
        ("--train-iters 1000 --eval-iters 5", [8000, 40, 40]),
        ("--train-iters 1000 --eval-interval 100 --eval-iters 5 --skip-train", [8000, 40, 40]),
        ("--train-iters 10 --eval-interval 5 --eval-iters 2 --eval-before-training", [80, 4 * 16, 16]),
        ("--train-iters 10 --eval-iters 3 --eval-global-batch-size 4", [80, 12, 12]),
        ("--train-iters 10 --eval-iters 3 --full-validation", [80, None, 24]),
        ("--train-samples 83 --eval-interval 5 --eval-iters 2", [83, 3 * 16, 16]),
        ("--train-samples 80 --rampup-batch-size 2 2 20 --eval-interval 4 --eval-iters 1", [80, 4 * 8, 8]),
    ],
)
def test_sizes_asked_of_the_data(flags, sizes):
    assert train_valid_test_num_samples(arguments(flags)) == sizes


def test_C042_a_run_counted_in_samples_evaluates_as_its_twin_in_iterations():
    """--train-samples leaves --train-iters unset: dividing it by --eval-interval hit None."""
    shared = "--eval-interval 3 --eval-iters 2"
    by_samples, by_iterations = arguments(f"--train-samples 80 {shared}"), arguments(f"--train-iters 10 {shared}")
    assert by_samples.train_iters == by_iterations.train_iters == 10
    assert train_valid_test_num_samples(by_samples) == train_valid_test_num_samples(by_iterations) == [80, 64, 16]


# -- where reading starts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_reads_the_tail_whatever_the_workers(kind, workers):
    """C040, C036: in the middle of an epoch, at its end, and in the next one."""
    args = arguments(f"--train-iters 6 --dataloader-type {kind} --eval-iters 0")
    total = 48 if kind == "single" else 16
    whole = ids(data(args, Numbers(total)).train, 24)
    assert len(whole) == 24
    for iteration in (1, 2, 3):
        flags = f"--train-iters 6 --dataloader-type {kind} --eval-iters 0 --num-workers {workers}"
        resumed = arguments(flags, iteration=iteration, consumed_train_samples=8 * iteration)
        assert ids(data(resumed, Numbers(total)).train, 12) == whole[4 * iteration : 4 * iteration + 12]


def test_single_ends_and_cyclic_does_not():
    args = arguments("--train-iters 6 --eval-iters 0")
    assert len(list(data(args, Numbers(21)).train)) == 10
    args = arguments("--train-iters 6 --eval-iters 0 --dataloader-type cyclic")
    epochs = ids(data(args, Numbers(20)).train, 20)
    assert sorted(sum(epochs[:10], [])) == sorted(sum(epochs[10:], [])) == list(range(20))
    assert epochs[:10] != epochs[10:]


def test_C037_validation_goes_on_where_it_stopped_and_the_test_set_does_not():
    args = arguments("--train-iters 6 --eval-iters 2", consumed_valid_samples=16)
    found = data(args, Numbers(48), Numbers(100), Numbers(100))
    (valid,), (test,) = found.valid, found.test
    assert ids(valid.start(), 2) == [[16, 17], [18, 19]] and ids(valid.start(), 1) == [[20, 21]]
    assert ids(test.start(), 2) == [[0, 1], [2, 3]]
    assert (valid.num_batches, valid.num_samples, valid.advances, test.advances) == (2, 16, True, False)


def test_held_out_data_shorter_than_an_evaluation_are_read_again_and_that_is_said(capsys):
    """Also less than one batch: the number is worth less, but it is one."""
    args = arguments("--train-iters 6 --eval-iters 2")
    (valid,) = data(args, Numbers(48), Numbers(3)).valid
    assert ids(valid.start(), 3) == [[0, 1], [2, 0], [1, 2]]
    assert "an evaluation reads 16 samples, and the validation set has 3" in capsys.readouterr().err
    data(args, Numbers(48), Numbers(20))
    assert capsys.readouterr().err == ""
    args = arguments("--train-iters 6 --eval-iters 2", consumed_valid_samples=16)
    (valid,) = data(args, Numbers(48), Numbers(20)).valid
    assert ids(valid.start(), 3) == [[16, 17], [18, 19], [0, 1]]
    assert "read more than the 20 samples of the validation set" in capsys.readouterr().err
    assert data(args, Numbers(48), Numbers(0)).valid == []
    assert "validation set has no sample: it will not be evaluated" in capsys.readouterr().err


def test_cyclic_evaluates_in_cyclic_order_where_there_is_enough():
    args = arguments("--train-iters 6 --eval-iters 1 --dataloader-type cyclic")
    (valid,) = data(args, Numbers(48), Numbers(20)).valid
    read = ids(valid.start(), 20)
    assert sorted(sum(read[:10], [])) == list(range(20)) and sum(read[:10], []) != list(range(20))
    assert read[:10] != read[10:]
    args.consumed_valid_samples = 11  # of batches of another size
    (valid,) = data(args, Numbers(48), Numbers(20)).valid
    assert ids(valid.start(), 1) == read[4:5]
    (tiny,) = data(args, Numbers(48), Numbers(1)).valid
    assert ids(tiny.start(), 2) == [[0, 0], [0, 0]]


def test_evaluation_has_batches_of_its_own():
    args = arguments("--train-iters 6 --eval-iters 2 --eval-micro-batch-size 3 --eval-global-batch-size 6")
    (valid,) = data(args, Numbers(48), Numbers(100)).valid
    assert ids(valid.start(), 2) == [[0, 1, 2], [3, 4, 5]] and valid.num_samples == 12


# -- whole sets, several sets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_full_validation_reads_every_sample_once_each_time(workers):
    args = arguments(f"--train-iters 6 --eval-iters 1 --full-validation --num-workers {workers}")
    (valid,) = data(args, Numbers(48), Numbers(13)).valid
    assert (valid.num_batches, valid.num_samples, valid.advances) == (2, 13, False)
    for _ in range(2):
        assert sum(ids(valid.start(), 99), []) == [*range(13), -1, -1, -1]


def test_full_validation_without_a_filler_is_told_at_the_start():
    args = arguments("--train-iters 6 --full-validation")
    with pytest.raises(DataError, match="validation set has 13 samples.*no filler.*integer is needed"):
        data(args, Numbers(48), Numbers(13, filler=False))
    assert data(args, Numbers(48), Numbers(16, filler=False)).valid[0].num_batches == 2


def named(total: int, path: str) -> Numbers:
    dataset = Numbers(total)
    dataset.dataset_path = path
    return dataset


def test_validation_sets_have_names():
    flags = "--train-iters 6 --full-validation --multiple-validation-sets"
    web, wiki, other = named(13, "data/web_text"), named(3, "data/wiki_text"), named(3, "more/wiki_text")

    def names(more: str, *sets: Numbers) -> list[str]:
        return [held_out.name for held_out in data(arguments(f"{flags} {more}"), Numbers(48), list(sets)).valid]

    assert names("", web, wiki) == ["web_text", "wiki_text"]
    assert names("", web, wiki, other) == ["0", "1", "2"]  # no end is two sets' name
    assert names("--validation-set-names a b", web, wiki) == ["a", "b"]
    for given in ("a", "a a", "a b c"):
        with pytest.raises(ConfigError, match=f"--validation-set-names {given} for 2 validation sets"):
            names(f"--validation-set-names {given}", web, wiki)


# -- phases ----------------------------------------------------------------------------------------------------------


def test_phases_have_data_of_their_own_from_their_first_sample_on():
    flags = "--train-iters 10 --phase-transition-iterations 4,7 --eval-iters 0"
    for iteration, size, first in ((0, 32, 0), (3, 32, 24), (4, 24, 0), (6, 24, 16), (7, 24, 0)):
        args = arguments(flags, iteration=iteration, consumed_train_samples=8 * iteration)
        assert train_valid_test_num_samples(args)[0] == size
        assert ids(data(args, Numbers(size)).train, 1) == [[first, first + 1]]


def test_phases_are_counted_through_a_ramp():
    args = arguments("--train-iters 10 --phase-transition-iterations 4 --rampup-batch-size 2 2 18")
    assert phase_of(args, 0) == (0, 10) and phase_of(args, 4) == (10, 10 + 4 + 6 + 4 * 8)
    args = arguments("--train-iters 10 --phase-transition-iterations 4", iteration=4, consumed_train_samples=16)
    with pytest.raises(ConfigError, match="begins at sample 32, and the checkpoint has used 16"):
        data(args, Numbers(48))


# -- which data ------------------------------------------------------------------------------------------------------


def test_files_of_paths_are_read(tmp_path):
    (tmp_path / "words").write_text("0.3 a\n 0.7 b\n")
    splits = {"train": ["1", "a", "3", "b"], "valid": "c d e", "test": None}
    (tmp_path / "splits.json").write_text(json.dumps(splits))
    base = BASE.replace("--mock-data ", "").split()

    def blends(*flags):
        return get_blend_and_blend_per_split(parse_args([*base, *flags]))

    assert blends("--data-args-path", str(tmp_path / "words")) == ((["a", "b"], [0.3, 0.7]), None)
    per_split = [(["a", "b"], [1.0, 3.0]), (["c", "d", "e"], None), None]
    assert blends("--per-split-data-args-path", str(tmp_path / "splits.json")) == (None, per_split)
    assert blends("--valid-data-path", "c", "--test-data-path", "d") == (None, [None, (["c"], None), (["d"], None)])
    assert blends("--mock-data") == (None, None)
    with pytest.raises(ConfigError, match="no --data-path, and no --mock-data"):
        blends()
    with pytest.raises(DataError, match="--data-args-path .*nothere cannot be read"):
        blends("--data-args-path", str(tmp_path / "nothere"))


@pytest.mark.parametrize(
    "flag, content, message",
    [
        ("--data-args-path", b" \n", "is empty"),
        ("--data-args-path", b"\xff\xfe\0", "is no text"),
        ("--per-split-data-args-path", b"\xff\xfe\0", "is no text"),
        ("--per-split-data-args-path", b"{", "is not a JSON object"),
        ("--per-split-data-args-path", b"[1]", "is not a JSON object: it holds a list"),
        ("--per-split-data-args-path", b'{"train": "a", "validation": "b"}', "names validation"),
        ("--per-split-data-args-path", b'{"train": {"a": 1}}', 'train is {"a": 1}'),
        ("--per-split-data-args-path", b'{"train": "a", "valid": 5}', "valid is 5"),
        ("--per-split-data-args-path", b'{"train": [["a", 1]]}', "train is"),
        ("--per-split-data-args-path", b"{}", "names no corpus"),
        ("--per-split-data-args-path", b'{"train": null, "valid": [], "test": ""}', "names no corpus"),
    ],
)
def test_a_file_of_paths_that_does_not_say_what_is_read_is_refused(tmp_path, flag, content, message):
    (tmp_path / "file").write_bytes(content)
    args = parse_args([*BASE.replace("--mock-data ", "").split(), flag, str(tmp_path / "file")])
    with pytest.raises(DataError) as error:
        get_blend_and_blend_per_split(args)
    assert f"{flag} {tmp_path / 'file'}" in error.value.what and message in error.value.what


def test_a_training_set_that_is_missing_or_used_up_is_named():
    with pytest.raises(DataError, match="no training data"):
        data(arguments("--train-iters 6"))
    with pytest.raises(DataError, match="no samples left to consume: 48, 48"):
        data(arguments("--train-iters 9", iteration=6, consumed_train_samples=48), Numbers(48))


# -- who reads -------------------------------------------------------------------------------------------------------


class Guard(Numbers):
    """Says whether the process that reads ignores SIGTERM and SIGUSR1."""

    def __getitem__(self, idx: int | None) -> dict[str, np.ndarray]:
        numbers = (signal.SIGTERM, signal.SIGUSR1)
        ignored = all(signal.getsignal(number) is signal.SIG_IGN for number in numbers)
        return {**super().__getitem__(idx), "ignored": np.array(ignored)}


@pytest.mark.parametrize("flag", ["", "--exit-signal-handler", "--exit-signal-handler-for-dataloader"])
def test_a_signal_to_all_processes_of_the_job_does_not_end_its_data(flag):
    """The loop is to finish its step and save; without its workers it failed instead. A worker without the flags dies,
    as Megatron's."""
    args = arguments(f"--train-iters 6 --eval-iters 0 --num-workers 2 {flag}")
    iterator = data(args, Guard(400)).train
    first = next(iterator)
    assert first["pid"].unique().tolist() != [os.getpid()] and bool(first["ignored"].all()) == bool(flag)
    if flag:
        os.kill(int(first["pid"][0]), signal.SIGTERM)
        time.sleep(0.05)
        assert ids(iterator, 19) == [[i, i + 1] for i in range(2, 40, 2)]


_FAILING = """
import sys
from tests.unit.training.test_data_loading import Numbers, arguments, data
iterator = data(arguments("--train-iters 6 --eval-iters 0 --num-workers 2 --exit-signal-handler"), Numbers(400)).train
next(iterator)
raise ValueError("a fault of the script")
"""


@pytest.mark.slow
def test_workers_that_ignore_the_signal_do_not_keep_a_failed_run_alive():
    """Its traceback holds the iterator, so that the workers are still there at the exit: they ended with no signal, and
    the process waited for them for ever."""
    words = [sys.executable, "-c", _FAILING]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.endswith("ValueError: a fault of the script\n")


def _global_batches(ranks: int, consumed: int, steps: int) -> list[list[list[int]]]:
    """What this rank reads in each of `steps` steps of 8 samples."""
    args = arguments("--train-iters 12 --eval-iters 1", world_size=ranks, consumed_train_samples=consumed)
    groups = ProcessGroupCollection(dp=dist.group.WORLD if ranks > 1 else None)
    found = data(args, Numbers(96), Numbers(100), groups=groups)
    per_step = 8 // (2 * ranks)
    return [sum(ids(found.train, per_step), []) for _ in range(steps)], sum(ids(found.valid[0].start(), per_step), [])


def test_C039_a_run_on_four_ranks_goes_on_with_two_and_with_one(world):
    """The loader of every rank, not the sampler alone: the samples of each global batch stay."""
    steps, valid = _global_batches(1, 0, 12)
    assert steps == [list(range(k, k + 8)) for k in range(0, 96, 8)] and valid == list(range(8))
    for ranks, done in ((4, 0), (2, 4), (1, 7)):
        found = (
            world(ranks).run(_global_batches, ranks, 8 * done, 12 - done)
            if ranks > 1
            else [_global_batches(1, 8 * done, 12 - done)]
        )
        batches = [sorted(sum(shares, [])) for shares in zip(*(batches for batches, _ in found))]
        assert batches == steps[done:]
        assert sorted(sum((valid for _, valid in found), [])) == valid
