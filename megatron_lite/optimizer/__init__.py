"""Optimizers over flat memory: fp32 main parameters, loss scaling, clipping, groups with their own schedules."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "optimizer_config": ["OptimizerConfig"],
        "builder": ["get_megatron_optimizer"],
        "optimizer": ["ChainedOptimizer", "MegatronOptimizer"],
        "distrib_optimizer": ["DistributedOptimizer"],
        "grad_scaler": ["ConstantGradScaler", "DynamicGradScaler", "MegatronGradScaler"],
        "param_groups": ["get_param_groups"],
        "clip_grads": ["get_grad_norm_fp32"],
        "flat_shard": ["FlatShard"],
        "inner": [],
        "lion": ["Lion"],
    },
)
