"""Text to token ids and back."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "tokenizer_config": ["TokenizerConfig"],
    },
)
