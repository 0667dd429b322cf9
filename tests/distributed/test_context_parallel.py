"""Ranks that share a sequence, against one process that has all of it: results, gradients, bytes, memory, order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite import collectives
from megatron_lite.context_parallel import blocks
from megatron_lite.context_parallel.partition import join_sequence, one_document, split_sequence
from megatron_lite.context_parallel.ring_attention import ring_attention
from megatron_lite.context_parallel.visibility import SegmentMask
from megatron_lite.errors import ConfigError
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.packed_seq_params import Document, PackedSeqParams
from megatron_lite.process_groups_config import ProcessGroupCollection, register_process_groups
from megatron_lite.tensor_parallel import model_parallel_cuda_manual_seed
from megatron_lite.training.batch import get_batch_on_this_cp_rank
from megatron_lite.transformer import TransformerConfig
from megatron_lite.transformer.dot_product_attention import DotProductAttention
from megatron_lite.transformer.enums import AttnMaskType
from tests.live_memory import Live

S, B, HEADS, GROUPS, CHANNELS = 32, 2, 8, 4, 8
EXCHANGES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def as_context_parallel(exchange: str) -> tuple[ProcessGroupCollection, list[dist.ProcessGroup]]:
    """All ranks share sequences; the levels of a2a+p2p are pairs. Returns: groups, and those to be destroyed."""
    size = dist.get_world_size()
    groups = ProcessGroupCollection(cp=dist.group.WORLD, dp_cp=dist.group.WORLD)
    made: list[Any] = []
    if exchange == "a2a+p2p":
        half = size // 2
        inner = [dist.new_group([2 * i, 2 * i + 1]) for i in range(half)]
        outer = [dist.new_group(list(range(place, size, 2))) for place in range(2)]
        rank = dist.get_rank()
        groups.hcp = [inner[rank // 2], outer[rank % 2]]
        made = [group for group in groups.hcp if group is not None]
    register_process_groups(groups)
    return groups, made


@dataclass
class Case:
    """One attention and what it looks at."""

    exchange: str = "p2p"
    causal: bool = True
    mask: str = "none"
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, cp: int) -> TransformerConfig:
        return TransformerConfig(
            num_layers=1,
            hidden_size=HEADS * CHANNELS,
            num_attention_heads=HEADS,
            num_query_groups=GROUPS,
            attention_dropout=0.0,
            context_parallel_size=cp,
            cp_comm_type=self.exchange,
            hierarchical_context_parallel_sizes=[2, cp // 2] if cp > 1 and self.exchange == "a2a+p2p" else None,
            **self.options,
        )

    def tensors(self) -> tuple[list[Tensor], Tensor, Tensor | SegmentMask | None]:
        """q, k, v, the result's gradient, and the mask, of the whole sequence."""
        generator = torch.Generator().manual_seed(3)
        q, k, v = (torch.randn(S, B, n, CHANNELS, generator=generator) for n in (HEADS, GROUPS, GROUPS))
        g = torch.randn(S, B, HEADS * CHANNELS, generator=generator)
        ids = torch.stack([torch.arange(S) // 5, torch.arange(S) // 9])
        mask: Tensor | SegmentMask | None = None
        if self.mask == "documents":
            mask = SegmentMask(ids)
        elif self.mask == "rows":
            mask = SegmentMask(ids).dense(causal=self.causal)
        elif self.mask == "padding":
            mask = SegmentMask.of_padding(torch.arange(S).expand(B, S) < torch.tensor([[S], [S - 7]]))
        return [q, k, v], g, mask

    def attention(self, cp: int, groups: ProcessGroupCollection) -> DotProductAttention:
        kind = AttnMaskType.causal if self.causal else AttnMaskType.padding
        attention = DotProductAttention(self.config(cp), 1, kind, pg_collection=groups)
        if self.options.get("softmax_type") == "learnable":
            with torch.no_grad():
                attention.softmax_offset.copy_(torch.linspace(-1, 2, HEADS))
        return attention


def alone(case: Case) -> list[Tensor]:
    """y, dq, dk, dv and the sink's gradient, of the whole sequence in this process."""
    attention = case.attention(1, ProcessGroupCollection())
    tensors, g, mask = case.tensors()
    for x in tensors:
        x.requires_grad_()
    y = attention(*tensors, mask)
    parameters = list(attention.parameters())
    return [y.detach(), *torch.autograd.grad(y, [*tensors, *parameters], g)]


def shared(case: Case) -> tuple[list[Tensor], dict[tuple[str, str], int]]:
    """This rank's share of the same, and the bytes that it sent by (kind, purpose)."""
    groups, made = as_context_parallel(case.exchange)
    size, rank = dist.get_world_size(), dist.get_rank()
    attention = case.attention(size, groups)
    whole, g, mask = case.tensors()
    tensors = [split_sequence(x, rank, size).requires_grad_() for x in whole]
    if isinstance(mask, Tensor):
        mask = get_batch_on_this_cp_rank({"attention_mask": mask})["attention_mask"]
    before = collectives.counts()
    y = attention(*tensors, mask)
    parameters = list(attention.parameters())
    grads = torch.autograd.grad(y, [*tensors, *parameters], split_sequence(g, rank, size))
    sent = {
        (kind, purpose): round(collectives.sent_bytes(kind, total, 2 if case.exchange == "a2a+p2p" else size))
        for (_, kind, purpose), (_, total) in collectives.difference(collectives.counts(), before).items()
    }
    for group in made:
        dist.destroy_process_group(group)
    register_process_groups(None)
    return [y.detach(), *grads], sent


CASES = [
    *(Case(exchange) for exchange in EXCHANGES),
    *(Case(exchange, mask="documents") for exchange in EXCHANGES),
    *(Case(exchange, mask="rows") for exchange in EXCHANGES),
    *(Case(exchange, causal=False, mask="padding") for exchange in EXCHANGES),
    *(Case(exchange, causal=False) for exchange in EXCHANGES),
    *(Case(exchange, options={"window_size": (6, 0)}) for exchange in EXCHANGES),
    *(Case(exchange, mask="documents", options={"softmax_type": "learnable"}) for exchange in EXCHANGES),
    Case("p2p", options={"softmax_type": "off-by-one", "attention_backend": "local"}),
    Case("p2p", options={"attention_backend": "flash"}),
]


def _all_shared(cases: list[Case]) -> list[tuple[list[Tensor], dict[tuple[str, str], int]]]:
    return [shared(case) for case in cases]


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_over_ranks_is_attention(world, ranks: int) -> None:
    """Every exchange, with grouped queries: results, gradients of q, k, v and of the sink."""
    cases = [case for case in CASES if ranks == 4 or case.exchange != "a2a+p2p"]
    results = world(ranks).run(_all_shared, cases)
    for i, case in enumerate(cases):
        found = [results[rank][i][0] for rank in range(ranks)]
        for place, wanted in enumerate(alone(case)):
            parts = [share[place] for share in found]
            got = join_sequence(parts) if wanted.dim() > 1 else torch.stack(parts).sum(0)
            assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-5), f"{case}: {(got - wanted).abs().max()} in {place}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formulas(world, ranks: int) -> None:
    """Elements that a rank sends, of s b h_kv = keys (as many values), s b h_q = queries, x(c) = (c - 1) / c."""
    exchanges = EXCHANGES if ranks == 4 else EXCHANGES[:3]
    keys, queries = 4 * S * B * GROUPS * CHANNELS, 4 * S * B * HEADS * CHANNELS  # bytes of the whole sequence
    once = 2 * (ranks - 1) * keys // ranks

    def traded(level: int) -> dict[tuple[str, str], int]:
        share = (level - 1) / level / ranks
        into, back = round((queries + 2 * keys) * share), round(queries * share)
        return {
            ("all_to_all", "tokens to heads"): into,
            ("all_to_all", "heads to tokens"): back,
            ("all_to_all", "gradients to heads"): back,
            ("all_to_all", "gradients to tokens"): into,
        }

    wanted = {
        "p2p": {("send", "ring keys and values"): 2 * once, ("send", "ring gradients"): once},
        "all_gather": {
            ("all_gather", "keys and values"): 2 * once,
            ("reduce_scatter", "gradients of keys and values"): once,
        },
        "a2a": traded(ranks),
    }
    if ranks == 4:
        step = 2 * keys // 2 // 2  # one step of the ring over two: half the tokens, half the heads
        wanted["a2a+p2p"] = {
            **traded(2),
            ("send", "ring keys and values"): 2 * step,
            ("send", "ring gradients"): step,
        }
    for results in world(ranks).run(_all_shared, [Case(exchange) for exchange in exchanges]):
        assert dict(zip(exchanges, (sent for _, sent in results))) == wanted


def _order() -> list[str]:
    """What a rank does, in order."""
    events: list[str] = []
    begin, forward, backward = collectives.shift, blocks.block_forward, blocks.block_backward

    class Waited:
        def __init__(self, handle: Any):
            self.handle = handle

        def wait(self) -> None:
            events.append("wait")
            self.handle.wait()

    def shift(*args: Any, purpose: str, **kwargs: Any) -> Waited:
        events.append(purpose)
        return Waited(begin(*args, purpose=purpose, **kwargs))

    def computes(what: str, function: Any) -> Any:
        return lambda *args: (events.append(what), function(*args))[1]

    with (
        mock.patch.object(collectives, "shift", shift),
        mock.patch.object(blocks, "block_forward", computes("compute", forward)),
        mock.patch.object(blocks, "block_backward", computes("compute back", backward)),
    ):
        shared(Case("p2p"))
    return events


def test_the_next_keys_travel_while_a_rank_computes(world) -> None:
    """Sends begin before the block that they are to be hidden behind, and are waited for after it."""
    send, back = "ring keys and values", "ring gradients"
    for events in world(4).run(_order):
        assert events == [
            *(send, "compute", "wait") * 3,
            "compute",
            *(send, "compute back", "wait"),
            *(send, "compute back", back, "wait"),  # gradients go on while the next block is computed
            *(send, "compute back", "wait", back, "wait"),
            *("compute back", "wait", back, "wait"),
        ]


def _kept(s: int) -> int:
    """Bytes that the forward pass of ring attention keeps for backward."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD if size > 1 else None
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, s // size, 16, generator=generator).requires_grad_() for _ in range(3))
    documents = one_document(s)
    share = blocks.Share(rank, size, documents, documents, blocks.Visible(None, 0))
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ring_attention(q, k, v, share, group, blocks.Arithmetic("flash", 0.25))
    return sum(kept.values())


def _peak(s: int) -> int:
    """Most bytes alive in a pass forward and backward through a GPT, without its weights."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if size > 1:
        as_context_parallel("p2p")
    model = gpt("rope", "p2p", size, num_layers=12, length=s)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    ids = split_sequence(torch.zeros(1, s, dtype=torch.long), rank, size, 1)
    with Live() as live:
        model(ids, ids, None, labels=ids).sum().backward()
    register_process_groups(None)
    return live.peak


def test_what_a_rank_keeps_falls_with_the_number_of_ranks(world) -> None:
    """512 tokens on 1, 2 and 4 ranks: exactly in ring attention, nearly in a model, whose keys travel as well."""
    s = 512
    one, two, four = (world(ranks).run(_kept, s)[0] for ranks in (1, 2, 4))
    assert one == 2 * two == 4 * four
    one, two, four = (world(ranks).run(_peak, s)[0] for ranks in (1, 2, 4))
    assert two == pytest.approx(one / 2, rel=0.05) and four == pytest.approx(one / 4, rel=0.15), (one, two, four)


# -- packed documents --------------------------------------------------------------------------------------------

# Places and tokens: the second document has three tokens of padding.
DOCUMENTS = (Document(0, 8, 8), Document(8, 16, 13), Document(16, 32, 32))


def packed() -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, 8, 13, 29]),
        cu_seqlens_kv=torch.tensor([0, 8, 13, 29]),
        cu_seqlens_q_padded=torch.tensor([0, 8, 16, 32]),
        cu_seqlens_kv_padded=torch.tensor([0, 8, 16, 32]),
        max_seqlen_q=16,
        max_seqlen_kv=16,
    )


def gpt(positions: str, exchange: str, cp: int, num_layers: int = 2, length: int = 32) -> GPTModel:
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
        context_parallel_size=cp,
        cp_comm_type=exchange,
        hierarchical_context_parallel_sizes=[2, cp // 2] if cp > 1 and exchange == "a2a+p2p" else None,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), 64, length, position_embedding_type=positions)  # type: ignore[arg-type]


def batch() -> dict[str, Tensor]:
    """[1, 32]: tokens, labels, positions that restart, and a loss mask that leaves padding out."""
    generator = torch.Generator().manual_seed(1)
    at = torch.arange(32)
    begins = torch.tensor([d.begin for d in DOCUMENTS for _ in range(d.end - d.begin)])
    seen = torch.tensor([d.seen for d in DOCUMENTS for _ in range(d.end - d.begin)])
    return {
        "tokens": torch.randint(0, 64, (1, 32), generator=generator),
        "labels": torch.randint(0, 64, (1, 32), generator=generator),
        "position_ids": (at - begins).unsqueeze(0),
        "loss_mask": (at < seen).float().unsqueeze(0),
    }


def packed_loss(positions: str, exchange: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, summed over ranks, of the packed documents."""
    groups, made = as_context_parallel(exchange)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = gpt(positions, exchange, size)
    share = {name: split_sequence(x, rank, size, 1, DOCUMENTS) for name, x in batch().items()}
    losses = model(share["tokens"], share["position_ids"], None, labels=share["labels"], packed_seq_params=packed())
    loss = (losses * share["loss_mask"]).sum()
    loss.backward()
    total = loss.detach().clone()
    collectives.all_reduce(total, groups.cp, purpose="test")
    grads = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        collectives.all_reduce(param.grad, groups.cp, purpose="test")
        grads[name] = param.grad
    for group in made:
        dist.destroy_process_group(group)
    register_process_groups(None)
    return total.item(), grads


def one_by_one(positions: str) -> tuple[float, dict[str, Tensor]]:
    """The same documents, each in a forward pass of its own, without padding."""
    model, total = gpt(positions, "p2p", 1), 0.0
    whole = batch()
    for d in DOCUMENTS:
        own = {name: x[:, d.begin : d.seen] for name, x in whole.items()}
        loss = model(own["tokens"], own["position_ids"], None, labels=own["labels"]).sum()
        loss.backward()
        total += loss.item()
    return total, {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize(
    "ranks, positions, exchange",
    [
        (1, "rope", "p2p"),
        (1, "learned_absolute", "p2p"),
        (2, "rope", "p2p"),
        (2, "learned_absolute", "all_gather"),
        (2, "rope", "a2a"),
        (4, "rope", "a2a+p2p"),
        (4, "rope", "p2p"),
    ],
)
def test_packed_documents_are_as_good_as_each_by_itself(world, ranks: int, positions: str, exchange: str) -> None:
    """Positions that go on across documents, keys of a neighbour, padding that is looked at, chunks of another cut."""
    loss, grads = one_by_one(positions)
    for found, its in world(ranks).run(packed_loss, positions, exchange):
        assert found == pytest.approx(loss, rel=1e-5)
        for name, grad in grads.items():
            assert torch.allclose(its[name], grad, rtol=1e-4, atol=1e-5), f"{name}: {(its[name] - grad).abs().max()}"


def test_packed_documents_must_fill_the_sequence() -> None:
    short = PackedSeqParams("thd", torch.tensor([0, 8]), torch.tensor([0, 8]))
    whole = batch()
    with pytest.raises(ConfigError, match="packed documents of 8 tokens for 1 sequences of 32"):
        gpt("learned_absolute", "p2p", 1)(whole["tokens"], whole["position_ids"], None, packed_seq_params=short)
    with pytest.raises(ConfigError, match="qkv_format 'sbhd'"):
        PackedSeqParams("sbhd", torch.tensor([0, 8]), torch.tensor([0, 8])).documents()
    with pytest.raises(ConfigError, match="they count from 0 upwards"):
        PackedSeqParams("thd", torch.tensor([0, 9, 8]), torch.tensor([0, 8])).documents()
