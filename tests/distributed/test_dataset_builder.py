"""Index files are built by one rank, loaded by the others, and a failure reaches all of them."""

import datetime
import socket
import threading
import time
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from megatron_lite import waiting
from megatron_lite.datasets import blended_megatron_dataset_builder, gpt_dataset
from megatron_lite.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron_lite.datasets.gpt_dataset import GPTDataset
from megatron_lite.errors import MegatronLiteError, RankFailure
from megatron_lite.waiting import Meeting
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


# -- a build of any length --------------------------------------------------------------------------------------------


def _slow_build(prefix: str, cache: str, seconds: float, timeout: float) -> tuple[bool, int]:
    """The first rank's build takes longer than a collective of the group may; a collective is then tried."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout))
    build = gpt_dataset.build_document_index

    def slow(*args):
        time.sleep(seconds)
        return build(*args)

    with mock.patch.object(gpt_dataset, "build_document_index", slow):
        options = config(([prefix], None), path_to_cache=cache)
        dataset = BlendedMegatronDatasetBuilder(GPTDataset, [30, 0, 0], lambda: True, options, group=group).build()[0]
    count = [0]
    dist.all_gather_object(count * 2, 1, group=group)  # the group still works
    dist.destroy_process_group(group)
    return dataset.built_anew_on_cache_miss, len(dataset)


def test_c027_ranks_outwait_a_build_that_is_slower_than_the_timeout(world, tmp_path):
    """One split is built, 2 s; a collective may take 1 s. A pending one would end the run of the rank that waits."""
    prefix = write_corpus(tmp_path / "c", numbered(9))
    (built, size), (loaded, same) = world(2).run(_slow_build, prefix, str(tmp_path / "cache"), 2.0, 1.0)
    assert (built, loaded) == (True, False) and size == same >= 30


def _wait_for_the_dead() -> str:
    with mock.patch.multiple(waiting, SILENCE_S=0.3, PULSE_S=0.05):
        meeting = Meeting(dist.group.WORLD, "the index build")
        if dist.get_rank() == 0:
            time.sleep(1.5)  # no sign of life: as if it were killed
            return "came late"
        try:
            meeting.wait_for_all()
        except RankFailure as error:
            return str(error)
    return "no error"


def test_c027_a_build_without_a_sign_of_life_ends_the_wait_and_is_named(world):
    assert world(2).run(_wait_for_the_dead)[1].startswith("the index build gave no sign of life")


def _work_long() -> tuple[str, int]:
    with mock.patch.multiple(waiting, SILENCE_S=0.4, PULSE_S=0.05):
        meeting = Meeting(dist.group.WORLD, "the index build")
        if dist.get_rank() == 0:
            with meeting.at_work():
                time.sleep(1.5)
        meeting.wait_for_all()
    return "met", sum(thread.name == "pulse" for thread in threading.enumerate())


def test_a_rank_at_work_is_waited_for_and_leaves_no_thread(world):
    assert world(2).run(_work_long) == [("met", 0)] * 2


# -- nodes ------------------------------------------------------------------------------------------------------------


def _build_on_nodes(prefix: str, caches: dict[int, str]) -> tuple[bool, int, int]:
    """Ranks 0 and 1 on one node, 2 and 3 on another. Returns: built?, calls of the builder in all, time of the last."""
    rank = dist.get_rank()
    built: list[float] = []
    build = gpt_dataset.build_document_index

    def noted(*args):
        built.append(time.monotonic())
        return build(*args)

    with (
        mock.patch.object(socket, "gethostname", lambda: f"node{rank // 2}"),
        mock.patch.object(gpt_dataset, "build_document_index", noted),
    ):
        options = config(([prefix], None), path_to_cache=caches[rank // 2])
        dataset = BlendedMegatronDatasetBuilder(GPTDataset, [30, 0, 0], lambda: True, options).build()[0]
    return dataset.built_anew_on_cache_miss, len(built), len(dataset)


@pytest.mark.parametrize("shared", [True, False], ids=["shared-folder", "folder-of-each-node"])
def test_one_rank_of_each_node_builds_where_no_folder_is_shared(world, tmp_path, shared):
    """Not every rank of a node: they would all do the same at once, in eight times the memory."""
    prefix = write_corpus(tmp_path / "c", numbered(9))
    caches = {node: str(tmp_path / ("cache" if shared else f"cache{node}")) for node in (0, 1)}
    results = world(4).run(_build_on_nodes, prefix, caches)
    assert [built for built, _, _ in results] == [True, False, not shared, False]
    assert [bool(calls) for _, calls, _ in results] == [True, False, not shared, False]
    assert len({size for _, _, size in results}) == 1


def _read_quickly(prefix: str, cache: str) -> str:
    options = config(([prefix], None), path_to_cache=cache, fast_cache_load=True)
    with mock.patch.object(
        blended_megatron_dataset_builder, "build_in_turns", side_effect=AssertionError("a rank waits")
    ):
        try:
            dataset = BlendedMegatronDatasetBuilder(GPTDataset, [30, 0, 0], lambda: True, options).build()[0]
        except MegatronLiteError as error:
            return str(error)
    return str(dataset[0]["tokens"].tolist())


def test_trusted_caches_are_loaded_without_waiting(world, tmp_path):
    prefix = write_corpus(tmp_path / "c", numbered(9))
    options = config(([prefix], None), path_to_cache=str(tmp_path / "cache"))
    plain = BlendedMegatronDatasetBuilder(GPTDataset, [30, None, None], lambda: True, options).build()[0]
    assert world(2).run(_read_quickly, prefix, str(tmp_path / "cache")) == [str(plain[0]["tokens"].tolist())] * 2


def _fail_on_the_other_node(prefix: str, cache: str) -> str:
    rank = dist.get_rank()
    if rank == 1:
        prefix += "nothere"
    with mock.patch.object(socket, "gethostname", lambda: f"node{rank}"):
        try:
            options = config(([prefix], None), path_to_cache=cache)
            BlendedMegatronDatasetBuilder(GPTDataset, [30, 0, 0], lambda: True, options).build()
        except MegatronLiteError as error:
            return str(error)
    return "no error"


def test_failure_on_a_node_without_the_corpus_ends_all_ranks(world, tmp_path):
    prefix = write_corpus(tmp_path / "c", numbered(9))
    first, second = world(2).run(_fail_on_the_other_node, prefix, str(tmp_path / "cache"))
    assert first.startswith("rank 1, which builds the index files, failed") and second.startswith("cannot read")
