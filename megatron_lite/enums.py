"""Kinds of model, as Megatron's scripts name them."""

import enum


class ModelType(enum.Enum):
    """What a model needs from the pipeline: one stack of layers, or an encoder beside a decoder."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
    retro_encoder = 3
    retro_decoder = 4
