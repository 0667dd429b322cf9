"""BertModel: an encoder (Devlin et al. 2019; norms before each half of a layer, Shoeybi et al. 2019), in stages.

                                             +--> BertLMHead --> output layer --> logits [s, b, v/t] --> loss [b, s]
tokens [b, s] --embedding--> TransformerBlock +
                 word + position + token type +--> Pooler --> binary head --> [b, 2]: are the segments exchanged?

Attention looks both ways and hides padding as a key: the mask is `[b, 1, 1, s]`. (Megatron's own layers hide padding
as a query too; what real tokens see is the same.)
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from megatron_lite import collectives
from megatron_lite.config_logger import log_config_to_disk
from megatron_lite.enums import ModelType
from megatron_lite.errors import ConfigError
from megatron_lite.initialization import deferred_initialization
from megatron_lite.models.bert.bert_lm_head import BertLMHead
from megatron_lite.models.bert.pooler import Pooler
from megatron_lite.models.common.embeddings.language_model_embedding import LanguageModelEmbedding, position_ids_of
from megatron_lite.models.common.embeddings.rotary_choice import rotary_angles
from megatron_lite.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron_lite.models.common.language_module.language_module import LanguageModule, mark_output_layer
from megatron_lite.models.common.replicated_linear import replicated_linear
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear
from megatron_lite.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron_lite.transformer.spec_utils import ModuleSpec
from megatron_lite.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron_lite.transformer.transformer_config import TransformerConfig

POSITIONS = ("learned_absolute", "rope")


class BertModel(LanguageModule):
    """A stage of a BERT.

    Args:
        config: shape and arithmetic of the layers.
        num_tokentypes: rows of the table of segments: 2 with the binary head, else 0.
        transformer_layer_spec: of a layer, or of the block's layers one by one (`bert_layer_specs`).
        vocab_size: of the embedding, padded to a multiple of the tensor-parallel size.
        max_sequence_length: rows of the learned position table.
        pre_process, post_process: this is the first stage (has the embedding), the last one (has the heads).
        fp16_lm_cross_entropy: return the loss in the logits' own half format; its sums are fp32 all the same.
        parallel_output: leave logits split over the vocabulary (for the loss); False gathers them.
        share_embeddings_and_output_weights: one matrix for both ends.
        position_embedding_type: "learned_absolute" or "rope".
        rotary_percent, seq_len_interpolation_factor, rotary_base: as RotaryEmbedding has them.
        add_binary_head: tell whether two segments were exchanged.
        return_embeddings: forward returns a vector for each text, instead of loss or logits; needs the binary head.
        vp_stage: which chunk of the stage this is.
        pg_collection: None = the registered groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_tokentypes: int,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute",
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        add_binary_head: bool = True,
        return_embeddings: bool = False,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        rotary_base: float = 10000,
    ):
        log_config_to_disk(config, locals())
        super().__init__(config, pg_collection)
        if position_embedding_type not in POSITIONS:
            raise ConfigError(
                f"--position-embedding-type {position_embedding_type}",
                why="a BERT has learned or rotary positions",
                fix=" or ".join(POSITIONS),
            )
        if return_embeddings and not (post_process and add_binary_head):
            raise ConfigError(
                "a BertModel with return_embeddings on a stage without the binary head",
                why="texts become vectors where the heads are",
                fix="post_process=True and add_binary_head=True",
            )
        self.transformer_layer_spec = transformer_layer_spec
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.pre_process, self.post_process, self.parallel_output = pre_process, post_process, parallel_output
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type, self.vp_stage = position_embedding_type, vp_stage
        self.add_binary_head, self.return_embeddings = add_binary_head, return_embeddings
        self.fp16_lm_cross_entropy = fp16_lm_cross_entropy
        self.model_type = ModelType.encoder_or_decoder
        tp = self.pg_collection.tp

        with deferred_initialization():
            if pre_process:
                self.embedding = LanguageModelEmbedding(
                    config,
                    vocab_size,
                    max_sequence_length,
                    position_embedding_type,
                    num_tokentypes=num_tokentypes,
                    tp_group=tp,
                )
            if position_embedding_type == "rope":
                assert config.kv_channels is not None
                self.rotary_pos_emb = RotaryEmbedding(
                    config.kv_channels,
                    rotary_percent,
                    config.rotary_interleaved,
                    seq_len_interpolation_factor,
                    rotary_base,
                    cp_group=self.pg_collection.cp,
                )
            self.encoder = TransformerBlock(
                config,
                transformer_layer_spec,
                pre_process=pre_process,
                post_process=post_process,
                pg_collection=self.pg_collection,
                vp_stage=vp_stage,
            )
            if post_process:
                assert config.embedding_init_method is not None and config.readout_init_method is not None
                tied = share_embeddings_and_output_weights
                self.lm_head = BertLMHead(config.hidden_size, config)
                self.output_layer = ColumnParallelLinear(
                    config.hidden_size,
                    vocab_size,
                    config=config,
                    init_method=config.embedding_init_method if tied else config.readout_init_method,
                    bias=True,
                    gather_output=not parallel_output,
                    skip_weight_param_allocation=pre_process and tied,
                    tp_group=tp,
                )
                mark_output_layer(self.output_layer, config)
                self.binary_head = None
                if add_binary_head:
                    self.binary_head = replicated_linear(config.hidden_size, 2, config)
                    self.pooler = Pooler(
                        config.hidden_size, config.init_method, config, config.sequence_parallel, tp_group=tp
                    )
        if pre_process or post_process:
            self.setup_embeddings_and_output_layer()
        self.name_and_initialize()

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """What the stage before sent (a list of one, as schedules have it)."""
        if isinstance(input_tensor, (list, tuple)):
            assert len(input_tensor) == 1, "a BERT stage takes one tensor"
            input_tensor = input_tensor[0]
        self.encoder.set_input_tensor(input_tensor)

    def bert_extended_attention_mask(self, attention_mask: Tensor) -> Tensor:
        """`[b, s]`, 1 = token, 0 = padding -> bool `[b, 1, 1, s]`, True = hidden."""
        return (attention_mask < 0.5)[:, None, None, :]

    def bert_position_ids(self, token_ids: Tensor) -> Tensor:
        """0, 1, ... for each row of `[b, s]`; with context parallelism those of the tokens that this rank holds."""
        return position_ids_of(token_ids, self.pg_collection.cp)

    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """What the heads say on the last stage, hidden states `[s, b, h]` on others.

        With context parallelism s is this rank's share of the sequence, and binary logits mean something on the rank
        that holds the first token, the first one.

        Args:
            input_ids, tokentype_ids: `[b, s]`; not looked at beyond the first stage.
            attention_mask: of the whole sequence: `[b, s]`, 1 = token, 0 = padding; or bool `[b, 1, s or 1, s]`, True =
                hidden.
            lm_labels: `[b, s]`: the token that belongs here; where no loss counts any number outside the vocabulary.
            inference_context: accepted as Megatron has it: an encoder keeps nothing from call to call.
        Returns: (loss per token `[b, s]`, or without labels logits `[b, s, v/t]`; binary logits `[b, 2]` or None).
            With `return_embeddings`: `[b, h]` fp32, the mean of the final hidden states without first and last token.
        """
        hidden = attention_mask if attention_mask.dim() == 4 else self.bert_extended_attention_mask(attention_mask)
        encoder_input = None
        if self.pre_process:
            assert input_ids is not None
            encoder_input = self.embedding(input_ids, self.bert_position_ids(input_ids), tokentype_ids)
        rotary = None
        if self.position_embedding_type == "rope":
            held = encoder_input if encoder_input is not None else self.encoder.input_tensor
            assert held is not None, "a later stage needs set_input_tensor"
            length = self.rotary_pos_emb.get_rotary_seq_len(None, self.encoder, held, self.config)
            rotary = rotary_angles(self.rotary_pos_emb, length, None, self.config, held.device, self.pg_collection.cp)
        hidden_states = self.encoder(encoder_input, hidden, rotary_pos_emb=rotary)
        if not self.post_process:
            return hidden_states

        if self.return_embeddings:
            return self._embeddings(hidden_states, attention_mask)
        binary_logits = None
        if self.binary_head is not None:
            binary_logits = self.binary_head(self.pooler(hidden_states))
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        gather = None if lm_labels is None else False  # the loss wants split logits
        states, factor = self.lm_head(hidden_states), self.config.output_multiplier
        logits, _ = self.output_layer(states if factor == 1.0 else states * factor, weight, gather)
        if lm_labels is None:
            return logits.transpose(0, 1).contiguous(), binary_logits
        loss = self.compute_language_model_loss(lm_labels, logits)
        return loss.to(logits.dtype) if self.fp16_lm_cross_entropy else loss, binary_logits

    def _embeddings(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """The mean over positions 1 to n - 2 of n tokens; zeros where there are none."""
        if collectives.group_size(self.pg_collection.cp) > 1:
            raise ConfigError(
                "embeddings of BERT on context-parallel ranks",
                why="they are means over whole sequences",
                fix="--context-parallel-size 1",
            )
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        at = torch.arange(hidden_states.shape[0], device=hidden_states.device)
        inner = ((at >= 1) & (at < attention_mask.sum(dim=1, keepdim=True) - 1)).float()  # [b, s]
        total = torch.einsum("sbh,bs->bh", hidden_states.float(), inner)
        return total / inner.sum(dim=1, keepdim=True).clamp(min=1)
