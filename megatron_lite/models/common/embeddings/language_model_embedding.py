"""Word plus position (plus token type) embedding, with dropout: `[b, s]` ids -> `[s, b, h]`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.context_parallel.partition import split_sequence
from megatron_lite.fusions.bias_dropout_add import dropout
from megatron_lite.initialization import set_init
from megatron_lite.sharding import whole
from megatron_lite.tensor_parallel.layers import VocabParallelEmbedding
from megatron_lite.tensor_parallel.mappings import default_group, scatter_to_sequence_parallel_region
from megatron_lite.tensor_parallel.random import get_cuda_rng_tracker
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.transformer_config import TransformerConfig


def position_ids_of(ids: Tensor, cp_group: ProcessGroup | None, begin: int = 0) -> Tensor:
    """Where the tokens `[b, s/cp]` that this rank holds stand in their sequences, which begin at `begin`; a view."""
    size = collectives.group_size(cp_group)
    whole = torch.arange(begin, begin + ids.shape[1] * size, device=ids.device)
    return split_sequence(whole, collectives.group_rank(cp_group), size).unsqueeze(0).expand(ids.shape[0], -1)


class LanguageModelEmbedding(MegatronModule):
    """The first thing of the first stage.

    Args:
        vocab_size: rows of the (padded) table.
        max_sequence_length: rows of the position table, if there is one.
        position_embedding_type: "learned_absolute" has a table; rotary ones and "none" have not.
        num_tokentypes: rows of the token type table; 0: none.
        scatter_to_sequence_parallel: cut along the sequence where sequence parallelism is on.
        tp_group: None = the registered tensor-parallel group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: Literal["learned_absolute", "rope", "yarn", "mrope", "none"] = "learned_absolute",
        num_tokentypes: int = 0,
        scatter_to_sequence_parallel: bool = True,
        tp_group: ProcessGroup | None = None,
    ):
        super().__init__(config)
        self.vocab_size, self.max_sequence_length, self.num_tokentypes = vocab_size, max_sequence_length, num_tokentypes
        self.tp_group = default_group(tp_group)
        self.add_position_embedding = position_embedding_type == "learned_absolute"
        self.sequence_parallel = config.sequence_parallel and collectives.group_size(self.tp_group) > 1
        self.scatter_to_sequence_parallel = scatter_to_sequence_parallel and self.sequence_parallel
        # The sum over ranks and the cut along the sequence are one collective, unless something is added in between.
        self.reduce_scatter_embeddings = (
            self.scatter_to_sequence_parallel and not self.add_position_embedding and num_tokentypes <= 0
        )
        assert config.embedding_init_method is not None
        self.word_embeddings = VocabParallelEmbedding(
            num_embeddings=vocab_size,
            embedding_dim=config.hidden_size,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=self.reduce_scatter_embeddings,
            config=config,
            tp_group=self.tp_group,
        )
        self.position_embeddings = self.tokentype_embeddings = None
        if self.add_position_embedding:
            self.position_embeddings = self._table(max_sequence_length)
        if num_tokentypes > 0:
            self.tokentype_embeddings = self._table(num_tokentypes)

    def _table(self, rows: int) -> nn.Embedding:
        table = nn.Embedding(rows, self.config.hidden_size, _weight=torch.empty(rows, self.config.hidden_size))
        weight = nn.Parameter(table.weight.detach().to(self.config.params_dtype))
        weight.shard = whole("weight", tuple(weight.shape))  # type: ignore[attr-defined]
        set_init(weight, self.config.embedding_init_method, "weight")
        table.weight = weight
        return table

    def forward(self, input_ids: Tensor, position_ids: Tensor | None, tokentype_ids: Tensor | None = None) -> Tensor:
        """ids `[b, s]` -> `[s, b, h]`, or `[s/t, b, h]` with sequence parallelism; fp32 with an fp32 residual."""
        if self.reduce_scatter_embeddings:
            y = self.word_embeddings(input_ids)
        else:
            y = self.word_embeddings(input_ids.t())  # looked up in the order in which layers want them: no copy
        if self.position_embeddings is not None:
            assert position_ids is not None, "learned positions need position_ids"
            same = position_ids.shape[0] > 1 and position_ids.stride(0) == 0  # one row for all: look it up once
            table = self.position_embeddings(position_ids[:1].t() if same else position_ids.t())
            y = y + table
        if self.tokentype_embeddings is not None:
            assert tokentype_ids is not None, "a model with token types needs tokentype_ids"
            y = y + self.tokentype_embeddings(tokentype_ids.t())
        if self.config.embedding_multiplier != 1.0:
            y = y * self.config.embedding_multiplier
        if self.config.fp32_residual_connection:
            y = y.float()
        probability = self.config.hidden_dropout if self.training else 0.0
        if self.scatter_to_sequence_parallel and not self.reduce_scatter_embeddings:
            y = scatter_to_sequence_parallel_region(y, self.tp_group)
            if self.config.clone_scatter_output_in_embedding:
                y = y.clone()  # a view would keep all of the sequence in memory
        region = get_cuda_rng_tracker().fork() if probability and self.scatter_to_sequence_parallel else nullcontext()
        with region:
            return dropout(y, probability, self.training)
