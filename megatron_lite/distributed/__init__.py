"""Data parallelism: buckets of gradients, reduced as they fill."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "distributed_data_parallel_config": ["DistributedDataParallelConfig"],
    },
)
