"""From data sets to iterators of micro-batches that start where the run left off.

provider(sizes) -> (train, valid, test) data sets          the script's, Megatron's contract
sampler(consumed samples, dp rank) -> index lists          position is a number in the checkpoint, nothing else
DataLoader -> iterator                                     workers prefetch; order does not depend on them

Rank 0 of a tensor-parallel group reads for the group; the others hold `ReadElsewhere` where rank 0 holds an iterator.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_lite import collectives
from megatron_lite.datasets.blended_megatron_dataset_config import Blend
from megatron_lite.datasets.samplers import MegatronPretrainingRandomSampler, MegatronPretrainingSampler
from megatron_lite.datasets.utils import get_blend_from_list
from megatron_lite.errors import DataError, MegatronLiteError
from megatron_lite.log import print_rank_0, warn_rank_0
from megatron_lite.process_groups_config import ProcessGroupCollection

DatasetsProvider = Callable[[list[int | None]], Sequence[Any]]
Iterators = tuple[Iterator[Any] | None, Iterator[Any] | None, Iterator[Any] | None]


def get_blend_and_blend_per_split(args: Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """What the data flags name: one blend that `--split` cuts, or a blend for each split; both None for made-up data.

    Raises: DataError for a file of paths that cannot be read.
    """
    words = args.data_path
    if args.data_args_path:
        words = _read(args.data_args_path, "--data-args-path").split()
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    if args.per_split_data_args_path:
        text = _read(args.per_split_data_args_path, "--per-split-data-args-path")
        try:
            table = json.loads(text)
            lists = [table.get(name) for name in ("train", "valid", "test")]
        except (ValueError, AttributeError) as error:
            raise DataError(
                f"--per-split-data-args-path {args.per_split_data_args_path} is not a JSON object: {error}",
                fix='{"train": ["prefix"], "valid": ["prefix"], "test": ["prefix"]}',
            ) from None
        per_split = [words.split() if isinstance(words, str) else words for words in lists]
    if any(per_split):
        return None, [get_blend_from_list(words) for words in per_split]
    return get_blend_from_list(words), None


def _read(path: str, flag: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}", fix="check the path") from None


class ReadElsewhere:
    """Stands for the micro-batches that rank 0 of the tensor-parallel group reads: `next` gives None, without end."""

    def __iter__(self) -> ReadElsewhere:
        return self

    def __next__(self) -> None:
        return None


def is_dataset_built_on_rank() -> bool:
    """Whether this rank reads data: the first of its tensor-parallel group does."""
    return collectives.group_rank(ProcessGroupCollection.use_mpu_process_groups().tp) == 0


def train_valid_test_num_samples(args: Namespace) -> list[int | None]:
    """How many samples each split must have. The last part of an evaluation interval counts as one more evaluation."""
    evaluation = args.eval_iters * args.global_batch_size
    train = args.train_samples or (args.train_iters or 0) * args.global_batch_size
    if args.skip_train or not args.eval_interval:  # evaluation happens at the end alone
        evaluations = 1
    else:
        evaluations = args.train_iters // args.eval_interval + 1
    evaluations += args.eval_before_training
    return [train, evaluations * evaluation, evaluation]


def build_train_valid_test_data_iterators(
    provider: DatasetsProvider, args: Namespace, pg_collection: ProcessGroupCollection
) -> Iterators:
    """Iterators over micro-batches of this data-parallel rank; None where there is nothing to read.

    Args:
        provider: called with the sizes of train, valid and test, on every rank.
        args: `consumed_train_samples` and `consumed_valid_samples` say where to start.
    Raises: DataError for a training set that is empty or used up, on every rank of a tensor-parallel group.
    """
    print_rank_0("> building train, validation, and test datasets ...")
    sizes = train_valid_test_num_samples(args)
    print_rank_0(" > datasets target sizes (minimum size):")
    for name, size in zip(("train:     ", "validation:", "test:      "), sizes):
        print_rank_0(f"    {name} {size}")
    datasets = provider(sizes)
    iterators: Iterators = (None, None, None)
    failure: MegatronLiteError | None = None
    if collectives.group_rank(pg_collection.tp) == 0:
        try:
            iterators = _iterators(datasets, args, pg_collection)
        except MegatronLiteError as error:
            failure = error
    there = [iterator is not None for iterator in iterators]
    failure, there = collectives.broadcast_object((failure, there), pg_collection.tp, purpose="which data there are")
    if failure is not None:
        raise failure
    if collectives.group_rank(pg_collection.tp) == 0:
        return iterators
    train, valid, test = (ReadElsewhere() if exists else None for exists in there)
    return train, valid, test


def _iterators(datasets: Sequence[Any], args: Namespace, pg_collection: ProcessGroupCollection) -> Iterators:
    train, valid, test = datasets
    wanted = args.eval_iters > 0
    return (
        None if args.skip_train else _iterator("train", train, args.consumed_train_samples, args, pg_collection),
        _iterator("valid", valid, args.consumed_valid_samples, args, pg_collection) if wanted else None,
        _iterator("test", test, 0, args, pg_collection) if wanted else None,
    )


def _iterator(
    split: str, dataset: Any, consumed: int, args: Namespace, pg_collection: ProcessGroupCollection
) -> Iterator[Any] | None:
    if dataset is None:
        if split == "train":
            raise DataError(
                "there is no training data",
                why="the train part of --split is 0, or --train-data-path was not given",
                fix="give the train split a share, e.g. --split 969,30,1",
            )
        return None
    if args.dataloader_type == "external":  # the provider's object is the loader
        return iter(dataset)
    if split != "train":
        batch = args.micro_batch_size * collectives.group_size(pg_collection.dp)
        if len(dataset) < batch:
            warn_rank_0(
                f"the {split} split has {len(dataset)} samples, fewer than one micro-batch of all ranks ({batch}): "
                f"there will be no {split} evaluation"
            )
            return None
        if consumed >= len(dataset) // batch * batch:
            warn_rank_0(f"all {len(dataset)} samples of the {split} split have been used: it starts over")
            consumed %= len(dataset) // batch * batch
        return _again(lambda start: _loader(dataset, start, args, pg_collection), consumed)
    if args.dataloader_type == "cyclic":
        return _again(lambda start: _loader(dataset, start, args, pg_collection), consumed, cyclic=True)
    return iter(_loader(dataset, consumed, args, pg_collection))


def _again(loader: Callable[[int], DataLoader], consumed: int, cyclic: bool = False) -> Iterator[Any]:
    """Batches without end. A cyclic sampler counts on by itself; another one starts over at 0."""
    current = loader(consumed)
    while True:
        yield from current
        if not cyclic:
            current = loader(0)


def _loader(dataset: Dataset, consumed: int, args: Namespace, pg_collection: ProcessGroupCollection) -> DataLoader:
    common = {
        "total_samples": len(dataset),  # type: ignore[arg-type]
        "consumed_samples": consumed,
        "micro_batch_size": args.micro_batch_size,
        "data_parallel_rank": collectives.group_rank(pg_collection.dp),
        "data_parallel_size": collectives.group_size(pg_collection.dp),
    }
    sampler: Any
    if args.dataloader_type == "cyclic":
        sampler = MegatronPretrainingRandomSampler(dataset, data_sharding=args.data_sharding, **common)
    else:
        sampler = MegatronPretrainingSampler(**common)
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=args.num_workers,
        pin_memory=args.device.type == "cuda",
        persistent_workers=args.num_workers > 0,
        # Making an iterator draws a number: from here, or a resumed run's dropout would differ from then on.
        generator=torch.Generator().manual_seed(args.seed),
    )
