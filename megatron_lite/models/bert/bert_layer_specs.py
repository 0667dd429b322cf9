"""Which modules a BERT layer is made of: those of a GPT layer, but attention looks both ways."""

from __future__ import annotations

from megatron_lite.errors import ConfigError
from megatron_lite.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron_lite.transformer.enums import AttnMaskType
from megatron_lite.transformer.spec_utils import ModuleSpec


def get_bert_layer_local_spec(qk_layernorm: bool = False) -> ModuleSpec:
    """A layer of this package's own modules.

    Args:
        qk_layernorm: norm queries and keys, head by head.
    """
    spec = get_gpt_layer_local_spec(qk_layernorm=qk_layernorm)
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.padding
    return spec


bert_layer_local_spec = get_bert_layer_local_spec()


def get_bert_layer_with_transformer_engine_spec() -> ModuleSpec:
    """Raises ConfigError: layers of Transformer Engine are not part of this package yet."""
    raise ConfigError(
        "--transformer-impl transformer_engine",
        why="layers of Transformer Engine are not built yet",
        fix="--transformer-impl local: the same arithmetic in plain torch",
    )
