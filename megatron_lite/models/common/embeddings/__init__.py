"""Word, position and rotary embeddings."""

from megatron_lite.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron_lite.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding
from megatron_lite.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

__all__ = ["MultimodalRotaryEmbedding", "RotaryEmbedding", "YarnRotaryEmbedding", "apply_rotary_pos_emb"]
