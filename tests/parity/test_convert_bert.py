"""BERTs of transformers through `megatron-lite convert` and back: the same bits, and the same logits in between."""

import pytest
import torch

from megatron_lite.cli import convert
from megatron_lite.cli.loaded_model import load_model
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.training.record import _forget_run

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from safetensors.torch import load_file, save_file  # noqa: E402

VOCABULARY, LENGTH = 96, 24
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 32,
    "layer_norm_eps": 1e-3,
}
# Class of config, class of model, more settings. Norms in front of and behind the halves of a layer; both heads or one.
CASES = {
    "bert": ("BertConfig", "BertForPreTraining", {}),
    "bert_masks_only": ("BertConfig", "BertForMaskedLM", {"type_vocab_size": 1}),
    "bert_untied": (
        "BertConfig",
        "BertForPreTraining",
        {"tie_word_embeddings": False},
    ),
    "megatron_bert": ("MegatronBertConfig", "MegatronBertForPreTraining", {}),
    "megatron_bert_masks_only": ("MegatronBertConfig", "MegatronBertForMaskedLM", {"type_vocab_size": 1}),
}
_GENERATOR = torch.Generator().manual_seed(3)
TOKENS = torch.randint(0, VOCABULARY, (2, LENGTH), generator=_GENERATOR)
SEGMENTS = torch.tensor([[0] * 10 + [1] * 14, [0] * 15 + [1] * 9])
MASK = torch.tensor([[1] * LENGTH, [1] * 17 + [0] * 7])


def build(name: str, **more: object) -> torch.nn.Module:
    """A random model in which biases and norms are random too: at zero and one they would hide a mistake."""
    config, model, settings = CASES[name]
    torch.manual_seed(7)
    built = getattr(transformers, model)(getattr(transformers, config)(**{**_SHAPE, **settings, **more})).eval()
    with torch.no_grad():
        for key, parameter in built.named_parameters():
            if not (key.endswith("token_type_embeddings.weight") and "ForMaskedLM" in model):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.zero_()
        if not built.config.tie_word_embeddings:  # transformers' own is then used by nothing
            built.cls.predictions.bias.copy_(built.cls.predictions.decoder.bias)
    return built


def run(*words: object) -> None:
    """The verb, in this process."""
    assert convert.main([str(word) for word in words]) == 0


@torch.no_grad()
def ours_of(folder: str, head: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """On a rank: logits of both heads, from a checkpoint."""
    try:
        model = load_model(folder).model
        return model(TOKENS, MASK, SEGMENTS if head else None)
    finally:
        _forget_run()


@pytest.mark.parametrize("name", CASES)
def test_berts_come_in_and_go_out_to_the_bit_with_transformers_logits(world, tmp_path, name):
    theirs = build(name)
    theirs.save_pretrained(tmp_path / "hf")
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    run("--load-dir", tmp_path / "ours", "--save-dir", tmp_path / "back")
    one, other = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

    head = "masks_only" not in name
    words = {"input_ids": TOKENS, "attention_mask": MASK, **({"token_type_ids": SEGMENTS} if head else {})}
    with torch.no_grad():
        want = theirs(**words)
        again, report = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        first = again.eval()(**words)
    ((logits, binary),) = world(1).run(ours_of, str(tmp_path / "ours"), head)
    real = MASK.bool()
    wanted, after = (x.prediction_logits if head else x.logits for x in (want, first))
    assert torch.equal(wanted, after)
    torch.testing.assert_close(logits[real][:, :VOCABULARY], wanted[real], atol=1e-5, rtol=1e-5)
    if head:
        torch.testing.assert_close(binary, want.seq_relationship_logits, atol=1e-5, rtol=1e-5)


def test_a_second_segment_that_would_be_lost_is_said(tmp_path, capsys):
    """Our model of masks alone reads one segment; the row of the first becomes a part of the positions."""
    theirs = build("bert_masks_only", type_vocab_size=2)
    with torch.no_grad():
        theirs.bert.embeddings.token_type_embeddings.weight.normal_()
    theirs.save_pretrained(tmp_path / "hf")
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    assert "second segment" in capsys.readouterr().out
    run("--load-dir", tmp_path / "ours", "--save-dir", tmp_path / "back")
    again = type(theirs).from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fault", ["left over", "missing", "other copy"])
def test_tensors_that_do_not_belong_are_an_error_before_anything_is_written(tmp_path, fault):
    build("bert").save_pretrained(tmp_path / "hf")
    state = load_file(tmp_path / "hf/model.safetensors")
    if fault == "left over":
        state["bert.encoder.layer.3.output.dense.weight"] = torch.zeros(48, 80)
    elif fault == "missing":
        del state["cls.seq_relationship.weight"]
    else:
        state["cls.predictions.decoder.weight"] = torch.zeros(VOCABULARY, 48)
    save_file(state, tmp_path / "hf/model.safetensors")
    with pytest.raises(CheckpointError, match="layer.3.output|cls.seq_relationship|decoder.weight is not"):
        run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_act": "gelu_new"}, "hidden_act"),
        ({"is_decoder": True}, "is_decoder"),
        ({"type_vocab_size": 3}, "type_vocab_size"),
    ],
)
def test_a_bert_that_would_be_another_model_here_is_refused(tmp_path, settings, words):
    build("bert", **settings).save_pretrained(tmp_path / "hf")
    with pytest.raises(ConfigError, match=words):
        run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
