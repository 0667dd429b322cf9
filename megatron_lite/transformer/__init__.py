"""Layers, declared by specs of their submodules."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "attention": ["CrossAttention", "CrossAttentionSubmodules", "SelfAttention", "SelfAttentionSubmodules"],
        "dot_product_attention": ["DotProductAttention"],
        "enums": ["AttnBackend", "AttnMaskType", "AttnType", "LayerType"],
        "identity_op": ["IdentityFuncOp", "IdentityOp"],
        "inference_context": ["InferenceContext"],
        "mlp": ["MLP", "MLPSubmodules"],
        "module": ["Float16Module", "MegatronModule"],
        "multi_latent_attention": ["MLASelfAttention", "MLASelfAttentionSubmodules", "MultiLatentAttention"],
        "multi_token_prediction": ["MultiTokenPredictionBlock", "MultiTokenPredictionBlockSubmodules"],
        "spec_utils": ["ModuleSpec", "build_module"],
        "torch_norm": ["L2Norm", "LayerNorm", "RMSNorm", "WrappedTorchNorm"],
        "transformer_block": ["TransformerBlock", "TransformerBlockSubmodules"],
        "transformer_config": ["MLATransformerConfig", "TransformerConfig"],
        "transformer_layer": ["TransformerLayer", "TransformerLayerSubmodules"],
    },
)
