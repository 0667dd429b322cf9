"""Mixed-precision optimizers over sharded or whole main parameters."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "optimizer_config": ["OptimizerConfig"],
    },
)
