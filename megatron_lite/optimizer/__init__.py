"""Optimizers over flat memory: fp32 main parameters, loss scaling, clipping, groups with their own schedules."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "optimizer_config": ["OptimizerConfig"],
        "builder": ["get_megatron_optimizer"],
        "optimizer": ["MegatronOptimizer"],
        "grad_scaler": ["ConstantGradScaler", "DynamicGradScaler", "MegatronGradScaler"],
        "param_groups": ["get_param_groups"],
        "clip_grads": [],
        "flat_shard": ["FlatShard"],
    },
)
