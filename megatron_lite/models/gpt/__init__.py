"""Decoder-only language models."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "gpt_model": ["GPTModel"],
        "gpt_layer_specs": ["get_gpt_layer_local_spec", "get_gpt_layer_with_transformer_engine_spec"],
    },
)
