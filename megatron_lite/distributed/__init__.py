"""Data parallelism: flat gradient buffers, cut into buckets that are reduced as they fill."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "distributed_data_parallel_config": ["DistributedDataParallelConfig"],
        "data_parallel_base": ["DataParallelBase", "broadcast_parameters", "held_part", "whole_parameters"],
        "distributed_data_parallel": ["DistributedDataParallel"],
        "fully_sharded_config": ["FullyShardedConfig", "TorchFullyShardedDataParallelConfig"],
        "torch_fully_sharded_data_parallel": ["FullyShardedDataParallel", "TorchFullyShardedDataParallel"],
        "finalize_model_grads": ["finalize_model_grads"],
        "param_and_grad_buffer": ["ParamAndGradBuffer", "Bucket"],
        "bucket_group": ["BucketGroup"],
        "buffer_layout": [],
    },
)
