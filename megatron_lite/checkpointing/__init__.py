"""Checkpoints that a crash cannot spoil and another layout can read."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "checkpoint": ["Content", "read_args", "read_common", "read_tensors", "write_checkpoint"],
        "checkpoint_config": ["CheckpointConfig"],
        "folders": ["check_save_folder", "complete_iterations", "read_manifest", "read_tracker"],
        "sharded": ["saved_objects", "saved_tensors"],
    },
)
