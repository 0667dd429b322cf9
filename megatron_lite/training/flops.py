"""Model floating-point operations of a step, as Megatron counts them, and what the device could do.

Three passes of matrix products (forward, gradient of the input, gradient of the weight), two operations for each
multiply-add, causal attention at half; recomputation is not counted. With T tokens, S2 the sum of squared sequence
lengths, L layers, V the padded vocabulary, q and r the widths of all query and of all key heads:

    6 * { T * [ L * (3 or 2) * h * f  +  L * (h * (q + 2 r) + q * h)  +  h * V ]  +  S2 * L * q }
"""

from __future__ import annotations

from argparse import Namespace


def num_floating_point_operations(args: Namespace, batch_size: int) -> float:
    """Operations of one step over `batch_size` sequences of `args.seq_length` tokens.

    Args:
        args: resolved arguments (Megatron's names).
    """
    s, h, layers = args.seq_length, args.hidden_size, args.num_layers
    tokens, squares = batch_size * s, batch_size * s * s
    query = args.kv_channels * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    key = args.kv_channels * groups
    mlp = (3 if args.swiglu or args.quick_geglu else 2) * h * args.ffn_hidden_size
    attention = h * (query + 2 * key) + query * h
    logits = h * args.padded_vocab_size
    return 6 * (tokens * (layers * (mlp + attention) + logits) + squares * layers * query)
