"""Data parallelism: flat gradient buffers, cut into buckets that are reduced as they fill."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "distributed_data_parallel_config": ["DistributedDataParallelConfig"],
        "distributed_data_parallel": ["DistributedDataParallel", "whole_parameters"],
        "finalize_model_grads": ["finalize_model_grads"],
        "param_and_grad_buffer": ["ParamAndGradBuffer", "Bucket"],
        "bucket_group": ["BucketGroup"],
        "buffer_layout": [],
    },
)
