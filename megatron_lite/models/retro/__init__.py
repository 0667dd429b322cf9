"""GPT that looks at retrieved text."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "config": ["RetroConfig"],
        "decoder_spec": ["get_retro_decoder_block_spec", "get_retro_decoder_layer_local_spec"],
        "encoder_spec": ["get_retro_encoder_block_spec", "get_retro_encoder_layer_local_spec"],
        "model": ["RetroModel"],
    },
)
