"""Word, position and rotary embeddings."""

from megatron_lite.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron_lite.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

__all__ = ["RotaryEmbedding", "apply_rotary_pos_emb"]
