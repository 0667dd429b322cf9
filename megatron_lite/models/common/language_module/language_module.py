"""What language models share: the loss, tied embeddings, and global names for all parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite import collectives
from megatron_lite.initialization import initialize_parameters
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.sharding import whole
from megatron_lite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_lite.tensor_parallel.layers import (
    ColumnParallelLinear,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.transformer_config import TransformerConfig


def global_names(model: nn.Module) -> dict[str, str]:
    """Parameter or buffer name on this rank -> name in the whole model: layers and experts keep their global number.

    `decoder.layers.0.mlp...` on a stage that starts at layer 4 is `decoder.layers.4.mlp...`, and `local_experts.0` of a
    rank whose first expert is number 2 is `local_experts.2`.
    """
    names = (name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()))
    return _numbered(model, names)


def global_module_names(model: nn.Module) -> dict[str, str]:
    """The same for modules."""
    return _numbered(model, (name for name, _ in model.named_modules()))


def _numbered(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names -> the same with the numbers that layers and experts have in the whole model."""
    numbers = {}  # name of a layer or an expert -> its number among all
    for name, module in model.named_modules():
        layer, expert = getattr(module, "layer_number", None), getattr(module, "expert_number", None)
        if layer is not None and re.search(r"\.layers\.\d+$", "." + name):
            numbers[name] = layer - 1
        elif expert is not None:
            numbers[name] = expert
    found = {}
    for name in names:
        words = name.split(".")
        prefixes = (".".join(words[: i + 1]) for i in range(len(words)))
        found[name] = ".".join(str(numbers.get(prefix, word)) for prefix, word in zip(prefixes, words))
    return found


def mark_output_layer(layer: ColumnParallelLinear, config: TransformerConfig) -> None:
    """What sets a layer that makes logits apart from others."""
    layer.defers_weight_grads = config.defer_embedding_wgrad_compute
    layer.output_dtype = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}[config.output_logit_dtype]


class LanguageModule(MegatronModule):
    """Base of the models that end in a vocabulary.

    Args:
        pg_collection: None = the registered groups.
    """

    embedding: Any
    output_layer: Any
    holds_embedding = False  # of a stage that is not the first: a copy, for predictions of further tokens

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None):
        super().__init__(config)
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.vp_stage: int | None = None
        self.share_embeddings_and_output_weights = False
        self.pre_process = self.post_process = True

    def name_and_initialize(self) -> None:
        """At the end of a model's constructor: all gets its global name, and parameters their initial values.

        The copy of a tied embedding on the last stage has the embedding's name, so it starts equal without any
        communication.
        """
        names, buffers = global_names(self), dict(self.named_buffers())
        for name, buffer in buffers.items():
            buffer.shard = whole(names[name], tuple(buffer.shape))  # type: ignore[attr-defined]
        for name, global_name in names.items():
            if name in buffers:
                continue
            param = self.get_parameter(name)
            if self.share_embeddings_and_output_weights and param is self._output_weight():
                global_name = "embedding.word_embeddings.weight"
            shard = getattr(param, "shard", None) or whole(name, tuple(param.shape))
            param.shard = shard.renamed(global_name)  # type: ignore[attr-defined]
            set_defaults_if_not_set_tensor_model_parallel_attributes(param)
        initialize_parameters(self)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Loss per token.

        The logits are used up: their gradient is written over them.

        Args:
            labels: `[b, s]`.
            logits: `[s, b, v/t]`.
        Returns: `[b, s]`, fp32.
        """
        loss = vocab_parallel_cross_entropy(
            logits, labels.transpose(0, 1).contiguous(), tp_group=self.pg_collection.tp, over_logits=True
        )
        # A copy also where a micro-batch of 1 would do with a view: of what torch's FSDP wraps, a view is warned about.
        return loss.transpose(0, 1).clone(memory_format=torch.contiguous_format)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The weight that the first and last stage hold both, on those stages; else None."""
        weight = self._embedding_weight()
        return self._output_weight() if weight is None else weight

    def _embedding_weight(self) -> Any:
        return self.embedding.word_embeddings.weight if self.pre_process or self.holds_embedding else None

    def _output_weight(self) -> Any:
        return self.output_layer.weight if self.post_process else None

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark the embedding and the output layer, and, where they are tied over two stages, the copies.

        `is_embedding_or_output_parameter`: optimizers may treat them apart. `shared_embedding`: on every stage that
        holds the tied weight (their gradients are summed); `shared`: on the copy, which norms do not count.
        """
        for weight in (self._embedding_weight(), self._output_weight()):
            if weight is not None:
                weight.is_embedding_or_output_parameter = True
        if collectives.group_size(self.pg_collection.pp) == 1:
            return
        if not self.share_embeddings_and_output_weights and not getattr(self.config, "mtp_num_layers", None):
            return
        weight = self._embedding_weight()
        if weight is None and self.share_embeddings_and_output_weights:
            weight = self._output_weight()
        if weight is not None:
            weight.shared_embedding = True
            if not self.pre_process:
                weight.shared = True
