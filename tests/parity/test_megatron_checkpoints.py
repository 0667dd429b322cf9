"""Megatron-LM's own `torch_dist` checkpoints: loaded, converted, and never run."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from argparse import Namespace

import pytest
import torch

from megatron_lite.checkpointing import folders, megatron_dist, reader, sharded
from megatron_lite.checkpointing.checkpoint import read_args
from megatron_lite.cli import convert
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.sharding import whole
from megatron_lite.training.arguments import parse_args
from megatron_lite.training.checkpointing import load_args_from_checkpoint, load_checkpoint
from megatron_lite.training.global_vars import get_args
from megatron_lite.training.record import record_rank
from tests.parity import test_golden_layouts as golden

FOLDER = golden.GOLDEN / "layouts_ckpt_dense"


class AttnBackend:
    """A class of the saving program, which this one does not have: removed before anything is read."""

    def __init__(self, value):
        self.value = value


def _as_megatron(root, args=None, more=None):
    """Megatron's folder of a run at iteration 5, with what it keeps in common.pt."""
    folder = root / "iter_0000005"
    shutil.copytree(FOLDER, folder)
    (root / folders.TRACKER).write_text("5")
    common = {"args": args, "iteration": 5, "num_floating_point_operations_so_far": 7.0, "checkpoint_version": 3.0}
    torch.save({**(common if args is not None else {}), **(more or {})}, folder / "common.pt")
    return folder


def _args():
    return Namespace(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        consumed_train_samples=40,
        consumed_valid_samples=3,
        params_dtype=torch.float32,
        attention_backend=AttnBackend("auto"),
        seq_length=16,
        max_position_embeddings=16,
    )


def test_every_tensor_of_theirs_is_some_of_ours_and_found_again():
    saved = sharded.saved_tensors(FOLDER)
    ours = {}
    for key, facts in saved.items():
        for name, index in megatron_dist.names_of(key, facts.shape):
            assert megatron_dist.place_of(name, saved.keys()) == megatron_dist.Place(key, index)
            ours[name] = facts.shape[len(index) :]
    assert ours["decoder.layers.3.input_layernorm.weight"] == (32,)
    assert ours["decoder.layers.0.mlp.linear_fc1.weight"] == (128, 32) and len(ours) == 4 * 12 + 4


def test_experts_of_all_layers_in_one_tensor():
    key, shape = "decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 3, 8, 4)
    names = dict(megatron_dist.names_of(key, shape))
    assert names["decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"] == (1, 2) and len(names) == 6
    for name, index in names.items():
        assert megatron_dist.place_of(name, {key}) == megatron_dist.Place(key, index)


def _load(model, optimizer):
    args = get_args()
    args.seen = load_checkpoint(model, optimizer, None), args.consumed_train_samples
    golden.decay_all(optimizer)


def test_a_run_loads_megatrons_checkpoint_and_gets_megatrons_losses(tmp_path, monkeypatch):
    _as_megatron(tmp_path, _args())
    monkeypatch.delattr(sys.modules[__name__], "AttnBackend")
    words = [*golden.FLAGS, "--load", str(tmp_path), "--no-load-optim", "--make-vocab-size-divisible-by", "64"]
    args = parse_args([*words, "--auto-detect-ckpt-format"])
    seen = record_rank(args, golden, golden.STEPS, _load)
    assert [losses["lm loss"] for losses in seen.losses] == pytest.approx(golden.RUNS[0]["losses"], rel=1e-5)
    assert args.seen == ((5, 7.0), 40)
    with pytest.raises(CheckpointError, match="--auto-detect-ckpt-format"):
        record_rank(parse_args(words), golden, 1, _load)
    words.remove("--no-load-optim")
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        record_rank(parse_args([*words, "--auto-detect-ckpt-format"]), golden, 1, _load)


def test_the_arguments_of_megatrons_checkpoint_can_be_taken(tmp_path):
    _as_megatron(tmp_path, _args())
    args = parse_args(["--load", str(tmp_path), "--auto-detect-ckpt-format", "--use-checkpoint-args"])
    load_args_from_checkpoint(args)
    assert (args.num_layers, args.hidden_size, args.position_embedding_type) == (4, 32, "rope")


def _converted(root):
    folder = folders.find(root, "release")
    tensors = {}
    for name, facts in sharded.saved_tensors(folder).items():
        tensors[name] = (torch.empty(facts.shape, dtype=facts.dtype), whole(name, facts.shape))
    sharded.read(folder, tensors)
    return {name: tensor for name, (tensor, _) in tensors.items()}


def test_convert_takes_megatrons_tensors_apart(tmp_path, capsys):
    _as_megatron(tmp_path / "theirs", _args())
    assert convert.main(["--load-dir", str(tmp_path / "theirs"), "--save-dir", str(tmp_path / "ours")]) == 0
    found = _converted(tmp_path / "ours")
    assert len(found) == 52 and read_args(tmp_path / "ours" / "release")["num_layers"] == 4

    torch.distributed.checkpoint.load(
        raw := {"decoder.layers.self_attention.linear_qkv.weight": torch.empty(4, 96, 32)},
        checkpoint_id=FOLDER,
        no_dist=True,
    )
    for layer, rows in enumerate(raw["decoder.layers.self_attention.linear_qkv.weight"]):
        assert torch.equal(found[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"], rows)


def test_convert_needs_arguments_from_somewhere(tmp_path):
    _as_megatron(tmp_path / "theirs")
    words = ["--load-dir", str(tmp_path / "theirs"), "--save-dir", str(tmp_path / "ours")]
    with pytest.raises(ConfigError, match="holds no arguments"):
        convert.main(words)
    flags = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
        --position-embedding-type rope --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer
        --vocab-size 63""".split()
    assert convert.main([*words, *flags]) == 0
    assert len(_converted(tmp_path / "ours")) == 52


# -- malice --------------------------------------------------------------------------------------------------------


class _Hostile:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_nothing_in_megatrons_folder_is_run(tmp_path):
    args = _args()
    args.evil, owned = _Hostile(tmp_path / "owned"), tmp_path / "owned"
    folder = _as_megatron(tmp_path / "a", args, {"more": _Hostile(owned)})
    _, found = megatron_dist.read_common(folder)
    assert found["num_layers"] == 4 and not owned.exists()

    for data in (pickle.dumps(_Hostile(owned)), b"", b"PK"):
        (folder / "common.pt").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"common\.pt"):
            megatron_dist.read_common(folder)
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), folder / "common.pt")
    with pytest.raises(CheckpointError, match="scripted model"):
        megatron_dist.read_common(folder)

    (folder / reader.INDEX).write_bytes(pickle.dumps(_Hostile(owned)))
    tensors = {"output_layer.weight": (torch.zeros(64, 32), whole("output_layer.weight", (64, 32)))}
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        megatron_dist.read(folder, tensors)
    assert not owned.exists()


def test_tensors_that_do_not_fit_are_named_as_ours():
    wanted = {
        name: torch.zeros(shape)
        for name, shape in {
            "decoder.layers.4.input_layernorm.weight": (32,),
            "decoder.layers.0.mlp.linear_fc1.weight": (64, 32),
            "decoder.layers.0.mlp.gate": (1,),
        }.items()
    }
    with pytest.raises(CheckpointError) as caught:
        megatron_dist.read(
            FOLDER, {name: (tensor, whole(name, tuple(tensor.shape))) for name, tensor in wanted.items()}
        )
    assert "1 missing in it: decoder.layers.0.mlp.gate" in caught.value.what
    assert "decoder.layers.0.mlp.linear_fc1.weight [128, 32] there, [64, 32] here" in caught.value.what
    assert "decoder.layers.4.input_layernorm.weight" in caught.value.what and "unknown to this run" in caught.value.what
