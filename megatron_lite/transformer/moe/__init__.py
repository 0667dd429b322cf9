"""Mixture of experts: a router sends each token to a few of many MLPs."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "experts": ["GroupedMLP", "SequentialMLP", "TEGroupedMLP"],
        "moe_config": ["MoEConfig"],
        "moe_layer": ["MoELayer", "MoESubmodules"],
        "router": ["Router", "TopKRouter"],
        "shared_experts": ["SharedExpertMLP"],
        "token_dispatcher": ["MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher", "MoETokenDispatcher"],
    },
)
