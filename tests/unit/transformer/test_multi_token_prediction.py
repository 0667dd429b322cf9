"""Predictions of further tokens: shifts, losses, placement, what may be switched."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.aux_loss import AuxLossAutoScaler
from megatron_lite.errors import ConfigError
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron_lite.packed_seq_params import PackedSeqParams
from megatron_lite.transformer import TransformerConfig
from megatron_lite.transformer.multi_token_prediction import roll_tensor
from megatron_lite.transformer.transformer_block import layout_of

VOCABULARY, LENGTH = 64, 12
TOKENS = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
INPUTS, LABELS = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous()


@pytest.fixture(autouse=True)
def plain_scale():
    AuxLossAutoScaler.set_loss_scale(1.0)


def gpt(depths: int | None = 2, tied: bool = False, **more: object) -> GPTModel:
    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
        normalization="RMSNorm",
        mtp_num_layers=depths,
        **more,
    )
    spec = get_gpt_layer_local_spec()
    return GPTModel(
        config,
        spec,
        VOCABULARY,
        LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec),
    )


def gradients(model: GPTModel, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    model(INPUTS, None, None, labels=LABELS, loss_mask=mask).mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_tokens_are_shifted_and_the_last_is_empty():
    """The example of the specification: two depths of five tokens."""
    once, count = roll_tensor(torch.tensor([[11, 12, 13, 14, 15]]))
    twice, _ = roll_tensor(once)
    assert once.tolist() == [[12, 13, 14, 15, 0]] and twice.tolist() == [[13, 14, 15, 0, 0]]
    mask, left = roll_tensor(roll_tensor(torch.ones(1, 5))[0])
    assert mask.tolist() == [[1, 1, 1, 0, 0]] and left == 3 and count == 54


def test_packed_documents_are_shifted_one_by_one():
    """The first token of the next document is no successor."""
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    packed = PackedSeqParams("thd", ends, ends)
    assert roll_tensor(torch.tensor([[1, 2, 3, 4, 5]]), packed_seq_params=packed)[0].tolist() == [[2, 3, 0, 5, 0]]


@pytest.mark.parametrize("tied", [False, True])
def test_losses_and_gradients_are_those_of_the_formula_written_out(tied):
    """Two depths one behind the other, with a mask, against the model's own parts put together by hand."""
    model, mask = gpt(tied=tied), torch.ones(2, LENGTH)
    mask[0, 3:6] = 0.0
    loss = model(INPUTS, None, None, labels=LABELS, loss_mask=mask)
    loss.mean().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    reports = {key: (total / tokens).item() for key, (total, tokens) in model.reported_losses.items()}

    model.zero_grad()
    model.decoder.eval()
    head = model.embedding.word_embeddings.weight if tied else model.output_layer.weight
    rotary = model.rotary_pos_emb(LENGTH)
    hidden = model.decoder(model.embedding(INPUTS, None), None, rotary_pos_emb=rotary)

    def ce(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((hidden @ head.t()).permute(1, 2, 0), labels, reduction="none")

    total, ids, labels, weights = ce(hidden, LABELS).mean(), INPUTS, LABELS, mask
    torch.testing.assert_close(loss.mean(), total)
    for depth in (1, 2):
        ids, labels, weights = (F.pad(x[:, 1:], (0, 1)) for x in (ids, labels, weights))
        layer = model.mtp.layers[depth - 1]
        u = torch.cat([layer.enorm(model.embedding(ids, None)), layer.hnorm(hidden)], -1) @ layer.eh_proj.weight.t()
        hidden = layer.final_layernorm(layer.transformer_layer(u, rotary_pos_emb=rotary)[0])
        own = (ce(hidden, labels) * weights).sum() / weights.sum()
        assert reports[f"mtp_{depth} loss"] == pytest.approx(own.item(), rel=1e-5)
        total = total + 0.1 / 2 * own
    total.backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(got[name], param.grad, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_factor_of_0_leaves_the_main_training_as_it_is():
    """Bit by bit: losses that ride along touch nothing else."""
    plain, with_depths = gradients(gpt(None)), gradients(gpt(mtp_loss_scaling_factor=0.0))
    assert all(torch.equal(with_depths[name], grad) for name, grad in plain.items())
    assert all(not with_depths[name].any() for name in with_depths if name.startswith("mtp."))


def test_one_layer_may_predict_all_depths():
    model = gpt(depths=3, mtp_use_repeated_layer=True)
    assert len(model.mtp.layers) == 1
    assert set(gradients(model)) == set(gradients(gpt(depths=1))) and len(model.reported_losses) == 3


def test_detached_heads_teach_the_further_layers_alone():
    """What lies below learns what it learns without them; the further layers learn as ever."""
    plain, detached, joint = gradients(gpt(None)), gradients(gpt(mtp_detach_heads=True)), gradients(gpt())
    assert all(torch.equal(detached[name], grad) for name, grad in plain.items())
    torch.testing.assert_close(
        detached["mtp.layers.1.eh_proj.weight"], joint["mtp.layers.1.eh_proj.weight"], atol=1e-7, rtol=1e-6
    )


@torch.no_grad()
def test_evaluation_and_decoding_leave_them_out():
    model, plain = gpt().eval(), gpt(None).eval()
    assert torch.equal(model(INPUTS, None, None, labels=LABELS), plain(INPUTS, None, None, labels=LABELS))
    assert torch.equal(model(INPUTS, None, None), plain(INPUTS, None, None)) and not model.reported_losses


def test_recomputation_changes_no_gradient():
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    again, kept = gradients(gpt(**full)), gradients(gpt())
    assert all(torch.equal(again[name], kept[name]) for name in kept)


def test_they_stand_with_the_loss_or_where_the_string_says():
    def config(**more: object) -> TransformerConfig:
        return TransformerConfig(
            num_layers=2,
            hidden_size=8,
            num_attention_heads=1,
            mtp_num_layers=2,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            **more,
        )

    assert [cell.mtp for cell in layout_of(config()).cells[0]] == [0, 2]
    assert [cell.mtp for cell in layout_of(config(pipeline_model_parallel_layout="Ettmm|L")).cells[0]] == [2, 0]
    with pytest.raises(ConfigError, match="holds 1 m, and --mtp-num-layers is 2"):
        layout_of(config(pipeline_model_parallel_layout="Ettm|L"))
    with pytest.raises(ConfigError, match="--mtp-num-layers -1"):
        gpt(-1)
