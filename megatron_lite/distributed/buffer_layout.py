"""Where every parameter lies in the flat gradient buffer. Pure arithmetic, no torch.

    parameters, in the order backward reaches them        last layer ... first layer
    buffer    |  p7  |  p6 |pad|      p5      |pad|  p4 | p3 |pad|
    bucket    |------- 0 ------|------- 1 --------|------- 2 ----|   one collective each
    dp shard  |   rank 0  |   rank 1   | ...     every bucket is cut into dp equal parts

`param_and_grad_buffer` allocates by this plan, the optimizer steps on its ranges, checkpoints are cut by it. A
parameter never spans two buckets. Only a sharded optimizer needs the gaps: then parameters start at multiples of 64
elements and dp divides every bucket. Without it parameters lie side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PARAM_ALIGNMENT = 64  # elements: 128 bytes of a 16-bit number, a cache line of a GPU
_SHARD_ALIGNMENT = 128
_BUSBW_ALIGNMENT = 2**16  # NCCL's rings reach full bandwidth when each rank's part has a round size


@dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of a parameter."""

    name: str
    numel: int
    is_shared_embedding: bool = False


@dataclass(frozen=True)
class Range:
    """Elements `[start, end)`."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def shifted(self, by: int) -> Range:
        """The same elements, counted from another origin."""
        return Range(self.start + by, self.end + by)

    def overlap(self, other: Range) -> Range | None:
        """The common elements, None when there are none."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return Range(start, end) if start < end else None


@dataclass(frozen=True)
class BucketLayout:
    """A part of the buffer that is reduced at once.

    range: in the buffer, padding at its end included; numel_unpadded: without that padding, inner gaps included;
    params: names in buffer order.
    """

    range: Range
    numel_unpadded: int
    params: tuple[str, ...]


@dataclass(frozen=True)
class BufferLayout:
    """The plan of one buffer.

    ranges: each parameter's place in the buffer, by name, in buffer order; bucket_of: the number of its bucket;
    numel: size of the buffer; numel_unpadded: sum of the buckets' numel_unpadded.
    """

    ranges: dict[str, Range]
    bucket_of: dict[str, int]
    buckets: tuple[BucketLayout, ...]

    @property
    def numel(self) -> int:
        return self.buckets[-1].range.end if self.buckets else 0

    @property
    def numel_unpadded(self) -> int:
        return sum(bucket.numel_unpadded for bucket in self.buckets)


@dataclass(frozen=True)
class ParamRanges:
    """A rank's part of one parameter, in four systems of coordinates.

    gbuf_world: in the buffer; gbuf_world_in_bucket: in the bucket; gbuf_local: in the rank's shard of the bucket;
    param: in the flattened parameter.
    """

    gbuf_world: Range
    gbuf_world_in_bucket: Range
    gbuf_local: Range
    param: Range


def default_bucket_size(dp_size: int) -> int:
    """Elements per bucket when none is given: large enough that the collective runs at full bandwidth."""
    return max(40_000_000, 1_000_000 * dp_size)


def plan_buffer(
    params: Sequence[ParamSpec],
    bucket_size: int | None,
    dp_size: int,
    *,
    use_distributed_optimizer: bool = False,
    pad_buckets_for_high_nccl_busbw: bool = False,
) -> BufferLayout:
    """Lay out parameters that are given in module order.

    Args:
        bucket_size: a bucket is closed when it holds at least this many elements; None: one bucket.
        dp_size: ranks over which gradients are reduced.
        use_distributed_optimizer: align, pad, and give a shared embedding a bucket of its own: the first and the last
            pipeline stage sum their copies' gradients, and only a bucket that holds nothing else is cut alike on both.
    """
    aligned = use_distributed_optimizer
    end_alignment = math.lcm(dp_size, _SHARD_ALIGNMENT)
    if pad_buckets_for_high_nccl_busbw:
        end_alignment = math.lcm(end_alignment, _BUSBW_ALIGNMENT)
    ranges: dict[str, Range] = {}
    bucket_of: dict[str, int] = {}
    buckets: list[BucketLayout] = []
    begin = cursor = 0  # where the open bucket starts, and where its last parameter ends
    held: list[str] = []

    def close(end: int) -> None:
        nonlocal begin, cursor, held
        padded = _round_up(end, end_alignment) if aligned else end
        buckets.append(BucketLayout(Range(begin, padded), end - begin, tuple(held)))
        begin = cursor = padded
        held = []

    # Backward reaches the last layer first: in this order bucket 0 fills, and goes out, while the rest still computes.
    for param in reversed(params):
        alone = aligned and param.is_shared_embedding
        if aligned:
            cursor = _round_up(cursor, PARAM_ALIGNMENT)
        if alone and held:
            close(cursor)
        ranges[param.name] = Range(cursor, cursor + param.numel)
        bucket_of[param.name] = len(buckets)
        held.append(param.name)
        cursor += param.numel
        if alone or (bucket_size is not None and cursor - begin >= bucket_size):
            close(cursor)
    if held:
        close(cursor)
    return BufferLayout(ranges, bucket_of, tuple(buckets))


def shard_of_bucket(bucket: BucketLayout, rank: int, dp_size: int) -> Range:
    """The equal part of a bucket that rank `rank` owns, in the buffer. dp_size 1: all of it."""
    size, rest = divmod(bucket.range.size, dp_size)
    assert rest == 0, f"a bucket of {bucket.range.size} elements cannot be cut into {dp_size} equal parts"
    return Range(bucket.range.start + rank * size, bucket.range.start + (rank + 1) * size)


def param_ranges_of_shard(layout: BufferLayout, bucket_number: int, shard: Range) -> dict[str, ParamRanges]:
    """Which parts of which parameters lie in `shard` (given in the buffer, inside the bucket); in buffer order.

    A parameter may be split between shards; a shard may hold none, when all of it is padding.
    """
    bucket = layout.buckets[bucket_number]
    result = {}
    for name in bucket.params:
        place = layout.ranges[name]
        world = place.overlap(shard)
        if world is not None:
            result[name] = ParamRanges(
                gbuf_world=world,
                gbuf_world_in_bucket=world.shifted(-bucket.range.start),
                gbuf_local=world.shifted(-shard.start),
                param=world.shifted(-place.start),
            )
    return result


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
