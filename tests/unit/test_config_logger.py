"""Constructors' arguments as files."""

import json

from megatron_lite.config_logger import has_config_logger_enabled, log_config_to_disk
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.transformer import TransformerConfig

SHAPE = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


def test_a_model_leaves_its_arguments_and_its_configs_fields(tmp_path):
    """A default that a script forgot to pass on is seen there and nowhere else. Numbers tell two objects apart."""
    config = TransformerConfig(**SHAPE, config_logger_dir=str(tmp_path / "configs"))
    for vocabulary in (32, 64):
        GPTModel(config, get_gpt_layer_local_spec(), vocabulary, 8, share_embeddings_and_output_weights=True)
    names = sorted(path.name for path in (tmp_path / "configs").iterdir())
    assert names == [f"{kind}.rank_00000.iter{i}.json" for kind in ("GPTModel", "TransformerBlock") for i in (0, 1)]
    found = [json.loads((tmp_path / "configs" / f"GPTModel.rank_00000.iter{i}.json").read_text()) for i in (0, 1)]
    assert [values["vocab_size"] for values in found] == [32, 64]
    first = found[0]
    assert first["share_embeddings_and_output_weights"] is True and first["rotary_percent"] == 1.0
    assert first["config"]["hidden_size"] == 16 and first["config"]["params_dtype"] == "torch.float32"
    assert first["transformer_layer_spec"]["module"].endswith("transformer_layer.TransformerLayer")
    assert "self" not in first


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TransformerConfig(**SHAPE)
    assert not has_config_logger_enabled(config)
    log_config_to_disk(config, {"self": object(), "x": 1})
    assert list(tmp_path.iterdir()) == []
