"""RetroModel: a GPT whose layers look at neighbours of its chunks (Borgeaud et al. 2022).

    input_ids   [b, ns]      --embedding--> [ns, b, d]     --layers; some attend to the context--> logits as GPT
    context_ids [b*l*k, r]   --the same---> [r, b*l*k, d]  --encoder, in the first of those-->

Rows of the context: batch, chunk, neighbour, the last one fastest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.models.gpt.gpt_model import GPTModel
from megatron_lite.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron_lite.transformer.inference_context import InferenceContext


class RetroModel(GPTModel):
    """Made as a GPTModel, with a RetroConfig and the spec of `get_retro_decoder_block_spec`."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        context_input_ids: Tensor | None = None,
        context_position_ids: Tensor | None = None,
        context_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: InferenceContext | None = None,
        *,
        inference_params: InferenceContext | None = None,
        **more: Any,
    ) -> Tensor:
        """As GPTModel's, and:

        Args:
            context_input_ids: `[b*l*k, r]`, tokens of the neighbours.
            context_position_ids: like them; None: 0 ... r - 1.
            context_mask: accepted as Megatron has it; neighbours are looked at as a whole, None.
        """
        context = None
        if context_input_ids is not None:
            if context_position_ids is None:
                r = context_input_ids.shape[1]
                context_position_ids = torch.arange(r, device=context_input_ids.device).expand_as(context_input_ids)
            context = self.embedding(context_input_ids, context_position_ids)
            if self.embedding.scatter_to_sequence_parallel:
                # Neighbours are encoded whole on every rank; each rank's gradient is that of all, of which it takes
                # its part.
                context = gather_from_sequence_parallel_region(
                    context, tensor_parallel_output_grad=False, group=self.pg_collection.tp
                )
        return super().forward(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input=decoder_input,
            labels=labels,
            inference_context=inference_context,
            inference_params=inference_params,
            extra_block_kwargs={"context": context, "context_mask": context_mask},
            **more,
        )
