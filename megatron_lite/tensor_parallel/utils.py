"""Arithmetic of shares, under Megatron's names."""

from __future__ import annotations

from torch import Tensor

from megatron_lite.errors import ConfigError


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises ConfigError unless denominator divides numerator."""
    if numerator % denominator:
        raise ConfigError(
            f"{numerator} cannot be shared by {denominator}",
            why="every rank takes an equal part",
            fix=f"{-(-numerator // denominator) * denominator}, or another number of ranks",
        )


def divide(numerator: int, denominator: int) -> int:
    """The exact quotient. Raises ConfigError if there is a rest."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Equal parts of the last dim, as views unless `contiguous_split_chunks`."""
    chunks = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else chunks


class VocabUtility:
    """Which ids `[first, last)` a rank holds."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Rank r holds ids [r * size, (r + 1) * size)."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """The same, from the whole (padded) vocabulary."""
        return VocabUtility.vocab_range_from_per_partition_vocab_size(
            divide(global_vocab_size, world_size), rank, world_size
        )
