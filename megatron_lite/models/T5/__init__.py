"""Encoder-decoder language models."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "t5_model": ["T5Model"],
        "t5_spec": ["get_t5_decoder_with_local_block_spec", "get_t5_encoder_with_local_block_spec"],
    },
)
