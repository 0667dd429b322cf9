"""GPTModel: a decoder-only language model (Radford et al. 2019), cut into pipeline stages if need be.

tokens [b, s] --embedding--> [s, b, h] --TransformerBlock--> [s, b, h] --output layer--> logits [s, b, v/t]
                                                               labels [b, s] --cross entropy--> loss [b, s]
behind the block, in training: predictions of further tokens, whose losses ride along (`multi_token_prediction`)
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from megatron_lite import collectives
from megatron_lite.config_logger import log_config_to_disk
from megatron_lite.context_parallel.visibility import SegmentMask
from megatron_lite.enums import ModelType
from megatron_lite.errors import ConfigError
from megatron_lite.initialization import deferred_initialization
from megatron_lite.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron_lite.models.common.embeddings.rotary_choice import ROTARY, rotary_angles, rotary_embedding_of
from megatron_lite.models.common.language_module.language_module import LanguageModule, mark_output_layer
from megatron_lite.packed_seq_params import PackedSeqParams
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear
from megatron_lite.transformer.inference_context import InferenceContext
from megatron_lite.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    attach_mtp_losses,
)
from megatron_lite.transformer.spec_utils import ModuleSpec
from megatron_lite.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules, layout_of
from megatron_lite.transformer.transformer_config import TransformerConfig

PositionEmbedding = Literal["learned_absolute", "rope", "yarn", "mrope", "none"]


class GPTModel(LanguageModule):
    """A stage of a GPT.

    Args:
        config: shape and arithmetic of the layers.
        transformer_layer_spec: of a layer, or of the block's layers one by one (`gpt_layer_specs`).
        vocab_size: of the embedding, padded to a multiple of the tensor-parallel size.
        max_sequence_length: rows of the learned position table.
        pre_process, post_process: this is the first stage (has the embedding), the last one (has the output layer).
        fp16_lm_cross_entropy: return the loss in the logits' own half format; its sums are fp32 all the same.
        parallel_output: leave logits split over the vocabulary (for the loss); False gathers them.
        share_embeddings_and_output_weights: one matrix for both ends.
        position_embedding_type: "learned_absolute", "rope", "yarn", "mrope" or "none".
        rotary_percent, rotary_base, rope_scaling, rope_scaling_factor, seq_len_interpolation_factor: as
            RotaryEmbedding has them. What YaRN, sections and multi-latent attention take is in the config.
        scatter_embedding_sequence_parallel: cut the embedding's output along the sequence under sequence parallelism.
        mtp_block_spec: of the layers that predict further tokens (`gpt_layer_specs.get_gpt_mtp_block_spec`), built on
            the stage that has them; the same on all stages, with `config.mtp_num_layers`.
        pg_collection: None = the registered groups.
        vp_stage: which chunk of the stage this is.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: PositionEmbedding = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: MultiTokenPredictionBlockSubmodules | ModuleSpec | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ):
        log_config_to_disk(config, locals())
        super().__init__(config, pg_collection)
        if position_embedding_type not in ("learned_absolute", *ROTARY, "none"):
            raise ConfigError(
                f"--position-embedding-type {position_embedding_type}",
                why="a GPT has learned, rotary or no positions",
                fix=f"learned_absolute, {', '.join(ROTARY)} or none",
            )
        self.transformer_layer_spec = transformer_layer_spec
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.pre_process, self.post_process, self.parallel_output = pre_process, post_process, parallel_output
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type, self.vp_stage = position_embedding_type, vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.fp16_lm_cross_entropy = fp16_lm_cross_entropy
        if fp16_lm_cross_entropy and not (config.fp16 or config.bf16):
            raise ConfigError(
                "--fp16-lm-cross-entropy in an fp32 model",
                why="its logits are fp32, and so is its loss",
                fix="--fp16, or leave it out",
            )

        self.mtp_process = self.holds_embedding = self._place_of_mtp(mtp_block_spec is not None)
        with deferred_initialization():
            if pre_process or self.mtp_process:
                self.embedding = LanguageModelEmbedding(
                    config,
                    vocab_size,
                    max_sequence_length,
                    position_embedding_type,
                    scatter_to_sequence_parallel=scatter_embedding_sequence_parallel,
                    tp_group=self.pg_collection.tp,
                )
            self.rotary_pos_emb = rotary_embedding_of(
                config,
                position_embedding_type,
                rotary_percent,
                rotary_base,
                seq_len_interpolation_factor,
                rope_scaling,
                rope_scaling_factor,
                self.pg_collection.cp,
            )
            self.decoder = TransformerBlock(
                config,
                transformer_layer_spec,
                pre_process=pre_process,
                post_process=post_process,
                pg_collection=self.pg_collection,
                vp_stage=vp_stage,
            )
            if self.mtp_process:
                assert mtp_block_spec is not None
                self.mtp = MultiTokenPredictionBlock(config, mtp_block_spec, vp_stage, self.pg_collection)
            if post_process:
                assert config.embedding_init_method is not None and config.readout_init_method is not None
                tied = share_embeddings_and_output_weights
                self.output_layer = ColumnParallelLinear(
                    config.hidden_size,
                    vocab_size,
                    config=config,
                    init_method=config.embedding_init_method if tied else config.readout_init_method,
                    bias=False,
                    gather_output=not parallel_output,
                    skip_weight_param_allocation=(pre_process or self.mtp_process) and tied,
                    tp_group=self.pg_collection.tp,
                )
                mark_output_layer(self.output_layer, config)
        if pre_process or post_process or self.mtp_process:
            self.setup_embeddings_and_output_layer()
            if self.copies_over_stages:
                self._mark_copies()
        self.name_and_initialize()

    def _place_of_mtp(self, wanted: bool) -> bool:
        """Whether layers that predict further tokens are here, and what follows where they are not with the loss."""
        self.copies_over_stages: dict[str, tuple[int, ...]] = {}
        self.reported_losses: dict[str, tuple[Tensor, Tensor]] = {}
        pp = self.pg_collection.pp
        if not wanted or not self.config.mtp_num_layers:
            return False
        layout = layout_of(self.config)
        stages = collectives.group_size(pp)
        if stages > 1 and self.position_embedding_type == "learned_absolute":
            raise ConfigError(
                "--mtp-num-layers with --position-embedding-type learned_absolute over pipeline stages",
                why="the table of positions would be on two stages",
                fix="--position-embedding-type rope",
            )
        if not any(cell.mtp and cell.loss for row in layout.cells for cell in row):
            # States of all depths go from stage to stage behind them, and their number is in the message. The embedding
            # lies on stages that the group of tied embeddings does not know.
            self.config.variable_seq_lengths = True
            rows = self.vocab_size // collectives.group_size(self.pg_collection.tp)
            self.copies_over_stages["embedding.word_embeddings.weight"] = (rows, self.config.hidden_size)
        return layout.cell(collectives.group_rank(pp), self.vp_stage).mtp > 0

    def _mark_copies(self) -> None:
        """As `setup_embeddings_and_output_layer` for a group of more than two stages."""
        weight: Any = self.shared_embedding_or_output_weight()
        if weight is not None and (self.share_embeddings_and_output_weights or weight is self._embedding_weight()):
            weight.shared_embedding = False
            weight.on_several_stages, weight.shared = True, not self.pre_process

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """What the stage before sent (a list of one, as schedules have it)."""
        if isinstance(input_tensor, (list, tuple)):
            assert len(input_tensor) == 1, "a GPT stage takes one tensor"
            input_tensor = input_tensor[0]
        self.decoder.set_input_tensor(input_tensor)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | SegmentMask | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: InferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: InferenceContext | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """The loss per token on the last stage, or logits if there are no labels; hidden states on other stages.

        With context parallelism s is this rank's share of the sequence.

        Args:
            input_ids, position_ids: `[b, s]`.
            attention_mask: bool `[b or 1, 1, s, keys of the whole sequence]`, True = hidden, or a SegmentMask; None:
                causal, the fast path.
            packed_seq_params: documents in the one sequence, b = 1.
            decoder_input: `[s, b, h]` instead of embedding the ids.
            labels: `[b, s]`: the next token of each position.
            inference_context: keys and values of the tokens so far.
            runtime_gather_output: gather logits over the vocabulary for this call.
            loss_mask: `[b, s]`, where predictions of further tokens count; None: everywhere.
        Returns: loss `[b, s]` (fp32 unless `fp16_lm_cross_entropy`); or logits `[b, s, v/t]`; or `[s, b, h]`.
        """
        context = inference_context if inference_context is not None else inference_params
        if decoder_input is None and self.pre_process:
            assert input_ids is not None
            decoder_input = self.embedding(input_ids, position_ids)
        rotary = None
        if self.rotary_pos_emb is not None:
            held = decoder_input if decoder_input is not None else self.decoder.input_tensor
            assert held is not None, "a later stage needs set_input_tensor"
            length = self.rotary_pos_emb.get_rotary_seq_len(context, self.decoder, held, self.config, packed_seq_params)
            rotary = rotary_angles(
                self.rotary_pos_emb,
                length,
                position_ids,
                self.config,
                held.device,
                self.pg_collection.cp,
                packed_seq_params,
            )
            if context is not None:
                rotary = context.angles_of_tokens(rotary)
        hidden_states = self.decoder(
            decoder_input,
            attention_mask,
            rotary_pos_emb=rotary,
            inference_context=context,
            packed_seq_params=packed_seq_params,
            **(extra_block_kwargs or {}),
        )
        predicts = self.training and context is None and (labels is not None or not self.post_process)
        if self.mtp_process and predicts:
            assert input_ids is not None
            hidden_states = self.mtp(
                input_ids,
                position_ids,
                hidden_states,
                self.embedding,
                packed_seq_params,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary,
                **(extra_block_kwargs or {}),
            )
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.config.mtp_num_layers and predicts and labels is not None:
            hidden_states = self._with_further_losses(hidden_states, labels, loss_mask, weight, packed_seq_params)
        gather = None if labels is None else False  # the loss wants split logits
        logits, _ = self.output_layer(
            self._for_output(hidden_states),
            weight,
            runtime_gather_output if runtime_gather_output is not None else gather,
        )
        if labels is not None:
            loss = self.compute_language_model_loss(labels, logits)
            return loss.to(logits.dtype) if self.fp16_lm_cross_entropy else loss
        return logits.transpose(0, 1).contiguous()

    def _for_output(self, hidden_states: Tensor) -> Tensor:
        factor = self.config.output_multiplier
        return hidden_states if factor == 1.0 else hidden_states * factor

    def _with_further_losses(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None,
        weight: Tensor | None,
        packed_seq_params: PackedSeqParams | None,
    ) -> Tensor:
        """`[(1 + D) s, b, h]` -> `[s, b, h]` of the next token, to which the losses of the others are attached."""
        if self.config.mtp_detach_heads:
            weight = (self.output_layer.weight if weight is None else weight).detach()

        def losses(states: Tensor, labels: Tensor) -> Tensor:
            logits, _ = self.output_layer(self._for_output(states), weight, False)
            return self.compute_language_model_loss(labels, logits)

        states = hidden_states.chunk(1 + (self.config.mtp_num_layers or 0))
        main, self.reported_losses = attach_mtp_losses(
            states, labels, loss_mask, losses, self.config, self.pg_collection.cp, packed_seq_params
        )
        return main
