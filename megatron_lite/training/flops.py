"""Model floating-point operations of a step, as Megatron counts them, and what the device could do.

Three passes of matrix products (forward, gradient of the input, gradient of the weight), two operations for each
multiply-add, causal attention at half; recomputation is not counted. With T tokens, S2 the sum of squared sequence
lengths, L layers (of which Lm have experts and Ld have none), V the padded vocabulary, q and r the widths of all query
and of all key heads:

    6 * { T * [ (3 or 2) * h * (f Ld + (fm K + fs) Lm)  +  L * (h * (q + 2 r) + q * h)  +  h * V ]  +  S2 * L * q }

An expert is fm wide, a token goes to K of them and to shared experts of together fs. The router is left out. With a
latent size l routed experts have l in place of h, and 2 h l for the projections is added. A gate on
attention's output adds h q a layer.

Multi-latent attention with n heads, ranks lq and l, head sizes d, r (rotated) and v has in place of these terms

    per token    lq (h + n (d + r) + 1), without that rank h n (d + r),
                 + l (h + n (d + v) + 1) + h r + n v h          and per pair of tokens  n (d + r) / 2 + n v / 2

Each of m predictions of further tokens adds a layer like the last one, its norms and projection, 3 h + 2 h^2, and the
logits again.

BERT's attention counts in full, and its masks' head is one matrix more, h * h.

An encoder has no logits, and its attention counts in full. A decoder behind it has beside its own attention one to the
encoder: queries and outputs of its T tokens, keys and values of the encoder's T_e, and s * s_e scores a sample.
"""

from __future__ import annotations

from argparse import Namespace

from megatron_lite.models.retro.config import retro_layer_numbers
from megatron_lite.training.derived import has_decoder_behind, is_gated
from megatron_lite.training.families import family_of
from megatron_lite.transformer.moe.moe_rules import moe_layers


def num_floating_point_operations(args: Namespace, batch_size: int) -> float:
    """Operations of one step over `batch_size` sequences of `args.seq_length` tokens.

    Args:
        args: resolved arguments (Megatron's names).
    """
    s, h, layers = args.seq_length, args.hidden_size, args.num_layers
    query = args.kv_channels * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    key = args.kv_channels * groups
    if has_decoder_behind(args):
        return 6 * batch_size * _encoder_and_decoder(args, query, 3 if is_gated(args) else 2)
    further = args.mtp_num_layers or 0
    mlps = _mlps(args, 3 if is_gated(args) else 2, further)
    if args.multi_latent_attention:
        attention, pairs = _latent_attention(args)
    else:
        gate = h * query if args.attention_output_gate else 0
        attention, pairs = h * (query + 2 * key) + query * h + gate, query
    logits = h * args.padded_vocab_size * (1 + further)
    joined = further * (3 * h + 2 * h * h)
    layers += further
    scores = s * s * layers * pairs
    if family_of(args) == "bert":
        logits, scores = logits + h * h, 2 * scores
    plain = 6 * batch_size * (s * (mlps + layers * attention + joined + logits) + scores)
    if family_of(args) == "retro" and args.retro_add_retriever:
        return plain + 6 * _retrieval(args, batch_size * s, query)
    return plain


def _retrieval(args: Namespace, tokens: int, query: int) -> int:
    """Retro: the encoder of neighbours, and the layers that attend to them; in the unit of the formula above."""
    h, m, k = args.hidden_size, args.retro_chunk_length, args.retro_num_neighbors
    r = args.retro_num_retrieved_chunks * m
    retrieved = tokens // m * k * r
    mlp = (3 if is_gated(args) else 2) * h * args.ffn_hidden_size
    layer = retrieved * (4 * h * query + mlp + 2 * r * query)  # a neighbour looks at all of itself
    to_chunk = retrieved * (2 * h * query + 2 * m * query) + tokens * 2 * h * query
    to_neighbors = tokens * (2 * h * query + 2 * k * r * query) + retrieved * 2 * h * query
    retrieving = len(retro_layer_numbers(args.num_layers, args.retro_layers))
    return args.retro_encoder_layers * layer + to_chunk + retrieving * to_neighbors


def _mlps(args: Namespace, matrices: int, further: int) -> int:
    """Matrix elements of the MLPs that a token passes through, over all layers; further ones are like the last.

    matrices: of one MLP.
    """
    h, kinds = args.hidden_size, moe_layers(args.num_layers, args.num_experts, args.moe_layer_freq)
    experts = sum(kinds) + further * int(kinds[-1])
    dense = matrices * h * args.ffn_hidden_size * (args.num_layers + further - experts)
    if not experts:
        return dense
    latent = args.moe_latent_size
    routed = matrices * (latent or h) * args.moe_ffn_hidden_size * args.moe_router_topk + 2 * h * (latent or 0)
    return dense + experts * (routed + matrices * h * (args.moe_shared_expert_intermediate_size or 0))


def _latent_attention(args: Namespace) -> tuple[float, float]:
    """Matrix elements that a token meets in a layer, and per pair of tokens in the causal half."""
    h, n, rank = args.hidden_size, args.num_attention_heads, args.kv_lora_rank
    head, value = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    if args.q_lora_rank is None:
        query = h * n * head
    else:
        query = args.q_lora_rank * (h + n * head + 1)
    keys = rank * (h + n * (args.qk_head_dim + value) + 1) + h * args.qk_pos_emb_head_dim
    return query + keys + n * value * h, n * (head + value) / 2


def _encoder_and_decoder(args: Namespace, query: int, matrices: int) -> float:
    """Matrix elements that a sample meets in both stacks. query: width of all heads. matrices: of an MLP."""
    s, t, h = args.seq_length, args.decoder_seq_length, args.hidden_size
    layer = matrices * h * args.ffn_hidden_size + 4 * h * query
    encoder = args.num_layers * (s * layer + 2 * s * s * query)
    own = t * layer + t * t * query
    cross = t * 2 * h * query + s * 2 * h * query + 2 * s * t * query
    return encoder + args.decoder_num_layers * (own + cross) + t * h * args.padded_vocab_size
