"""Checkpoints that a crash cannot spoil and another layout can read."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "checkpoint_config": ["CheckpointConfig"],
    },
)
