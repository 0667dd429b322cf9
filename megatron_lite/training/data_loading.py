"""From data sets to iterators of micro-batches that start where the run left off.

provider(sizes) -> (train, valid, test) data sets          the script's, Megatron's contract
sampler(consumed samples, dp rank) -> index lists          position is a number in the checkpoint, nothing else
DataLoader -> iterator                                     workers prefetch; order does not depend on them

Worker processes call `dataset[i]` and nothing else: they hold no process group and touch no device. Where a signal is
to save the run, they do not die of it.

Rank 0 of a tensor-parallel group reads for the group; the others hold `ReadElsewhere` where rank 0 holds an iterator.
Of a pipeline the first and the last stage read; the others only where the mask of the attention is in the data.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_lite import collectives
from megatron_lite.datasets.blended_megatron_dataset_config import Blend
from megatron_lite.datasets.samplers import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
    RoundRobinSampler,
    WholeSetSampler,
)
from megatron_lite.datasets.utils import Split, get_blend_from_list
from megatron_lite.errors import ConfigError, DataError, MegatronLiteError
from megatron_lite.log import print_rank_0, warn_rank_0
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training import global_vars
from megatron_lite.training.derived import phase_of
from megatron_lite.training.evaluation import EvaluationSet, num_eval_microbatches
from megatron_lite.training.replay import NotedSampler, SamplesNamed
from megatron_lite.training.stage_data import NotNeeded, stage_reads

DatasetsProvider = Callable[[list[int | None]], Sequence[Any]]


class RunData(NamedTuple):
    """What a run reads.

    train: micro-batches of this data-parallel rank; None where nothing is trained.
    valid, test: empty where nothing is evaluated; several of `valid` with --multiple-validation-sets.
    """

    train: Iterator[Any] | None = None
    valid: Sequence[EvaluationSet] = ()
    test: Sequence[EvaluationSet] = ()


def get_blend_and_blend_per_split(args: Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """What the data flags name: one blend that `--split` cuts, or a blend for each split; both None for made-up data.

    Raises: DataError for a file of paths that cannot be read; ConfigError where nothing is named. (Megatron makes up
        samples then; nobody should train on them unawares.)
    """
    words = args.data_path
    if args.data_args_path:
        words = _read(args.data_args_path, "--data-args-path").split()
        if not words:
            raise DataError(f"--data-args-path {args.data_args_path} is empty", fix="write weights and prefixes in it")
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    if args.per_split_data_args_path:
        per_split = _words_per_split(args.per_split_data_args_path)
    if any(per_split):
        return None, [get_blend_from_list(words) for words in per_split]
    if not words and not args.mock_data:
        raise ConfigError(
            "no --data-path, and no --mock-data",
            why="a run reads its samples, or is told to make them up",
            fix="--data-path PREFIX",
        )
    return get_blend_from_list(words), None


def blended_options(args: Namespace, tokenizer: Any) -> dict[str, Any]:
    """What the data sets of every family are told: arguments of `BlendedMegatronDatasetConfig`.

    Raises: as `get_blend_and_blend_per_split`.
    """
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return dict(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
    )


def masked_options(args: Namespace, tokenizer: Any) -> dict[str, Any]:
    """What data sets with masked words are told beside: whole words, whatever the family."""
    return dict(
        **blended_options(args, tokenizer),
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
    )


def _words_per_split(path: str) -> list[list[str] | None]:
    """The words of train, valid and test in a file of --per-split-data-args-path.

    Raises: DataError for anything but an object with these names alone, each a text, a list of words, or null; and
        where none of them has a corpus. A name that is passed over would be a split that nobody reads.
    """
    flag = "--per-split-data-args-path"
    names = [split.name for split in Split]
    fix = 'write {"train": ["prefix"], "valid": ["prefix"], "test": ["prefix"]}'
    text = _read(path, flag)
    try:
        table = json.loads(text)
        if not isinstance(table, dict):
            raise ValueError(f"it holds a {type(table).__name__}")
    except ValueError as error:
        raise DataError(f"{flag} {path} is not a JSON object: {error}", fix=fix) from None
    unknown = [name for name in table if name not in names]
    if unknown:
        raise DataError(f"{flag} {path} names {', '.join(unknown)}", why=f"the splits are {', '.join(names)}", fix=fix)
    for name, words in table.items():
        plain = isinstance(words, list) and all(type(word) in (str, int, float) for word in words)
        if not (words is None or plain or isinstance(words, str)):
            raise DataError(
                f"{flag} {path}: {name} is {json.dumps(words)}", why="it is a text or a list of words", fix=fix
            )
    per_split = [words.split() if isinstance(words, str) else words for words in map(table.get, names)]
    if not any(per_split):
        raise DataError(f"{flag} {path} names no corpus", fix=fix)
    return [words and [str(word) for word in words] for words in per_split]


def _read(path: str, flag: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}", fix="check the path") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{flag} {path} is no text: {error.reason}", fix="check the path") from None


class ReadElsewhere:
    """Stands for the micro-batches that rank 0 of the tensor-parallel group reads: `next` gives None, without end.
    Called, it gives itself: so it is also an `EvaluationSet`'s start."""

    def __call__(self) -> ReadElsewhere:
        return self

    def __iter__(self) -> ReadElsewhere:
        return self

    def __next__(self) -> None:
        return None


def is_dataset_built_on_rank(vp_stage: int | None = None) -> bool:
    """Whether this rank reads data: the first of its tensor-parallel group does, on the stages that need any.

    Args:
        vp_stage: accepted as Megatron has it: the question is about all chunks of the rank.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return _reads(groups) and _needs(global_vars.get_args(), groups)


def _reads(groups: ProcessGroupCollection) -> bool:
    """Whether this rank reads for its tensor-parallel group, or for itself where the others do not exist."""
    return collectives.group_rank(groups.tp) == 0 or collectives.is_fake(groups.tp)


def _needs(args: Namespace, groups: ProcessGroupCollection) -> bool:
    """Whether this stage needs data. A rank alone of its world reads at any stage: nobody could tell it which data
    there are."""
    return stage_reads(args, groups) or collectives.is_fake(collectives.world())


def train_valid_test_num_samples(args: Namespace) -> list[int | None]:
    """How many samples each split must have; None: one epoch. The last part of an evaluation interval counts as one
    more evaluation."""
    evaluation = args.eval_iters * args.eval_global_batch_size
    train = args.train_samples or (args.train_iters or 0) * args.global_batch_size
    if args.phase_transition_iterations and not args.skip_train:
        begin, end = phase_of(args, args.iteration)
        train = end - begin
    if args.skip_train or not args.eval_interval:  # evaluation happens at the end alone
        evaluations = 1
    else:
        evaluations = args.train_iters // args.eval_interval + 1
    evaluations += args.eval_before_training
    return [train, None if args.full_validation else evaluations * evaluation, evaluation]


def build_train_valid_test_data_iterators(
    provider: DatasetsProvider, args: Namespace, pg_collection: ProcessGroupCollection
) -> RunData:
    """Iterators over micro-batches of this data-parallel rank.

    Args:
        provider: called with the sizes of train, valid and test, on every rank.
        args: `consumed_train_samples` and `consumed_valid_samples` say where to start.
    Raises: DataError for a training set that is empty or used up, on every rank of a tensor-parallel group.
    """
    print_rank_0("> building train, validation, and test datasets ...")
    sizes = train_valid_test_num_samples(args)
    print_rank_0(" > datasets target sizes (minimum size):")
    for split, size in zip(("train:     ", "validation:", "test:      "), sizes):
        print_rank_0(f"    {split} {'one epoch' if size is None else size}")
    datasets = provider(sizes)
    data = RunData()
    failure: MegatronLiteError | None = None
    needed = _needs(args, pg_collection)
    reads = needed and _reads(pg_collection)
    if reads:
        try:
            data = _run_data(datasets, args, pg_collection)
        except MegatronLiteError as error:
            failure = error
    elsewhere: Any = ReadElsewhere() if needed else NotNeeded()
    known = RunData(  # all but the iterators
        elsewhere if data.train is not None else None,
        [replace(held_out, start=elsewhere) for held_out in data.valid],
        [replace(held_out, start=elsewhere) for held_out in data.test],
    )
    found = (failure, known) if reads else None
    found, *_ = filter(None, collectives.all_gather_object(found, pg_collection.mp, purpose="which data there are"))
    failure, known = found
    if failure is not None:
        raise failure
    return (
        data
        if reads
        else RunData(
            None if known.train is None else elsewhere,
            [replace(held_out, start=elsewhere) for held_out in known.valid],
            [replace(held_out, start=elsewhere) for held_out in known.test],
        )
    )


def _run_data(datasets: Sequence[Any], args: Namespace, pg_collection: ProcessGroupCollection) -> RunData:
    train, valid, test = datasets
    train_data = None if args.skip_train else _train_iterator(train, args, pg_collection)
    valid_sets, test_sets = [], []
    if valid is not None and (args.eval_iters > 0 or args.full_validation):
        several = isinstance(valid, (list, tuple)) and args.multiple_validation_sets
        names = _names(valid, args) if several else [""]
        for name, dataset in zip(names, valid if several else [valid], strict=True):
            valid_sets += _evaluation_set(Split.valid, name, dataset, args, pg_collection)
    if test is not None and args.eval_iters > 0:
        test_sets = _evaluation_set(Split.test, "", test, args, pg_collection)
    return RunData(train_data, valid_sets, test_sets)


def _names(datasets: Sequence[Any], args: Namespace) -> list[str]:
    """Of several validation sets: those of --validation-set-names, else the ends of their prefixes, else numbers.

    Raises: ConfigError where the names given are not one a set.
    """
    given = args.validation_set_names
    if given and (len(given) != len(datasets) or len(set(given)) < len(given)):
        raise ConfigError(
            f"--validation-set-names {' '.join(given)} for {len(datasets)} validation sets",
            why="every set has one name, in the order of --valid-data-path, and no other set has it",
            fix=f"give {len(datasets)} different names",
        )
    if given:
        return list(given)
    ends = [PurePath(getattr(dataset, "dataset_path", None) or "").name for dataset in datasets]
    return ends if all(ends) and len(set(ends)) == len(ends) else [str(number) for number in range(len(datasets))]


def _train_iterator(dataset: Any, args: Namespace, pg_collection: ProcessGroupCollection) -> Iterator[Any]:
    if dataset is None:
        raise DataError(
            "there is no training data",
            why="the train part of --split is 0, or --train-data-path was not given",
            fix="give the train split a share, e.g. --split 969,30,1",
        )
    if args.dataloader_type == "external":  # the provider's object is the loader
        return iter(dataset)
    consumed = args.consumed_train_samples
    if args.phase_transition_iterations:
        consumed = _consumed_in_phase(args)
    share = _share(args.micro_batch_size, pg_collection)
    if args.dataloader_type == "cyclic":
        return _cyclic(dataset, consumed, args, share)
    sampler = NotedSampler(MegatronPretrainingSampler(len(dataset), consumed, **share))
    return SamplesNamed(iter(_loader(dataset, sampler, args)), sampler, dataset)


def _consumed_in_phase(args: Namespace) -> int:
    """Samples of the present phase that are used: each phase reads its data from their first sample on."""
    begin, _ = phase_of(args, args.iteration)
    if args.consumed_train_samples < begin:
        raise ConfigError(
            f"--phase-transition-iterations {args.phase_transition_iterations}: the phase of iteration "
            f"{args.iteration} begins at sample {begin}, and the checkpoint has used {args.consumed_train_samples}",
            why="phases are counted with the batch sizes of this command line",
            fix="the batch sizes of the former runs, until the next phase begins",
        )
    return args.consumed_train_samples - begin


def _evaluation_set(
    split: Split, name: str, dataset: Any, args: Namespace, pg_collection: ProcessGroupCollection
) -> list[EvaluationSet]:
    """How a held-out dataset is evaluated; nothing, with a warning, if it is empty.

    Args:
        name: what its losses are called, see `EvaluationSet`.
    """
    valid = split is Split.valid
    called = f"{'validation' if valid else 'test'} set{name and ' ' + name}"
    samples = args.eval_iters * args.eval_global_batch_size
    if args.dataloader_type == "external":
        iterator = iter(dataset)
        return [EvaluationSet(name, args.eval_iters, samples, lambda: iterator, advances=valid)]
    if not len(dataset):
        warn_rank_0(f"the {called} has no sample: it will not be evaluated")
        return []
    share = _share(args.eval_micro_batch_size, pg_collection)
    if valid and args.full_validation:
        whole = WholeSetSampler(len(dataset), num_microbatches=num_eval_microbatches(args), **share)
        if len(dataset) % args.eval_global_batch_size:
            _check_filler(called, dataset, args)
        # Its workers end with each pass: there may be many sets, and they are read seldom.
        loader = _loader(dataset, whole, args, persistent=False)
        return [EvaluationSet(name, whole.num_batches, len(dataset), lambda: iter(loader))]
    consumed = args.consumed_valid_samples if valid else 0
    asked = train_valid_test_num_samples(args)[split.value] or 0
    if samples > len(dataset):
        warn_rank_0(
            f"an evaluation reads {samples} samples, and the {called} has {len(dataset)}: some count more than once "
            "(fewer --eval-iters, or for validation --full-validation, to count each once)"
        )
    elif max(asked, consumed + samples) > len(dataset):
        warn_rank_0(
            f"the evaluations of this run read more than the {len(dataset)} samples of the {called}: after its "
            "last sample it starts over"
        )
    if args.dataloader_type == "cyclic" and len(dataset) >= share["micro_batch_size"] * share["data_parallel_size"]:
        # Whole batches: a run before this one may have had another batch size.
        consumed -= consumed % args.eval_global_batch_size
        iterator = _cyclic(dataset, consumed, args, share)
    else:
        iterator = _endless(dataset, consumed, args, share)
    return [EvaluationSet(name, args.eval_iters, samples, lambda: iterator, advances=valid)]


def _check_filler(called: str, dataset: Any, args: Namespace) -> None:
    """Fail at the start, not hours later, where the last batch cannot be filled up."""
    try:
        dataset[None]
    except Exception as error:
        raise DataError(
            f"the {called} has {len(dataset)} samples, which do not fill batches of {args.eval_global_batch_size}, and "
            f"dataset[None] gives no filler: {type(error).__name__}: {error}",
            why="--full-validation counts every sample once, and the last batch is filled up with samples without loss",
            fix="let dataset[None] return a sample whose loss_mask is 0, or an --eval-global-batch-size that divides",
        ) from error


def _share(micro_batch_size: int, pg_collection: ProcessGroupCollection) -> dict[str, Any]:
    """What samplers need to know of this rank."""
    return {
        "micro_batch_size": micro_batch_size,
        "data_parallel_rank": collectives.group_rank(pg_collection.dp),
        "data_parallel_size": collectives.group_size(pg_collection.dp),
    }


def _cyclic(dataset: Any, consumed: int, args: Namespace, share: dict[str, Any]) -> Iterator[Any]:
    """Epoch after epoch; the sampler counts on by itself, also while workers read ahead."""
    sampler = NotedSampler(
        MegatronPretrainingRandomSampler(dataset, len(dataset), consumed, data_sharding=args.data_sharding, **share)
    )
    loader = _loader(dataset, sampler, args)

    def epochs() -> Iterator[Any]:
        while True:
            yield from loader

    return SamplesNamed(epochs(), sampler, dataset)


def _endless(dataset: Any, consumed: int, args: Namespace, share: dict[str, Any]) -> Iterator[Any]:
    """In order, and the first again after the last. A generator: workers start with the first evaluation."""
    yield from _loader(dataset, RoundRobinSampler(len(dataset), consumed, **share), args)


def _loader(dataset: Dataset, sampler: Any, args: Namespace, persistent: bool = True) -> DataLoader:
    ignored = {args.exit_signal, signal.SIGUSR1}
    guarded = args.exit_signal_handler or args.exit_signal_handler_for_dataloader
    if guarded and args.num_workers:
        atexit.unregister(_end_workers)
        atexit.register(_end_workers)
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=args.num_workers,
        pin_memory=args.device.type == "cuda",
        persistent_workers=persistent and args.num_workers > 0,
        worker_init_fn=partial(_ignore_signals, ignored) if guarded else None,
        # Making an iterator draws a number: from here, or a resumed run's dropout would differ from then on.
        generator=torch.Generator().manual_seed(args.seed),
    )


def _ignore_signals(numbers: set[int], worker: int) -> None:
    """In a worker: schedulers signal every process of a job, and the step that is to be finished needs its data. A
    worker ends with its parent."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def _end_workers() -> None:
    """At the exit of a failed run, whose iterators its traceback still holds: multiprocessing would end the workers by
    the signal that they ignore, and wait for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the loader's own handler takes a worker's end for a failure
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
