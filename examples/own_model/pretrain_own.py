"""Pretrain a model that this package does not have: causal convolutions in the place of attention.

python examples/own_model/pretrain_own.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 ... --taps 4
megatron-lite verify --script examples/own_model/pretrain_own.py ... --tensor-model-parallel-size 2

A part of a layer is a class that a ModuleSpec names; the model is a LanguageModule; `pretrain` does the rest. It runs
under tensor, sequence, pipeline and data parallelism, because it is made of layers that do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite import collectives, training
from megatron_lite.enums import ModelType
from megatron_lite.initialization import deferred_initialization, set_init
from megatron_lite.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron_lite.models.common.language_module.language_module import LanguageModule
from megatron_lite.models.gpt import get_gpt_layer_local_spec
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.sharding import split
from megatron_lite.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron_lite.training.arguments import core_transformer_config_from_args
from megatron_lite.transformer import MegatronModule, ModuleSpec, TransformerConfig
from megatron_lite.transformer.transformer_block import TransformerBlock

ARGS_DEFAULTS = {"tokenizer_type": "NullTokenizer", "position_embedding_type": "none"}


class ShortConvolution(MegatronModule):
    """Each channel is a weighted sum of its last `taps` values: h -> h, as self attention has it.

    Between the two matrices a rank holds all tokens and its part of the channels; the weights are cut likewise.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        taps: int = 4,
        **_: Any,
    ):
        super().__init__(config)
        tp, hidden = pg_collection.tp, config.hidden_size
        rank, size = collectives.group_rank(tp), collectives.group_size(tp)
        self.linear_in = ColumnParallelLinear(
            hidden, hidden, config=config, init_method=config.init_method, bias=False, gather_output=False, tp_group=tp
        )
        self.linear_out = RowParallelLinear(
            hidden, hidden, config=config, init_method=config.output_layer_init_method, bias=True,
            input_is_parallel=True, skip_bias_add=True, tp_group=tp,
        )  # fmt: skip
        self.weight = nn.Parameter(torch.empty(hidden // size, taps, dtype=config.params_dtype))
        shard = split("weight", tuple(self.weight.shape), 0, rank, size)  # where this part lies in the whole
        self.weight.shard = shard  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
        set_init(self.weight, partial(nn.init.constant_, val=1 / taps), "weight", shard)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        """x `[s, b, h]` -> (y `[s, b, h]`, bias that is still to be added)."""
        x, _bias = self.linear_in(hidden_states)
        taps = self.weight.shape[1]
        padded = F.pad(x, (0, 0, 0, 0, taps - 1, 0))
        mixed = sum(padded[k : k + x.shape[0]] * self.weight[:, k] for k in range(taps))
        return self.linear_out(mixed)


class ConvolutionModel(LanguageModule):
    """Embedding, layers, vocabulary; on a pipeline stage the part of it that lies there."""

    def __init__(self, config: TransformerConfig, vocab_size: int, taps: int, pre_process: bool, post_process: bool):
        super().__init__(config)
        self.pre_process, self.post_process = pre_process, post_process
        layer = get_gpt_layer_local_spec()
        layer.submodules.self_attention = ModuleSpec(module=ShortConvolution, params={"taps": taps})
        tp = self.pg_collection.tp
        with deferred_initialization():
            if pre_process:
                self.embedding = LanguageModelEmbedding(config, vocab_size, 0, "none", tp_group=tp)
            self.decoder = TransformerBlock(
                config, layer, pre_process=pre_process, post_process=post_process, pg_collection=self.pg_collection
            )
            if post_process:
                self.output_layer = ColumnParallelLinear(
                    config.hidden_size,
                    vocab_size,
                    config=config,
                    init_method=config.init_method,
                    bias=False,
                    gather_output=False,
                    tp_group=tp,
                )
        self.name_and_initialize()  # global names, and the first values that follow from them

    def set_input_tensor(self, input_tensor: Any) -> None:
        """What the stage before sent."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens, labels `[b, s]` -> loss `[b, s]` on the last stage, hidden states `[s, b, h]` on others."""
        hidden = self.decoder(self.embedding(tokens, None) if self.pre_process else None, None)
        if not self.post_process:
            return hidden
        logits, _ = self.output_layer(hidden)
        return self.compute_language_model_loss(labels, logits)


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    """The model of the command line, or this pipeline stage's part of it."""
    args = training.get_args()
    config = core_transformer_config_from_args(args)
    return ConvolutionModel(config, args.padded_vocab_size, args.taps, pre_process, post_process)


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Sum of the losses that count, their number, and both for the log."""
    total, count = (losses * loss_mask).sum(), loss_mask.sum()
    return total, count, {"lm loss": (total.detach(), count.detach())}


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """One micro-batch forward, and the loss function of it."""
    args = training.get_args()
    batch = training.get_batch(data_iterator, args.device, args.padded_vocab_size)
    return model(batch.tokens, batch.labels), partial(loss_func, batch.loss_mask)


def train_valid_test_datasets_provider(sizes: list[int | None]) -> Any:
    """The data sets of a GPT."""
    return training.build_datasets(sizes)


def extra_args_provider(parser: Any) -> Any:
    """This script's own flag, beside all of Megatron's."""
    parser.add_argument("--taps", type=int, default=4, help="Tokens that a convolution sees.")
    return parser


if __name__ == "__main__":
    training.pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=extra_args_provider,
        args_defaults=ARGS_DEFAULTS,
    )
