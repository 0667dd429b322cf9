"""Index files are built by one rank, loaded by the others, and a failure reaches all of them."""

import numpy as np
import torch.distributed as dist

from megatron_lite.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron_lite.datasets.gpt_dataset import GPTDataset
from megatron_lite.errors import MegatronLiteError
from tests.unit.datasets.corpora import config, numbered, write_corpus


def _build(prefix: str, cache: str, everywhere: bool) -> tuple:
    options = {"path_to_cache": cache if not everywhere else f"{cache}-{dist.get_rank()}"}
    builder = BlendedMegatronDatasetBuilder(
        GPTDataset, [30, 0, 0], lambda: dist.get_rank() != 1, config(([prefix], None), **options)
    )
    dataset = builder.build()[0]
    if dataset is None:
        return None, None
    return dataset.built_anew_on_cache_miss, np.asarray(dataset.sample_index).tolist()


def test_first_rank_builds_and_the_others_load(world, tmp_path):
    prefix = write_corpus(tmp_path / "c", numbered(9))
    results = world(4).run(_build, prefix, str(tmp_path / "cache"), False)
    assert [built for built, _ in results] == [True, None, False, False]  # rank 1 needs no data
    assert results[0][1] == results[2][1] == results[3][1]


def test_ranks_without_a_common_folder_build_their_own(world, tmp_path):
    prefix = write_corpus(tmp_path / "c", numbered(9))
    results = world(4).run(_build, prefix, str(tmp_path / "cache"), True)
    assert [built for built, _ in results] == [True, None, True, True]
    assert results[0][1] == results[3][1]


def _fail(prefix: str) -> str:
    try:
        BlendedMegatronDatasetBuilder(GPTDataset, [30, 0, 0], lambda: True, config(([prefix], None))).build()
    except MegatronLiteError as error:
        return str(error)
    return "no error"


def test_failure_of_the_building_rank_ends_all_ranks(world, tmp_path):
    first, *others = world(4).run(_fail, str(tmp_path / "nothere"))
    assert first.startswith("cannot read")
    for message in others:
        assert message.startswith("rank 0, which builds the index files, failed") and "nothere" in message
