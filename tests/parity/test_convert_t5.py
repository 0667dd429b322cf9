"""Hugging Face's T5 and T5 1.1 against ours: logits, and folders that come in and go out with the same bits."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpointing.huggingface import HuggingFaceFolder
from megatron_lite.cli import convert
from megatron_lite.cli.loaded_model import load_model
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.training.record import _forget_run

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from safetensors.torch import load_file, save_file  # noqa: E402

VOCABULARY = 96
_SMALL = {
    "vocab_size": VOCABULARY,
    "d_model": 48,
    "d_kv": 12,
    "d_ff": 80,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 6,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "dropout_rate": 0.1,
    "decoder_start_token_id": 0,
    "initializer_factor": 0.2,  # logits near 1, so that 1e-5 of them is 1e-5
}
CASES = {
    "t5": {},  # ReLU, scaled logits of a tied output layer
    "t5_1_1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "gated_silu": {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
}


def build(name: str) -> torch.nn.Module:
    """A random model whose norms are random too: at one they would hide a mistake."""
    torch.manual_seed(3)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**_SMALL, **CASES[name])).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn_like(param))
    return model


def to_folder(model: torch.nn.Module, folder: Path, untied: bool = False) -> Path:
    """The model on disk; `untied`: with an output layer of its own, as T5 1.1 is published."""
    model.save_pretrained(folder)
    if untied:
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = torch.randn(VOCABULARY, 48, generator=torch.Generator().manual_seed(5)) / 5
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextlib.contextmanager
def imported(folder: Path, root: Path):
    """Our model of a folder of theirs."""
    convert.import_model(folder, root, None, None, [])
    try:
        yield load_model(str(root)).model
    finally:
        _forget_run()


def their_logits(model, head: torch.Tensor | None, text, gaps, mask) -> torch.Tensor:
    """Of their model; with another output layer than the embedding computed from its last hidden states."""
    out = model(input_ids=text, decoder_input_ids=gaps, attention_mask=mask, output_hidden_states=True)
    return out.logits if head is None else out.decoder_hidden_states[-1] @ head.t()


@pytest.mark.parametrize("name, untied", [("t5", False), ("t5_1_1", False), ("t5_1_1", True), ("gated_silu", True)])
def test_logits_equal_hugging_faces_and_the_folder_comes_back_with_the_same_bits(tmp_path, name, untied):
    """Scores without scale, buckets, the place of norms, the order of keys and values: each mistake is off by 1e-2."""
    theirs = build(name)
    folder = to_folder(theirs, tmp_path / "theirs", untied)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    text, gaps = (torch.randint(0, VOCABULARY, (2, n), generator=generator) for n in (23, 9))
    mask = torch.ones(2, 23, dtype=torch.int64)
    mask[1, 15:] = 0
    padding = (mask == 0)[:, None, None]
    with imported(folder, tmp_path / "ours") as ours, torch.no_grad():
        want = their_logits(theirs, tensors.get("lm_head.weight") if untied else None, text, gaps, mask)
        torch.testing.assert_close(ours(text, gaps, padding, None, padding), want, atol=1e-5, rtol=1e-5)
    convert.export_model(tmp_path / "ours", tmp_path / "back")
    back = HuggingFaceFolder(tmp_path / "back")
    written = {name: back.read(name) for name in back.tensors}
    if name == "t5_1_1" and not untied:  # theirs is written out in full: older versions want it so
        assert torch.equal(written.pop("lm_head.weight"), written["shared.weight"])
    assert set(written) == set(tensors)
    assert all(torch.equal(written[key], tensors[key]) for key in tensors)
    again = transformers.T5Config.from_pretrained(tmp_path / "back")
    assert again.scale_decoder_outputs == theirs.config.scale_decoder_outputs
    for key in (_SMALL | {"feed_forward_proj": 0}).keys() - {"initializer_factor"}:
        assert getattr(again, key) == getattr(theirs.config, key), key
    if not untied:
        reread = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "back").eval()
        with torch.no_grad():
            torch.testing.assert_close(their_logits(reread, None, text, gaps, mask), want)


def test_copies_of_the_embedding_are_read_and_other_tensors_are_errors(tmp_path):
    folder = to_folder(build("t5"), tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    copies = {f"{stack}.embed_tokens.weight": tensors["shared.weight"].clone() for stack in ("encoder", "decoder")}
    save_file(tensors | copies, folder / "model.safetensors", metadata={"format": "pt"})
    convert.import_model(folder, tmp_path / "ours", None, None, [])
    copies["decoder.embed_tokens.weight"] = copies["decoder.embed_tokens.weight"] + 1
    save_file(tensors | copies, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="decoder.embed_tokens.weight is not shared.weight"):
        convert.import_model(folder, tmp_path / "other", None, None, [])
    save_file(tensors | {"more": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="1 that nothing here reads: more"):
        convert.import_model(folder, tmp_path / "other", None, None, [])
    del tensors["decoder.block.1.layer.1.EncDecAttention.k.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="1 missing: decoder.block.1.layer.1.EncDecAttention.k.weight"):
        convert.import_model(folder, tmp_path / "other", None, None, [])


def test_a_t5_that_theirs_cannot_say_is_not_written(tmp_path):
    """With scaled scores, for one. And no GPT of theirs is taken for a T5."""
    folder = to_folder(build("t5_1_1"), tmp_path / "theirs")
    convert.import_model(folder, tmp_path / "ours", None, None, ["--softmax-scale", "0.5"])
    with pytest.raises(ConfigError, match="softmax_scale is 0.5, not 1.0"):
        convert.export_model(tmp_path / "ours", tmp_path / "back")
    with pytest.raises(ConfigError, match="model_family is 't5'"):
        convert.export_model(tmp_path / "ours", tmp_path / "back", model_type="llama")


def test_the_verb_names_the_script_to_go_on_with(tmp_path):
    folder = to_folder(build("t5"), tmp_path / "theirs")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert convert.main(["--load-dir", str(folder), "--save-dir", str(tmp_path / "ours")]) == 0
    assert "pretrain_t5.py --load" in out.getvalue()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"feed_forward_proj": "gated-tanh"}))
    with pytest.raises(ConfigError, match="feed_forward_proj = 'gated-tanh'"):
        convert.main(["--load-dir", str(folder), "--save-dir", str(tmp_path / "other")])
