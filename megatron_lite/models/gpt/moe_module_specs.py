"""Which modules a layer of experts is made of."""

from __future__ import annotations

from megatron_lite.errors import ConfigError
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lite.transformer.mlp import MLPSubmodules
from megatron_lite.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron_lite.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron_lite.transformer.moe.shared_experts import SharedExpertMLP
from megatron_lite.transformer.spec_utils import ModuleSpec


def get_moe_module_spec(
    use_te: bool | None = False,
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    moe_use_legacy_grouped_gemm: bool | None = False,
) -> ModuleSpec:
    """A layer of experts in place of an MLP.

    Args:
        use_te: refused where true: layers of Transformer Engine are not built.
        num_experts: as Megatron has it; how many there are is the config's to say.
        moe_grouped_gemm, moe_use_legacy_grouped_gemm: all experts of a rank in one grouped product.
    """
    assert num_experts is not None, "a layer of experts has experts"
    if use_te:
        raise ConfigError(
            "experts of Transformer Engine",
            why="its layers are not built yet",
            fix="--transformer-impl local: the same arithmetic in plain torch",
        )
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    grouped = moe_grouped_gemm or moe_use_legacy_grouped_gemm
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=GroupedMLP if grouped else SequentialMLP, submodules=linear),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linear),
        ),
    )
