"""Layers, declared by specs of their submodules."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "enums": ["AttnBackend", "AttnMaskType", "AttnType", "LayerType"],
        "transformer_config": ["TransformerConfig"],
    },
)
