"""TransformerConfig: the shape and the arithmetic of a transformer's layers.

Every layer takes one. What the shape leaves open is derived here (widths, head size, initial values), what cannot be
built is refused here, so that layers only compute. Field names and defaults are Megatron's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron_lite.config import flag
from megatron_lite.context_parallel.comm_types import problems_of_exchanges
from megatron_lite.errors import ConfigError
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.transformer.enums import AttnBackend
from megatron_lite.transformer.fp8 import Fp8Config, fp8_problems
from megatron_lite.transformer.mla_config import ROPE_TYPES, mla_problems
from megatron_lite.transformer.moe.moe_config import MoEConfig
from megatron_lite.transformer.moe.moe_rules import moe_problems
from megatron_lite.transformer.mup import MupConfig, mup_problems
from megatron_lite.transformer.rotary_config import RotaryConfig, rotary_problems

if TYPE_CHECKING:
    import torch

    Init = Callable[[torch.Tensor], Any]

NORMALIZATIONS = ("LayerNorm", "RMSNorm")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
RECOMPUTE_MODULES = (
    "core_attn",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
)  # more come with the layers that they name


@dataclass(kw_only=True)
class TransformerConfig(RotaryConfig, MupConfig, Fp8Config, MoEConfig, ModelParallelConfig):
    """Depth, widths, normalisation, activation, attention, experts, dropout, initial values, recompute."""

    # -- shape
    num_layers: int = flag(None, "Number of transformer layers.")
    hidden_size: int = flag(None, "Width of the residual stream.")
    num_attention_heads: int = flag(None, "Number of query heads.")
    ffn_hidden_size: int | None = flag(
        None, "Inner width of the MLP. Default: 4 * hidden; with --swiglu two thirds of it, rounded down to 64."
    )
    kv_channels: int | None = flag(None, "Size of a head. Default: hidden / heads.")
    num_query_groups: int | None = None  # its flag needs --group-query-attention: training/configs

    # -- where layers go
    num_layers_in_first_pipeline_stage: int | None = flag(
        None, "Layers of the first pipeline stage; others share the rest.", name="--decoder-first-pipeline-num-layers"
    )
    num_layers_in_last_pipeline_stage: int | None = flag(
        None, "Layers of the last pipeline stage; others share the rest.", name="--decoder-last-pipeline-num-layers"
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "Count the embedding as a layer: its pipeline stage holds one less."
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "Count the output layer and its loss as a layer: their pipeline stage holds one less."
    )
    pipeline_model_parallel_layout: str | None = flag(
        None, "Which layer goes to which pipeline stage, for example 'Ett|(tt|)*2,tL'."
    )
    pipeline_model_parallel_split_rank: int | None = flag(
        None,
        "Encoder and decoder: the decoder's first pipeline stage. Default: both are one row of layers, cut evenly.",
    )

    # -- layer
    normalization: str = flag("LayerNorm", "Kind of norm.", choices=NORMALIZATIONS)
    layernorm_epsilon: float = flag(1e-5, "Epsilon of every norm.", name="--norm-epsilon")
    layernorm_zero_centered_gamma: bool = flag(
        False, "Store gamma - 1, so that weight decay pulls the scale towards 1.", name="--apply-layernorm-1p"
    )
    apply_residual_connection_post_layernorm: bool = flag(
        False, "Take the residual after the norm, as the original BERT does."
    )
    fp32_residual_connection: bool = flag(False, "Keep the residual stream in fp32.")
    add_bias_linear: bool = flag(True, "No bias in any linear layer.", off="--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "A bias on the query, key and value projection only.")
    gated_linear_unit: bool = False
    activation_func: Callable[[torch.Tensor], torch.Tensor] = None  # type: ignore[assignment]  # None: F.gelu
    glu_linear_offset: float = flag(0.0, "Gated MLP: added to the half that is not activated.")
    activation_func_clamp_value: float | None = flag(
        None, "Bound of what enters the activation: the gate from above, all else on both sides."
    )
    mlp_chunks_for_training: int = flag(
        1, "Run the MLP of dense layers in so many parts of the sequence, one after the other, while training."
    )
    hidden_dropout: float = flag(0.1, "Dropout after attention, after the MLP and on the embeddings.")
    attention_dropout: float = flag(0.1, "Dropout on the attention weights.")

    # -- attention
    multi_latent_attention: bool = False  # MLATransformerConfig sets it
    qk_layernorm: bool = flag(
        False, "Normalise queries and keys, head by head; with --multi-latent-attention the latent vectors."
    )
    qk_l2_norm: bool = flag(False, "Divide queries and keys by their root mean square, head by head, without weights.")
    attention_output_gate: bool = flag(False, "Multiply the output of every head by a sigmoid gate of the input.")
    softmax_type: str = flag("vanilla", "Softmax of the attention, with or without a sink.", choices=SOFTMAX_TYPES)
    softmax_scale: float | None = flag(None, "Factor of attention's scores. Default: 1 / sqrt(head); T5's is 1.")
    apply_query_key_layer_scaling: bool = flag(
        False, "Divide scores by the layer's number before the softmax and multiply inside it (for fp16)."
    )
    attention_softmax_in_fp32: bool = True
    window_size: tuple[int, int] | None = flag(
        None, "Sliding window: keys to the left, keys to the right; -1: no limit."
    )
    window_attn_skip_freq: int | list[int] | None = flag(
        None, "Which layers attend to everything instead: every N-th, or a list of 1 (window) and 0 (full)."
    )
    attention_backend: str | AttnBackend = flag(
        "auto", "Implementation of attention.", choices=tuple(item.name for item in AttnBackend), kind="str"
    )

    # -- the sequence over ranks
    cp_comm_type: str | list[str] = flag(
        ["p2p"],
        "How context-parallel ranks exchange keys and values: a ring (p2p), all_gather, heads for tokens (a2a), or a2a "
        "inside and a ring across groups (a2a+p2p); one for all layers, or one each.",
        kind="str list",
    )

    # -- initial values
    init_method: Init | None = None
    output_layer_init_method: Init | None = None
    embedding_init_method: Init | None = None
    readout_init_method: Init | None = None  # of what is no matrix between hidden vectors: the output layer, sinks
    init_method_std: float = flag(
        0.02, "Standard deviation of initial weights; projections back to the residual use std / sqrt(2 * layers)."
    )
    init_method_xavier_uniform: bool = flag(False, "Xavier-uniform initial weights instead of normal ones.")
    embedding_init_method_std: float | None = flag(
        None, "Own standard deviation of embeddings; setting it exempts embeddings from weight decay."
    )

    # -- fusions: the same numbers in fewer passes over memory. Flags turn them off: training/configs.
    bias_activation_fusion: bool = False
    masked_softmax_fusion: bool = False  # this and the next: no such kernels yet, either value gives the same numbers
    bias_dropout_fusion: bool = False
    apply_rope_fusion: bool = False

    # -- recompute
    recompute_granularity: str | None = flag(
        None, "Recompute whole layers in backward, or chosen parts of them.", choices=("full", "selective")
    )
    recompute_method: str | None = flag(
        None,
        "Full recompute: uniform groups over all layers, or the first layers of a stage.",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(None, "Layers in a group (uniform), or layers recomputed (block).")
    recompute_modules: list[str] | None = flag(
        None, "Selective recompute: which parts. Default: core_attn.", choices=RECOMPUTE_MODULES
    )

    distribute_saved_activations: bool = flag(
        False, "Full recompute: each tensor-parallel rank keeps a part of the saved inputs; backward gathers them."
    )

    # -- predicting further tokens
    mtp_num_layers: int | None = flag(None, "Multi-token prediction: how many tokens after the next are predicted too.")
    mtp_loss_scaling_factor: float = flag(0.1, "Weight of the mean of their losses.")
    mtp_use_repeated_layer: bool = flag(False, "One and the same layer predicts all of them.")
    mtp_detach_heads: bool = flag(
        False, "Their losses train the further layers alone, not the model below, its embedding and its output layer."
    )

    # -- loss
    output_logit_dtype: str | None = flag(
        None, "Number format of the logits. Default: the model's.", choices=("bf16", "fp32")
    )
    calculate_per_token_loss: bool = flag(
        False, "Divide gradients by the tokens of the global batch, instead of averaging the means of micro-batches."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = list(self._problems_of_shape())
        if not problems:
            self._derive_shape()
            problems = list(self._problems())
        if len(problems) == 1:
            raise problems[0]
        if problems:
            raise ConfigError("\n".join(str(problem) for problem in problems))
        self._derive_functions()

    # ------------------------------------------------------------------------------------------------------- derive
    def _derive_shape(self) -> None:
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        self._derive_moe()
        if self.kv_channels is None:
            self.kv_channels = self.hidden_size // self.num_attention_heads
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        if self.apply_query_key_layer_scaling:
            self.attention_softmax_in_fp32 = True
        if isinstance(self.cp_comm_type, str):
            self.cp_comm_type = [self.cp_comm_type]
        if self.recompute_granularity == "selective" and self.recompute_modules is None:
            self.recompute_modules = ["core_attn"]
        if not isinstance(self.attention_backend, AttnBackend):
            self.attention_backend = AttnBackend[self.attention_backend]

    def cp_comm_type_of(self, layer_number: int) -> str:
        """The exchange of a layer, counted from 1 over the whole model."""
        return self.cp_comm_type[(layer_number - 1) % len(self.cp_comm_type)]

    def _derive_functions(self) -> None:
        import torch.nn.functional as F

        from megatron_lite.initialization import init_method_normal, scaled_init_method_normal, xavier_uniform

        if self.activation_func is None:
            self.activation_func = F.gelu
        plain = xavier_uniform if self.init_method_xavier_uniform else init_method_normal(self.init_method_std)
        if self.readout_init_method is None:
            self.readout_init_method = self.init_method or plain
        std = self.init_method_std / math.sqrt(self.width_multiplier)
        if self.init_method is None:
            self.init_method = xavier_uniform if self.init_method_xavier_uniform else init_method_normal(std)
        if self.output_layer_init_method is None:
            self.output_layer_init_method = (
                xavier_uniform if self.init_method_xavier_uniform else scaled_init_method_normal(std, self.num_layers)
            )
        if self.embedding_init_method is None:
            if self.embedding_init_method_std is not None:
                self.embedding_init_method = init_method_normal(self.embedding_init_method_std)
            else:
                self.embedding_init_method = self.readout_init_method

    # ------------------------------------------------------------------------------------------------------- refuse
    def _problems_of_shape(self) -> Iterator[ConfigError]:
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            value = getattr(self, name)
            if value is None or value < 1:
                yield ConfigError(f"{_spell(name)} is {value}", why="a model needs it", fix=f"{_spell(name)} N, N > 0")
        if not self.num_attention_heads or not self.hidden_size:
            return
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            yield ConfigError(
                f"--hidden-size {self.hidden_size} with --num-attention-heads {self.num_attention_heads}",
                why="without --kv-channels a head gets hidden / heads channels, and that is no whole number",
                fix="a multiple of the heads, or --kv-channels N",
            )

    def _problems(self) -> Iterator[ConfigError]:
        if self.mtp_num_layers is not None and self.mtp_num_layers < 0:
            yield ConfigError(f"--mtp-num-layers {self.mtp_num_layers}", why="it is a number of layers", fix="1")
        limit = self.activation_func_clamp_value
        if limit is not None and not 0.0 < limit < float("inf"):
            yield ConfigError(f"--activation-func-clamp-value {limit}", why="it is a bound", fix="for example 7.0")
        if self.glu_linear_offset and not self.gated_linear_unit:
            yield ConfigError(
                f"--glu-linear-offset {self.glu_linear_offset} without a gated MLP",
                why="it is added to the half that is not activated",
                fix="--quick-geglu or --swiglu",
            )
        heads, groups, tp = self.num_attention_heads, self.num_query_groups or 1, self.tensor_model_parallel_size
        rows = (heads * (1 + self.attention_output_gate) + 2 * groups) * (self.kv_channels or 0)
        if groups < 1 or heads % groups:
            yield ConfigError(
                f"--num-attention-heads {heads} with --num-query-groups {groups}",
                why="every key/value head serves the same number of query heads",
                fix=f"a number of groups that divides {heads}",
            )
        for name, value in (("num-attention-heads", heads), ("ffn-hidden-size", self.ffn_hidden_size or 0)):
            if value % tp:
                yield ConfigError(
                    f"--{name} {value} with --tensor-model-parallel-size {tp}",
                    why="each rank takes an equal share",
                    fix=f"--{name} {-(-value // tp) * tp}",
                )
        if groups % tp and tp % groups:
            yield ConfigError(
                f"--num-query-groups {groups} with --tensor-model-parallel-size {tp}",
                why="a rank holds whole key/value heads, or a whole number of ranks shares one",
                fix="a number of groups that divides the tensor-parallel size or is a multiple of it",
            )
        elif groups < tp and rows % tp:
            yield ConfigError(
                f"--num-query-groups {groups} with --tensor-model-parallel-size {tp} and --kv-channels "
                f"{self.kv_channels}",
                why=f"the {rows} rows of queries, keys and values are shared equally",
                fix="a --kv-channels that the tensor-parallel size divides",
            )
        for name, legal in (("normalization", NORMALIZATIONS), ("softmax_type", SOFTMAX_TYPES)):
            if getattr(self, name) not in legal:
                yield ConfigError(
                    f"{_spell(name)} {getattr(self, name)}", why="no such kind", fix=f"one of {', '.join(legal)}"
                )
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                yield ConfigError(
                    f"{_spell(name)} {getattr(self, name)}", why="a share in [0, 1)", fix="for example 0.1"
                )
        for name in ("no_rope_freq", "window_attn_skip_freq"):
            yield from self._problems_of_pattern(name)
        chunks = self.mlp_chunks_for_training
        if chunks < 1:
            yield ConfigError(f"--mlp-chunks-for-training {chunks}", why="a number of parts", fix="1: all at once")
        freq = self.moe_layer_freq
        everywhere = freq == 1 if isinstance(freq, int) else all(freq)
        if chunks > 1 and self.num_moe_experts and everywhere:
            yield ConfigError(
                f"--mlp-chunks-for-training {chunks} with experts in every layer",
                why="a router balances over all tokens of a micro-batch, so that experts take them in one piece",
                fix="leave it out, or --recompute-granularity selective --recompute-modules moe",
            )
        yield from rotary_problems(self)
        yield from mup_problems(self)
        yield from fp8_problems(self)
        yield from moe_problems(self)
        yield from self._problems_of_recompute()
        yield from problems_of_exchanges(self)

    def _problems_of_pattern(self, name: str) -> Iterator[ConfigError]:
        value = getattr(self, name)
        if isinstance(value, list) and len(value) != self.num_layers:
            yield ConfigError(
                f"{_spell(name)} has {len(value)} entries with --num-layers {self.num_layers}",
                why="a list says it for each layer",
                fix=f"a list of {self.num_layers} entries, or one number",
            )
        elif isinstance(value, int) and (value < 1 or (name == "no_rope_freq" and self.num_layers % value)):
            yield ConfigError(
                f"{_spell(name)} {value} with --num-layers {self.num_layers}",
                why="every N-th layer differs"
                + (", and N must divide the layers" if name == "no_rope_freq" else ", N > 0"),
                fix="another number, or a list with an entry for each layer",
            )

    def _problems_of_recompute(self) -> Iterator[ConfigError]:
        granularity = self.recompute_granularity
        if granularity not in (None, "full", "selective"):
            yield ConfigError(f"--recompute-granularity {granularity}", why="no such kind", fix="full or selective")
        if granularity == "full" and (
            self.recompute_method not in ("uniform", "block") or not self.recompute_num_layers
        ):
            yield ConfigError(
                f"--recompute-granularity full with --recompute-method {self.recompute_method} "
                f"--recompute-num-layers {self.recompute_num_layers}",
                why="full recompute goes by groups of layers",
                fix="--recompute-method uniform --recompute-num-layers 1 recomputes every layer by itself",
            )
        if granularity != "full" and (self.recompute_method or self.recompute_num_layers):
            yield ConfigError(
                f"--recompute-method {self.recompute_method} --recompute-num-layers {self.recompute_num_layers} "
                f"with --recompute-granularity {granularity}",
                why="method and number of layers say how full recompute groups layers",
                fix="--recompute-granularity full, or leave both out",
            )
        if self.distribute_saved_activations and (
            granularity != "full" or self.tensor_model_parallel_size == 1 or self.sequence_parallel
        ):
            yield ConfigError(
                f"--distribute-saved-activations with --recompute-granularity {granularity}, "
                f"--tensor-model-parallel-size {self.tensor_model_parallel_size}"
                + (" and --sequence-parallel" if self.sequence_parallel else ""),
                why="it cuts the inputs that full recompute saves over tensor-parallel ranks that all hold them alike; "
                "with sequence parallelism they are cut already",
                fix="leave it out",
            )
        if granularity != "selective" and self.recompute_modules:
            yield ConfigError(
                f"--recompute-modules {' '.join(self.recompute_modules)} with --recompute-granularity {granularity}",
                why="modules are chosen in selective recompute only",
                fix="--recompute-granularity selective",
            )
        if "mla_up_proj" in (self.recompute_modules or ()) and not self.multi_latent_attention:
            yield ConfigError(
                "--recompute-modules mla_up_proj without --multi-latent-attention",
                why="it is the way from the latent vectors to queries, keys and values",
                fix="leave it out",
            )
        unknown = sorted(set(self.recompute_modules or ()) - set(RECOMPUTE_MODULES))
        if unknown:
            yield ConfigError(
                f"--recompute-modules {' '.join(unknown)}",
                why="no such part of a layer",
                fix=f"some of {', '.join(RECOMPUTE_MODULES)}",
            )


@dataclass(kw_only=True)
class MLATransformerConfig(TransformerConfig):
    """A transformer with multi-latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    q_lora_rank: None: queries come from the hidden states at once. rope_type: plain rotary positions or YaRN's, whose
    numbers follow; they are as `YarnRotaryEmbedding` has them.
    """

    multi_latent_attention: bool = True
    q_lora_rank: int | None = 512
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    normalization: str = "RMSNorm"
    rope_type: str = "yarn"
    rotary_base: float = 10000
    rotary_percent: float = 1.0
    rotary_scaling_factor: float = 40
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    cache_mla_latents: bool = False  # generation keeps the latent vectors whatever it says

    def _problems(self) -> Iterator[ConfigError]:
        yield from super()._problems()
        yield from mla_problems(self)
        if self.rope_type not in ROPE_TYPES:
            yield ConfigError(f"--rope-type {self.rope_type}", why="no such kind", fix=" or ".join(ROPE_TYPES))


_SPELLINGS = {item.name: item.metadata.get("name") for item in fields(TransformerConfig)}


def _spell(name: str) -> str:
    """`hidden_size` -> `--hidden-size`: messages name what a user types."""
    return _SPELLINGS.get(name) or "--" + name.replace("_", "-")
