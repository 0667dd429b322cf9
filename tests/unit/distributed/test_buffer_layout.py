"""The plan of the flat buffer: worked tables, golden data, properties for any sizes and any number of ranks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.distributed.buffer_layout import (
    ParamSpec,
    Range,
    default_bucket_size,
    param_ranges_of_shard,
    plan_buffer,
    shard_of_bucket,
)

WORKED = [("emb", 1000), ("ln1.w", 20), ("qkv.w", 700), ("qkv.b", 35), ("fc.w", 900), ("ln2.w", 20)]


def _worked(dp=4, bucket_size=800, shared=False, **kw):
    params = [ParamSpec(name, numel, shared and name == "emb") for name, numel in WORKED]
    return plan_buffer(params, bucket_size, dp, **kw)


def _places(layout):
    return {name: (r.start, r.end) for name, r in layout.ranges.items()}


def _bounds(layout):
    return [(b.range.start, b.range.end) for b in layout.buckets]


def test_sharded_layout_aligns_parameters_and_pads_buckets():
    layout = _worked(use_distributed_optimizer=True)
    assert _places(layout) == {
        "ln2.w": (0, 20),
        "fc.w": (64, 964),
        "qkv.b": (1024, 1059),
        "qkv.w": (1088, 1788),
        "ln1.w": (1792, 1812),
        "emb": (1856, 2856),
    }
    assert _bounds(layout) == [(0, 1024), (1024, 2944)]
    assert [b.numel_unpadded for b in layout.buckets] == [964, 1832]
    assert (layout.numel, layout.numel_unpadded) == (2944, 2796)
    assert [layout.bucket_of[name] for name in ("fc.w", "qkv.b", "emb")] == [0, 1, 1]


def test_plain_layout_has_no_gaps():
    layout = _worked()
    assert _places(layout) == {
        "ln2.w": (0, 20),
        "fc.w": (20, 920),
        "qkv.b": (920, 955),
        "qkv.w": (955, 1655),
        "ln1.w": (1655, 1675),
        "emb": (1675, 2675),
    }
    assert _bounds(layout) == [(0, 920), (920, 2675)] and layout.numel == layout.numel_unpadded == 2675
    assert _bounds(_worked(bucket_size=None)) == [(0, 2675)]


def test_padding_follows_the_number_of_ranks_and_the_busbw_option():
    sharded = dict(use_distributed_optimizer=True)
    assert _bounds(_worked(6, **sharded)) == [(0, 1152), (1152, 3072)]
    assert _bounds(_worked(pad_buckets_for_high_nccl_busbw=True, **sharded)) == [(0, 65536), (65536, 131072)]


def test_a_shared_embedding_has_a_bucket_of_its_own_when_sharded():
    layout = _worked(bucket_size=None, shared=True, use_distributed_optimizer=True)
    assert _bounds(layout) == [(0, 1920), (1920, 2944)]
    assert [b.numel_unpadded for b in layout.buckets] == [1856, 1000]
    assert layout.buckets[1].params == ("emb",) and layout.ranges["emb"] == Range(1920, 2920)
    assert _bounds(_worked(bucket_size=None, shared=True)) == [(0, 2675)]


def test_range_maps_of_the_worked_table():
    """rank, bucket, name -> world, in bucket, local, param."""
    layout = _worked(use_distributed_optimizer=True)
    rows = [
        (rank, bucket, name, *((r.start, r.end) for r in vars(ranges).values()))
        for rank in range(4)
        for bucket in range(2)
        for name, ranges in param_ranges_of_shard(
            layout, bucket, shard_of_bucket(layout.buckets[bucket], rank, 4)
        ).items()
    ]
    assert rows == [
        (0, 0, "ln2.w", (0, 20), (0, 20), (0, 20), (0, 20)),
        (0, 0, "fc.w", (64, 256), (64, 256), (64, 256), (0, 192)),
        (0, 1, "qkv.b", (1024, 1059), (0, 35), (0, 35), (0, 35)),
        (0, 1, "qkv.w", (1088, 1504), (64, 480), (64, 480), (0, 416)),
        (1, 0, "fc.w", (256, 512), (256, 512), (0, 256), (192, 448)),
        (1, 1, "qkv.w", (1504, 1788), (480, 764), (0, 284), (416, 700)),
        (1, 1, "ln1.w", (1792, 1812), (768, 788), (288, 308), (0, 20)),
        (1, 1, "emb", (1856, 1984), (832, 960), (352, 480), (0, 128)),
        (2, 0, "fc.w", (512, 768), (512, 768), (0, 256), (448, 704)),
        (2, 1, "emb", (1984, 2464), (960, 1440), (0, 480), (128, 608)),
        (3, 0, "fc.w", (768, 964), (768, 964), (0, 196), (704, 900)),
        (3, 1, "emb", (2464, 2856), (1440, 1832), (0, 392), (608, 1000)),
    ]


@pytest.mark.parametrize("dp", [2, 4])
def test_layout_and_range_maps_equal_megatrons(golden, dp):
    """10 buffers of a GPT: tied or not, bucket sizes, busbw padding, sharded or not; every rank's ranges."""
    checked = 0
    for rank, runs in enumerate(golden(f"distopt_dp{dp}.json")["ranks"]):
        for run in runs:
            config = run["ddp_config"]
            sharded = config["use_distributed_optimizer"]
            params = []
            for name, shape in run["named_parameters"]:
                params.append(ParamSpec(name, math.prod(shape)))  # on one stage no embedding is shared between stages
            layout = plan_buffer(
                params,
                config["bucket_size"] if config.get("overlap_grad_reduce") else None,
                dp,
                use_distributed_optimizer=sharded,
                pad_buckets_for_high_nccl_busbw=config.get("pad_buckets_for_high_nccl_busbw", False),
            )
            (theirs,) = run["buffers"]
            assert (layout.numel, layout.numel_unpadded) == (theirs["numel"], theirs["numel_unpadded"])
            ours = {n: [r.start, r.end, layout.bucket_of[n]] for n, r in layout.ranges.items()}
            assert ours == theirs["param_index_map"]
            for bucket, expected in zip(layout.buckets, theirs["buckets"], strict=True):
                assert bucket.range == Range(expected["offset"], expected["offset"] + expected["numel"])
                assert bucket.numel_unpadded == expected["numel_unpadded"]
                assert list(bucket.params) == expected["params"]
            if not sharded:
                continue
            for number, expected in enumerate(run["param_range_maps_per_bucket"][0]):
                shard = shard_of_bucket(layout.buckets[number], rank, dp)
                ours = {
                    name: {key: [r.start, r.end] for key, r in vars(ranges).items()}
                    for name, ranges in param_ranges_of_shard(layout, number, shard).items()
                }
                assert ours == expected
                checked += len(expected)
    assert checked > 100


@given(
    sizes=st.lists(st.tuples(st.integers(1, 3000), st.booleans()), min_size=1, max_size=30),
    bucket_size=st.none() | st.integers(1, 5000),
    dp=st.integers(1, 12),
    sharded=st.booleans(),
)
def test_every_element_has_one_place_and_one_owner(sizes, bucket_size, dp, sharded):
    params = [ParamSpec(f"p{i}", numel, shared) for i, (numel, shared) in enumerate(sizes)]
    layout = plan_buffer(params, bucket_size, dp, use_distributed_optimizer=sharded)
    assert list(layout.ranges) == [p.name for p in reversed(params)]
    ranges = list(layout.ranges.values())
    assert all(a.end <= b.start for a, b in zip(ranges, ranges[1:]))
    assert [r.size for r in ranges] == [p.numel for p in reversed(params)]
    assert [b.range.start for b in layout.buckets] == [0, *(b.range.end for b in layout.buckets)][:-1]
    for number, bucket in enumerate(layout.buckets):
        for name in bucket.params:
            assert layout.bucket_of[name] == number
            assert bucket.range.overlap(layout.ranges[name]) == layout.ranges[name]
        used = bucket.numel_unpadded
        assert max(layout.ranges[n].end for n in bucket.params) <= bucket.range.start + used <= bucket.range.end
        full = bucket_size is not None and used >= bucket_size
        assert full or number == len(layout.buckets) - 1 or sharded
        if bucket_size is not None:  # closed as soon as it was full
            before_last = [layout.ranges[name].end - bucket.range.start for name in bucket.params[:-1]]
            assert all(end < bucket_size for end in before_last)
    if not sharded:
        assert layout.numel == sum(p.numel for p in params)
        return
    assert all(r.start % 64 == 0 for r in ranges)
    shared = {p.name for p in params if p.is_shared_embedding}
    assert all(len(b.params) == 1 for b in layout.buckets if shared & set(b.params))
    owned = {p.name: [] for p in params}
    for rank in range(dp):
        for number, bucket in enumerate(layout.buckets):
            shard = shard_of_bucket(bucket, rank, dp)
            for name, r in param_ranges_of_shard(layout, number, shard).items():
                assert r.gbuf_local.shifted(shard.start) == r.gbuf_world
                assert r.gbuf_world_in_bucket.shifted(bucket.range.start) == r.gbuf_world
                assert r.param.shifted(layout.ranges[name].start) == r.gbuf_world
                assert 0 <= r.gbuf_local.start < r.gbuf_local.end <= shard.size
                owned[name].append(r.param)
    for param in params:
        ends = [0] + [r.end for r in sorted(owned[param.name], key=lambda r: r.start)]
        assert [r.start for r in sorted(owned[param.name], key=lambda r: r.start)] == ends[:-1]
        assert ends[-1] == param.numel


def test_unsharded_is_one_shard_that_covers_everything():
    layout = _worked()
    for number, bucket in enumerate(layout.buckets):
        ranges = param_ranges_of_shard(layout, number, shard_of_bucket(bucket, 0, 1))
        assert tuple(ranges) == bucket.params
        assert all(r.param == Range(0, layout.ranges[name].size) for name, r in ranges.items())


def test_default_bucket_size_grows_with_the_ranks():
    assert [default_bucket_size(dp) for dp in (1, 40, 64)] == [40_000_000, 40_000_000, 64_000_000]
    assert plan_buffer([], None, 4).numel == 0
