"""`megatron-lite <verb>`: what one does before, after and around a training run."""
