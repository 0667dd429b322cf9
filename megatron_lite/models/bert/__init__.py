"""Encoders that fill gaps in a text and tell the order of its parts."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "bert_model": ["BertModel"],
        "bert_lm_head": ["BertLMHead"],
        "pooler": ["Pooler"],
        "bert_layer_specs": [
            "bert_layer_local_spec",
            "get_bert_layer_local_spec",
            "get_bert_layer_with_transformer_engine_spec",
        ],
    },
)
