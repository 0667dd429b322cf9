"""A run: arguments, start-up, the loop, its log, resuming. The only room that knows what a run is."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "configs": [
            "DataConfig",
            "DistributedInitConfig",
            "LoggingConfig",
            "ModelConfig",
            "RNGConfig",
            "SchedulerConfig",
            "TrainingConfig",
            "ValidationConfig",
        ],
        "global_vars": ["get_args", "get_tensorboard_writer", "get_timers", "get_tokenizer"],
    },
)
