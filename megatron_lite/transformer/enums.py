"""Kinds of layers, attention and masks. Names are Megatron's."""

import enum


class LayerType(enum.Enum):
    """Where a layer stands."""

    encoder = 1
    decoder = 2


class AttnType(enum.Enum):
    """Whose keys the queries meet: their own sequence's, or another's."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """What a query may see. `arbitrary` goes by the mask tensor alone."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5


class AttnBackend(enum.Enum):
    """`--attention-backend`: whose kernel computes attention. `local` is ours, written out."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5
