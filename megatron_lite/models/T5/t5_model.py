"""T5Model: an encoder, and a decoder that attends to what it found (Raffel et al. 2020), cut into pipeline stages.

    text with gaps [b, s_e] --embedding--> [s_e, b, h] --encoder--> [s_e, b, h]
                                                                         |  keys and values
    gaps' text     [b, s_d] --embedding--> [s_d, b, h] --decoder--> [s_d, b, h] --LM head--> logits [s_d, b, v/t]

Both stacks are placed as one row of layers, the encoder's first, and the row may be cut anywhere. Stages hand on two
tensors, the encoder's stream and the decoder's. Before the encoder's end the second is the decoder's embedded input on
its way, behind it the first is the encoder's output, which every decoder layer looks at. A stage that only passes a
tensor on returns it as it came: autograd then adds the gradient of the next stage to that of the own layers.

    boundary                  inside the encoder            at its end                    inside the decoder
    [encoder's, decoder's]    [stream, embedded input]      [output, embedded input]      [output, stream]

So the embedding is on the first stage alone, whatever the cut: no second copy of the largest matrix, of its optimizer
state and of its reduction. The tables of relative positions are small; every stage of a stack has a copy.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from megatron_lite import collectives
from megatron_lite.config_logger import log_config_to_disk
from megatron_lite.enums import ModelType
from megatron_lite.errors import ConfigError
from megatron_lite.initialization import deferred_initialization
from megatron_lite.models.common.embeddings.language_model_embedding import LanguageModelEmbedding, position_ids_of
from megatron_lite.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
from megatron_lite.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron_lite.models.common.language_module.language_module import LanguageModule, mark_output_layer
from megatron_lite.pipeline_parallel.stage_layout import Cell, StageLayout, encoder_decoder_layout
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear
from megatron_lite.transformer.inference_context import InferenceContext
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.spec_utils import ModuleSpec, get_module
from megatron_lite.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron_lite.transformer.transformer_config import TransformerConfig

PositionEmbedding = Literal["learned_absolute", "rope", "relative"]


class T5LMHead(MegatronModule):
    """The output layer: h -> vocabulary.

    Args:
        parallel_output: leave logits split over the vocabulary.
        skip_weight_param_allocation: the weight comes with each call.
        tied: with the embedding, whose initial values it takes.
    """

    def __init__(
        self,
        config: TransformerConfig,
        parallel_output: bool,
        vocab_size: int,
        skip_weight_param_allocation: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        tied: bool = False,
        bias: bool = False,
    ):
        super().__init__(config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        assert config.embedding_init_method is not None and config.readout_init_method is not None
        self.output_layer = ColumnParallelLinear(
            config.hidden_size,
            vocab_size,
            config=config,
            init_method=config.embedding_init_method if tied else config.readout_init_method,
            bias=bias,
            skip_bias_add=False,
            gather_output=not parallel_output,
            skip_weight_param_allocation=skip_weight_param_allocation,
            tp_group=groups.tp,
        )
        mark_output_layer(self.output_layer, config)

    def forward(self, hidden_states: Tensor, word_embeddings_weight: Tensor | None, gather: bool | None = None) -> Any:
        """x `[s, b, h]` -> logits `[s, b, v/t]`."""
        logits, _ = self.output_layer(hidden_states, word_embeddings_weight, gather)
        return logits


def t5_layout(config: TransformerConfig, encoder_config: TransformerConfig) -> StageLayout:
    """Which stage and chunk holds what. Raises ConfigError where the layers do not come out even."""
    return encoder_decoder_layout(
        encoder_config.num_layers,
        config.num_layers,
        config.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size or 1,
        split=config.pipeline_model_parallel_split_rank or None,
        layout=config.pipeline_model_parallel_layout,
        first=config.num_layers_in_first_pipeline_stage,
        last=config.num_layers_in_last_pipeline_stage,
        count_embedding=config.account_for_embedding_in_pipeline_split,
        count_loss=config.account_for_loss_in_pipeline_split,
    )


class T5Model(LanguageModule):
    """A stage of a T5.

    Args:
        config: shape and arithmetic of the decoder's layers.
        encoder_config: of the encoder's; differs in its number of layers.
        transformer_encoder_layer_spec, transformer_decoder_layer_spec: of a layer, or of the stack's layers one by one
            (`t5_spec`).
        vocab_size: of the embedding, padded to a multiple of the tensor-parallel size.
        max_sequence_length: rows of the learned position table; both stacks share it.
        pre_process, post_process: this is the first stage (has the embedding), the last one (has the LM head).
        fp16_lm_cross_entropy: return the loss in the logits' own half format; its sums are fp32 all the same.
        parallel_output: leave logits split over the vocabulary (for the loss); False gathers them.
        share_embeddings_and_output_weights: one matrix for both ends; the LM head then has a bias.
        position_embedding_type: "learned_absolute", "rope" (self attention only) or "relative" (the same).
        rotary_percent, seq_len_interpolation_factor: as RotaryEmbedding has them.
        relative_attention_num_buckets, relative_attention_max_distance: as RelativePositionEmbedding has them.
        add_encoder, add_decoder: False leaves the stack out, on all stages.
        pg_collection: None = the registered groups.
        vp_stage: which chunk of the stage this is.
        rotary_base: as RotaryEmbedding has it.
        lm_head_bias: False: a tied output layer has none, as in the models of the T5 paper.
        scaled_logits: logits / sqrt(h), as its first models have them.
    """

    model_type = ModelType.encoder_or_decoder  # Megatron's scripts say so for T5
    sends_encoder_output = True

    def __init__(
        self,
        config: TransformerConfig,
        encoder_config: TransformerConfig,
        transformer_encoder_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        transformer_decoder_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: PositionEmbedding = "learned_absolute",
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        add_encoder: bool = True,
        add_decoder: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        *,
        rotary_base: float = 10000,
        lm_head_bias: bool = True,
        scaled_logits: bool = False,
    ):
        log_config_to_disk(config, locals())
        super().__init__(config, pg_collection)
        _check(config, position_embedding_type, fp16_lm_cross_entropy, add_encoder or add_decoder)
        self.encoder_config, self.vocab_size, self.max_sequence_length = encoder_config, vocab_size, max_sequence_length
        self.pre_process, self.post_process, self.parallel_output = pre_process, post_process, parallel_output
        self.add_encoder, self.add_decoder, self.vp_stage = add_encoder, add_decoder, vp_stage
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type, self.fp16_lm_cross_entropy = position_embedding_type, fp16_lm_cross_entropy
        self.logit_factor = config.output_multiplier * (config.hidden_size**-0.5 if scaled_logits else 1.0)
        self.stage_layout = t5_layout(config, encoder_config)
        held = self.stage_layout.cell(collectives.group_rank(self.pg_collection.pp), vp_stage)
        assert held.encoder is not None
        in_encoder = held.encoder if add_encoder else range(0)
        in_decoder = held.layers if add_decoder else range(0)
        self.input_tensor: list[Tensor] | None = None

        with deferred_initialization():
            if pre_process:
                self.embedding = LanguageModelEmbedding(
                    config,
                    vocab_size,
                    max_sequence_length,
                    "learned_absolute" if position_embedding_type == "learned_absolute" else "none",
                    tp_group=self.pg_collection.tp,
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
            buckets = relative_attention_num_buckets, relative_attention_max_distance
            if position_embedding_type == "relative" and in_encoder:
                self.encoder_relative_pos_emb = self._relative_positions(True, encoder_config, *buckets)
            if position_embedding_type == "relative" and in_decoder:
                self.decoder_relative_pos_emb = self._relative_positions(False, config, *buckets)
            self.encoder = self._stack(encoder_config, transformer_encoder_layer_spec, in_encoder)
            self.decoder = self._stack(config, transformer_decoder_layer_spec, in_decoder)
            if post_process and add_decoder:
                tied = share_embeddings_and_output_weights
                self.lm_head = T5LMHead(
                    config,
                    parallel_output,
                    vocab_size,
                    pre_process and tied,
                    self.pg_collection,
                    tied=tied,
                    bias=tied and lm_head_bias,
                )
        self._mark_copies(buckets[0], held)
        if pre_process or (post_process and add_decoder):
            self.setup_embeddings_and_output_layer()
        self.name_and_initialize()

    def _relative_positions(
        self, bidirectional: bool, config: TransformerConfig, buckets: int, distance: int
    ) -> RelativePositionEmbedding:
        assert config.readout_init_method is not None
        return RelativePositionEmbedding(
            bidirectional,
            config.readout_init_method,
            config.num_attention_heads,
            buckets,
            distance,
            config.params_dtype,
            self.pg_collection.tp,
        )

    def _stack(
        self, config: TransformerConfig, spec: ModuleSpec | TransformerBlockSubmodules, held: range
    ) -> TransformerBlock | None:
        """This chunk's part of a stack; None where it has none."""
        if not held:
            return None
        module = get_module(spec)
        if isinstance(spec, ModuleSpec) and isinstance(module, type) and issubclass(module, TransformerBlock):
            spec = spec.submodules
        if isinstance(spec, TransformerBlockSubmodules):
            specs = spec.layer_specs or []
            if len(specs) != config.num_layers:
                raise ConfigError(
                    f"a stack of {config.num_layers} layers with specs of {len(specs)}",
                    why="a list says it for every layer of the stack",
                    fix=f"{config.num_layers} specs, or one for all",
                )
            spec = TransformerBlockSubmodules(specs[held.start : held.stop], spec.layer_norm)
        return TransformerBlock(
            config,
            spec,
            post_process=held.stop == config.num_layers,
            pg_collection=self.pg_collection,
            vp_stage=self.vp_stage,
            held=held,
        )

    def _mark_copies(self, buckets: int, held: Cell) -> None:
        """Tables of relative positions on several stages or chunks: their gradients are summed, norms count the first.

        `copies_over_stages` names what the whole model has of them, also where this chunk holds none: every stage takes
        part in the sum.
        """
        self.copies_over_stages: dict[str, tuple[int, ...]] = {}
        if self.position_embedding_type != "relative" or collectives.group_size(self.pg_collection.pp) == 1:
            return
        assert held.encoder is not None
        for stack, config, layers, exists in (
            ("encoder", self.encoder_config, held.encoder, self.add_encoder),
            ("decoder", self.config, held.layers, self.add_decoder),
        ):
            if not exists:
                continue
            name = f"{stack}_relative_pos_emb.relative_attention_bias.weight"
            self.copies_over_stages[name] = (buckets, config.num_attention_heads)
            if layers:
                table: Any = self.get_parameter(name)
                table.on_several_stages, table.shared = True, layers.start > 0

    def _output_weight(self) -> Any:
        return self.lm_head.output_layer.weight if self.post_process and self.add_decoder else None

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """What the stage before sent: the encoder's and the decoder's tensor; None on the first stage."""
        if input_tensor is None:
            self.input_tensor = None
            return
        assert isinstance(input_tensor, (list, tuple)) and len(input_tensor) == 2, "a T5 stage takes two tensors"
        self.input_tensor = list(input_tensor)

    def forward(
        self,
        encoder_input_ids: Tensor | None,
        decoder_input_ids: Tensor | None,
        encoder_attn_mask: Tensor | None,
        decoder_attn_mask: Tensor | None,
        encoder_decoder_attn_mask: Tensor | None,
        lm_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        output_encoder_hidden_only: bool = False,
        inference_context: InferenceContext | None = None,
        packed_seq_params: Any = None,
        *,
        inference_params: InferenceContext | None = None,
    ) -> Tensor | list[Tensor]:
        """The loss per token on the last stage, or logits if there are no labels; two hidden states on other stages.

        Args:
            encoder_input_ids: `[b, s_e]`; decoder_input_ids, lm_labels: `[b, s_d]`.
            encoder_attn_mask: bool `[b, 1, s_e or 1, s_e]`, True = hidden; None: nothing is padding.
            decoder_attn_mask: bool `[b, 1, s_d, s_d]`, future included; None: causal, which is enough where padding is
                at the end.
            encoder_decoder_attn_mask: bool `[b, 1, s_d or 1, s_e]`; None: nothing is padding.
            encoder_hidden_states: `[s_e, b, h]`, the encoder's output: it does not run.
            output_encoder_hidden_only: give the encoder's output, `[s_e, b, h]`.
            inference_context: the decoder's keys and values so far; the ids are the next ones.
        Returns: loss `[b, s_d]` (fp32 unless `fp16_lm_cross_entropy`); or logits `[b, s_d, v/t]`; or
            [`[s_e, b, h]`, `[s_d, b, h]`].
        """
        cache = inference_context if inference_context is not None else inference_params
        encoded, x = self._inputs(
            encoder_input_ids, decoder_input_ids, encoder_hidden_states, output_encoder_hidden_only, cache
        )
        if self.encoder is not None and encoder_hidden_states is None:
            assert encoded is not None
            encoded = self.encoder(encoded, encoder_attn_mask, **self._positions("encoder", self.encoder, encoded))
        if output_encoder_hidden_only:
            assert encoded is not None, "this model has no encoder"
            return encoded
        if self.decoder is not None:
            x = self.decoder(
                x,
                decoder_attn_mask,
                context=encoded,
                context_mask=encoder_decoder_attn_mask,
                inference_context=cache,
                packed_seq_params=packed_seq_params,
                **self._positions("decoder", self.decoder, x, cache),
            )
        if not self.post_process:
            assert encoded is not None and x is not None
            # Own layers keep the output of the encoder for backward: a view tells the schedule not to free it.
            both = self.encoder is not None and self.decoder is not None
            return [encoded.view_as(encoded) if both else encoded, x]
        if x is None:  # without a decoder
            assert encoded is not None
            return encoded
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        if self.logit_factor != 1.0:
            x = x * self.logit_factor
        logits = self.lm_head(x, weight, None if lm_labels is None else False)  # the loss wants split logits
        if lm_labels is None:
            return logits.transpose(0, 1).contiguous()
        loss = self.compute_language_model_loss(lm_labels, logits)
        return loss.to(logits.dtype) if self.fp16_lm_cross_entropy else loss

    def _inputs(
        self,
        encoder_ids: Tensor | None,
        decoder_ids: Tensor | None,
        encoder_hidden_states: Tensor | None,
        encoder_only: bool,
        cache: InferenceContext | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The two streams at the beginning of this chunk."""
        if not self.pre_process:
            assert self.input_tensor is not None, "a later stage needs set_input_tensor"
            return self.input_tensor[0], self.input_tensor[1]
        encoded, x = encoder_hidden_states, None
        if encoded is None and self.add_encoder:
            assert encoder_ids is not None, "an encoder needs encoder_input_ids"
            encoded = self.embedding(encoder_ids, position_ids_of(encoder_ids, self.pg_collection.cp))
        if self.add_decoder and not encoder_only:
            assert decoder_ids is not None, "a decoder needs decoder_input_ids"
            begin = cache.sequence_len_offset if cache else 0
            x = self.embedding(decoder_ids, position_ids_of(decoder_ids, self.pg_collection.cp, begin))
        return encoded, x

    def _positions(
        self, stack: str, block: TransformerBlock, x: Any, cache: InferenceContext | None = None
    ) -> dict[str, Any]:
        """What self attention of a stack gets to know where its tokens stand."""
        if self.position_embedding_type == "rope":
            length = self.rotary_pos_emb.get_rotary_seq_len(cache, block, x, self.config)
            if self.rotary_pos_emb.inv_freq.device != x.device:
                self.rotary_pos_emb.inv_freq = self.rotary_pos_emb.inv_freq.to(x.device)
            return {"rotary_pos_emb": self.rotary_pos_emb(length)}
        if self.position_embedding_type == "relative":
            length = x.shape[0] * (
                collectives.group_size(self.pg_collection.tp) if block.config.sequence_parallel else 1
            )
            begin = cache.sequence_len_offset if cache is not None else 0
            table: nn.Module = getattr(self, f"{stack}_relative_pos_emb")
            return {"attention_bias": table(length, begin + length, begin)}
        return {}


def _check(config: TransformerConfig, positions: str, half_loss: bool, has_stack: bool) -> None:
    if positions not in ("learned_absolute", "rope", "relative"):
        raise ConfigError(
            f"--position-embedding-type {positions}",
            why="a T5 has learned, rotary or relative positions",
            fix="learned_absolute, rope or relative",
        )
    if not has_stack:
        raise ConfigError("a T5Model without encoder and decoder", why="nothing is left", fix="one of them, or both")
    if half_loss and not (config.fp16 or config.bf16):
        raise ConfigError(
            "--fp16-lm-cross-entropy in an fp32 model",
            why="its logits are fp32, and so is its loss",
            fix="--fp16, or leave it out",
        )
