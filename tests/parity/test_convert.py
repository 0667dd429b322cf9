"""Models of transformers through `megatron-lite convert` and back: the same bits, and the same logits in between."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpointing import sharded
from megatron_lite.checkpointing.huggingface import HuggingFaceFolder, write_folder
from megatron_lite.checkpointing.sharded import SavedTensor
from megatron_lite.cli import convert
from megatron_lite.enums import ModelType
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.log import rank_and_world_size
from megatron_lite.models.gpt.hf_names import Sizes
from megatron_lite.models.hf_families import FAMILIES, fitting_family
from megatron_lite.training import global_vars
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.checkpoint_args import args_to_save
from megatron_lite.training.checkpointing import load_args_from_checkpoint, load_checkpoint, save_checkpoint
from megatron_lite.training.gpt_builder import gpt_builder
from megatron_lite.training.initialize import initialize_megatron
from megatron_lite.training.model_setup import get_model
from megatron_lite.training.record import _forget_run
from tests.e2e import launch

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from safetensors.torch import load_file, save_file  # noqa: E402

VOCABULARY, LENGTH = 96, 24
_GPT2 = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 48, "n_layer": 3, "n_head": 6, "bos_token_id": 0}
_GPT2 |= {"eos_token_id": 0}
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MOE = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
}
# Latent attention whose sizes all differ, one dense layer, experts of which two are shared.
_DEEPSEEK = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"} | {
    "num_key_value_heads": 6,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
}
# Case -> (class of config, class of model, its settings). Sizes are such that a mistaken order or size shows: six heads
# in two groups, a head size that is not hidden / heads, a window shorter than the text.
CASES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "gpt2_untied_exact_gelu": (
        "GPT2Config",
        "GPT2LMHeadModel",
        _GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 80},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _LLAMA | {"rms_norm_eps": 1e-3}),
    "llama3_tied_biases": (
        "LlamaConfig",
        "LlamaForCausalLM",
        _LLAMA
        | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}
        | {"rope_parameters": _LLAMA3},
    ),
    "llama_linear_rope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        _LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama_yarn": (
        "LlamaConfig",
        "LlamaForCausalLM",
        _LLAMA
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 4.0,
                "attention_factor": 1.25,
                "truncate": False,
            }
        },
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", _LLAMA | {"sliding_window": 5, "head_dim": 16}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _LLAMA | {"tie_word_embeddings": True}),
    "qwen2_some_windows": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        _LLAMA | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _LLAMA | {"head_dim": 16}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        _LLAMA | _MOE | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        _DEEPSEEK
        | {"q_lora_rank": None, "topk_method": "greedy", "rope_parameters": _YARN, "moe_intermediate_size": 24},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _DEEPSEEK | {"q_lora_rank": 20, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _LLAMA | _MOE | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
}


def build(name: str, **more: object) -> torch.nn.Module:
    """A random model in which biases and norms are random too: at zero and one they would hide a mistake."""
    config, model, settings = CASES[name]
    torch.manual_seed(7)
    built = getattr(transformers, model)(getattr(transformers, config)(**settings | more)).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for buffer_name, buffer in built.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    return built


def run(*words: object) -> None:
    """The verb, in this process."""
    assert convert.main([str(word) for word in words]) == 0


@contextlib.contextmanager
def loaded(load: str, flags: str):
    """On a rank: the model chunks of a checkpoint, as the arguments inside and `flags` lay them out."""
    words = f"--load {load} --use-checkpoint-args --micro-batch-size 1 --train-iters 1 --lr 1 --seed 99 {flags}"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            args = parse_args(words.split())
            load_args_from_checkpoint(args)
            validate_args(args, rank_and_world_size()[1])
            global_vars.set_args(args)
            global_vars.set_tokenizer(global_vars.build_tokenizer(args))
            groups = initialize_megatron(args)

            def provider(pre_process: bool = True, post_process: bool = True) -> torch.nn.Module:
                return gpt_builder(args, pre_process, post_process)

            model = get_model(provider, ModelType.encoder_or_decoder, args, groups, wrap_with_ddp=False)
            load_checkpoint(model, None, None)
            yield model
    finally:
        _forget_run()


@torch.no_grad()
def logits_of(load: str, tokens: torch.Tensor, flags: str) -> torch.Tensor:
    """On a rank: its columns of the logits, `[b, s, v/t]`."""
    with loaded(load, flags) as (model,):
        model.eval()
        return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens).contiguous(), None)


def save_again(load: str, save: str, flags: str) -> None:
    """On a rank: load a checkpoint under this layout, and save it."""
    with loaded(load, f"{flags} --save {save} --save-interval 1") as model:
        save_checkpoint(7, model, None, None, 0.0)


TOKENS = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", CASES)
def test_out_and_back_is_the_same_to_the_bit_and_the_logits_are_transformers(world, tmp_path, name):
    """A row that swaps two matrices of one shape comes back whole; the logits tell. A rounded number: the bits do."""
    theirs = build(name)
    theirs.save_pretrained(tmp_path / "hf")
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    run("--load-dir", tmp_path / "ours", "--save-dir", tmp_path / "back", "--hf-model-type", theirs.config.model_type)
    one, other = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

    with torch.no_grad():
        want = theirs(input_ids=TOKENS).logits
        again = type(theirs).from_pretrained(tmp_path / "back").eval()  # by the config.json that we wrote
        assert torch.equal(again(input_ids=TOKENS).logits, want)
    (ours,) = world(1).run(logits_of, str(tmp_path / "ours"), TOKENS, "")
    torch.testing.assert_close(ours[..., :VOCABULARY], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("change", ["gone", "more"])
def test_C111_an_expert_without_a_place_and_a_place_without_an_expert_are_errors(tmp_path, change):
    """C111: a converter that looks for the experts it knows leaves others random, or unread."""
    build("mixtral").save_pretrained(tmp_path / "hf")
    state = load_file(tmp_path / "hf/model.safetensors")
    names = [f"model.layers.1.block_sparse_moe.experts.{number}.w3.weight" for number in (3, 4)]
    if change == "gone":
        del state[names[0]]
    else:
        state[names[1]] = state[names[0]].clone()
    save_file(state, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(names[change == "more"])):
        run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    assert not (tmp_path / "ours/release").exists()


@pytest.mark.parametrize("name", ["gpt2", "llama3_tied_biases", "qwen2"])
def test_C118_C119_two_tensor_parallel_ranks_give_transformers_logits(world, tmp_path, name):
    """Row-parallel biases added twice, rows of a fused matrix cut across its parts: wrong at two ranks only."""
    theirs = build(name)
    theirs.save_pretrained(tmp_path / "hf")
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    parts = world(2).run(logits_of, str(tmp_path / "ours"), TOKENS, "--tensor-model-parallel-size 2")
    with torch.no_grad():
        want = theirs(input_ids=TOKENS).logits
    torch.testing.assert_close(torch.cat(parts, dim=-1)[..., :VOCABULARY], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_C118_a_checkpoint_saved_by_tp2_pp2_goes_out_to_the_same_bits(world, tmp_path, name):
    """Four ranks wrote its boxes, two of them each a half of [gate; up] and of the tied embedding."""
    build(name).save_pretrained(tmp_path / "hf")
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    world(4).run(
        save_again,
        str(tmp_path / "ours"),
        str(tmp_path / "again"),
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
    )
    assert len(list((tmp_path / "again/iter_0000007").glob("*.distcp"))) == 4
    run("--load-dir", tmp_path / "again", "--save-dir", tmp_path / "back")
    one, other = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_C117_the_padding_of_the_vocabulary_is_cut_anew_under_another_layout(world, tmp_path):
    """89 tokens have no row of padding at one rank and one at two; padded rows are zero and real ones are kept."""
    theirs = build("llama", vocab_size=89)
    theirs.save_pretrained(tmp_path / "hf")
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "wide", "--make-vocab-size-divisible-by", 64)
    tokens = TOKENS % 89
    with torch.no_grad():
        want = theirs(tokens).logits
    for folder, flags, columns in (("ours", "", 90), ("wide", "--make-vocab-size-divisible-by 5", 90)):
        words = f"--tensor-model-parallel-size 2 {flags}"
        joined = torch.cat(world(2).run(logits_of, str(tmp_path / folder), tokens, words), dim=-1)
        assert joined.shape[-1] == columns and not joined[..., 89:].any()
        torch.testing.assert_close(joined[..., :89], want, atol=1e-5, rtol=1e-5)


def test_C119_a_llama_shape_keeps_its_epsilon_heads_and_head(tmp_path):
    """4 heads, 2 of keys and values: rotary halves, epsilon and an untied head come from config.json."""
    theirs = build("llama", num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=3e-4)
    theirs.save_pretrained(tmp_path / "hf")
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    args = json.loads((tmp_path / "ours/release/args.json").read_text())
    wanted = {
        "norm_epsilon": 3e-4,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "group_query_attention": True,
        "untie_embeddings_and_output_weights": True,
        "rotary_interleaved": False,
        "swiglu": True,
        "add_bias_linear": False,
    }
    assert {name: args[name] for name in wanted} == wanted


def test_C120_a_tied_model_goes_out_without_missing_keys(tmp_path):
    theirs = build("qwen2")
    theirs.save_pretrained(tmp_path / "hf")
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    run("--load-dir", tmp_path / "ours", "--save-dir", tmp_path / "back")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(model.eval()(TOKENS).logits, theirs(TOKENS).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_stay_in_their_format_and_many_files_are_one_model(tmp_path, dtype):
    theirs = build("llama").to(dtype)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    assert (tmp_path / "hf/model.safetensors.index.json").is_file()
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    kinds = {facts.dtype for facts in sharded.saved_tensors(tmp_path / "ours/release").values()}
    assert kinds == {dtype}
    run("--load-dir", tmp_path / "ours", "--save-dir", tmp_path / "back", "--max-shard-size", 60e-6)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert again.dtype == dtype
    state = theirs.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())


def test_padding_of_the_vocabulary_comes_with_the_flag_and_goes_on_the_way_out(world, tmp_path):
    theirs = build("llama", vocab_size=89)
    theirs.save_pretrained(tmp_path / "hf")
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours", "--make-vocab-size-divisible-by", 64)
    shapes = sharded.saved_tensors(tmp_path / "ours/release")
    assert shapes["embedding.word_embeddings.weight"].shape == (128, 48) == shapes["output_layer.weight"].shape
    run("--load-dir", tmp_path / "ours", "--save-dir", tmp_path / "back")
    one, other = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert all(torch.equal(one[key], other[key]) for key in one) and one.keys() == other.keys()
    tokens = TOKENS % 89
    (ours,) = world(1).run(logits_of, str(tmp_path / "ours"), tokens, "")
    with torch.no_grad():
        torch.testing.assert_close(ours[..., :89], theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_the_body_of_gpt2_without_its_prefix_and_with_old_masks_is_read(tmp_path):
    """The hub's gpt2 is saved from GPT2Model, and holds causal masks as buffers."""
    theirs = build("gpt2")
    theirs.save_pretrained(tmp_path / "hf")
    state = {key.removeprefix("transformer."): value for key, value in theirs.transformer.state_dict().items()}
    state |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32) for layer in range(3)}
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "hf/model.safetensors")
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    run("--load-dir", tmp_path / "ours", "--save-dir", tmp_path / "back")
    again = load_file(tmp_path / "back/model.safetensors")
    assert all(torch.equal(again[f"transformer.{key}"], state[key]) for key in theirs.transformer.state_dict())


def test_a_pickled_model_is_read_without_running_code(tmp_path):
    theirs = build("llama")
    theirs.config.save_pretrained(tmp_path / "hf")
    torch.save(theirs.state_dict(), tmp_path / "hf/pytorch_model.bin")
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    run("--load-dir", tmp_path / "ours", "--save-dir", tmp_path / "back")
    again = load_file(tmp_path / "back/model.safetensors")
    assert all(torch.equal(again[key], value) for key, value in theirs.state_dict().items())


class _Hostile:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return Path.mkdir, (self.target,)


def test_a_hostile_pickle_ends_in_an_error(tmp_path):
    theirs = build("llama")
    theirs.config.save_pretrained(tmp_path / "hf")
    torch.save({"model.norm.weight": _Hostile(tmp_path / "owned")}, tmp_path / "hf/pytorch_model.bin")
    with pytest.raises(CheckpointError, match="never run|cannot read") as caught:
        run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    assert "never run" in caught.value.why
    assert not (tmp_path / "owned").exists() and not (tmp_path / "ours").exists()


def _tokenizer(folder: Path, words: int) -> None:
    """A tokenizer of numbers with an end of document, as transformers saves it."""
    vocabulary = {str(number): number for number in range(words - 1)} | {"</s>": words - 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


def test_the_tokenizer_beside_the_weights_is_the_models_and_goes_along(tmp_path):
    """It has fewer tokens than the embedding has rows, as many published models: no row may get lost."""
    build("llama").save_pretrained(tmp_path / "hf")
    _tokenizer(tmp_path / "hf", 90)
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    args = json.loads((tmp_path / "ours/release/args.json").read_text())
    assert (args["tokenizer_type"], args["vocab_size"]) == ("HuggingFaceTokenizer", VOCABULARY)
    run("--load-dir", tmp_path / "ours", "--save-dir", tmp_path / "back")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["vocab_size"] == VOCABULARY and config["eos_token_id"] == 89
    (tmp_path / "hf/tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="the tokenizer of the checkpoint cannot be read"):
        run("--load-dir", tmp_path / "ours", "--save-dir", tmp_path / "lost")


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path):
    build("llama").save_pretrained(tmp_path / "hf")
    _tokenizer(tmp_path / "hf", VOCABULARY + 1)
    with pytest.raises(ConfigError, match="--vocab-size 96 is less than the tokenizer's 97"):
        run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")


# -- what does not fit ---------------------------------------------------------------------------------------------


def _changed(tmp_path: Path, change) -> Path:
    """A Llama folder whose tensors went through `change`."""
    build("llama").save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf/model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)
    return tmp_path / "hf"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda state: state.pop("model.layers.1.mlp.up_proj.weight"), "1 missing: model.layers.1.mlp.up_proj.weight"),
        (lambda state: state.update(extra=torch.ones(2)), "1 that nothing here reads: extra"),
        (
            lambda state: state.update({"model.norm.weight": torch.ones(47)}),
            r"model.norm.weight \[47\]",
        ),
        (
            lambda state: state.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(47, 48)}),
            r"k_proj.weight \[47, 48\]",
        ),
    ],
    ids=["unfilled", "unread", "shape", "view"],
)
def test_tensors_that_do_not_fit_are_an_error_before_anything_is_written(tmp_path, change, words):
    source = _changed(tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        run("--load-dir", source, "--save-dir", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_tied_head_that_is_another_matrix_is_an_error(tmp_path):
    source = _changed(tmp_path, lambda state: None)
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="lm_head.weight is not model.embed_tokens.weight"):
        run("--load-dir", source, "--save-dir", tmp_path / "ours")


def test_a_torn_file_is_an_error_that_names_it(tmp_path):
    source = _changed(tmp_path, lambda state: None)
    path = source / "model.safetensors"
    whole = path.read_bytes()
    for cut in (4, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            run("--load-dir", source, "--save-dir", tmp_path / "ours")


@pytest.mark.parametrize(
    "config, words",
    [
        ({"model_type": "qwen3_moe"}, "experts"),
        ({"model_type": "gemma"}, r"sqrt\(hidden\)"),
        ({"model_type": "nobody_knows"}, "known are gpt2, llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act = silu|'silu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "default, linear, llama3 and yarn"),
        ({"rope_scaling": _LLAMA3 | {"low_freq_factor": 2.0}}, "1, 4 and 8192"),
        ({"attention_bias": True}, "biases everywhere, nowhere"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "every llama model has it"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) and "model_type" in value else None,
)
def test_what_has_no_part_here_is_refused_by_name(tmp_path, config, words):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **_LLAMA, **config}))
    with pytest.raises(ConfigError) as caught:
        run("--load-dir", tmp_path, "--save-dir", tmp_path / "ours")
    assert re.search(words, str(caught.value)), caught.value


def test_a_runs_folder_is_no_place_for_a_converted_model_and_a_name_is_no_folder(tmp_path):
    """The tracker of the run would name the converted model from then on."""
    build("llama").save_pretrained(tmp_path / "hf")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("500")
    with pytest.raises(ConfigError, match="holds the checkpoints of a run, the latest of iteration 500"):
        run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "run")
    with pytest.raises(ConfigError, match="openai-community/gpt2 is no folder"):
        run("--load-dir", "openai-community/gpt2", "--save-dir", tmp_path / "ours")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours")
    with pytest.raises(ConfigError, match="full is not empty"):
        run("--load-dir", tmp_path / "ours", "--save-dir", tmp_path / "full")
    for flag, words in (("--target-tensor-parallel-size", "has no layout"), ("--saver", "in --load-dir says it")):
        with pytest.raises(ConfigError, match=words):
            run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "new", flag, "2")
    with pytest.raises(ConfigError, match="unknown: --seq-length 8"):
        run("--load-dir", tmp_path / "ours", "--save-dir", tmp_path / "back", "--seq-length", 8)


def test_a_checkpoint_that_no_family_computes_says_what_is_in_the_way():
    words = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8"
    words += " --micro-batch-size 1 --train-iters 1 --lr 1 --tokenizer-type NullTokenizer --vocab-size 15"
    args = parse_args([*words.split(), "--squared-relu"])
    validate_args(args, 1)
    args.padded_vocab_size = 16
    with pytest.raises(ConfigError, match="gpt2 comes closest") as caught:
        fitting_family(args_to_save(args))
    assert "squared_relu is True" in caught.value.what
    saved = args_to_save(args)
    with pytest.raises(ConfigError, match="no llama model"):
        FAMILIES["llama"].to_config(saved, Sizes.of(saved, 16))


# -- memory --------------------------------------------------------------------------------------------------------

_UNDER_LIMIT = """
import resource, sys
from pathlib import Path
from safetensors.torch import load_file
from megatron_lite.cli import convert, main
from megatron_lite.checkpointing.checkpoint import write_checkpoint
import megatron_lite.tokenizers.null, torch
source, work, allowed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
convert.main(["--load-dir", str(source.parent / "small"), "--save-dir", str(work / "warm")])
convert.main(["--load-dir", str(work / "warm"), "--save-dir", str(work / "warm_back")])
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + allowed, used + allowed))
try:
    load_file(source / "model.safetensors")
    sys.exit("the limit does not limit")
except Exception as error:
    print("whole:", type(error).__name__)
convert.main(["--load-dir", str(source), "--save-dir", str(work / "ours")])
convert.main(["--load-dir", str(work / "ours"), "--save-dir", str(work / "back")])
print("done")
"""


def _folder(path: Path, layers: int, hidden: int) -> int:
    """A Llama folder of random numbers, written as a stream. Returns: its bytes."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        state = transformers.LlamaForCausalLM(config).state_dict()
    state.pop("lm_head.weight")
    tensors = {name: SavedTensor(tuple(value.shape), torch.float32) for name, value in state.items()}
    generator = torch.Generator().manual_seed(0)
    write_folder(path, config.to_dict(), tensors, lambda name: torch.randn(tensors[name].shape, generator=generator))
    return (path / "model.safetensors").stat().st_size


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc are Linux's")
def test_a_model_four_times_as_large_as_the_memory_is_converted_both_ways(tmp_path):
    """Whoever keeps what was read or written, or maps whole files, runs out of address space here."""
    _folder(tmp_path / "small", 1, 32)
    size = _folder(tmp_path / "large", 12, 512)
    done = subprocess.run(
        [sys.executable, "-c", _UNDER_LIMIT, tmp_path / "large", tmp_path, str(size // 4)],
        capture_output=True,
        text=True,
        env=launch.environment(MALLOC_ARENA_MAX="1"),
        cwd=launch.ROOT,
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]
    one, other = HuggingFaceFolder(tmp_path / "large"), HuggingFaceFolder(tmp_path / "back")
    assert one.tensors == other.tensors
    assert all(torch.equal(one.read(name), other.read(name)) for name in list(one.tensors)[::17])


# -- the whole way -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_goes_on_from_a_converted_model_and_comes_back_to_transformers(tmp_path):
    """Convert, train two steps, write text, convert back: what transformers loads is the trained model."""
    theirs = build("llama")
    theirs.save_pretrained(tmp_path / "hf")
    run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ours", "--seq-length", 16)
    flags = "--use-checkpoint-args --finetune --mock-data --micro-batch-size 2 --global-batch-size 4 --train-iters 2"
    flags += " --lr 1e-3 --eval-iters 0 --log-interval 1 --num-workers 0 --save-interval 2"
    done = launch.run("--load", tmp_path / "ours", "--save", tmp_path / "run", *flags.split()).ok()
    first, _ = done.values("lm loss")
    assert abs(first - 4.6) < 1.5, "a model of random weights starts near ln 96"
    text = subprocess.run(
        [sys.executable, "-m", "megatron_lite", "generate", "--load", tmp_path / "run", "--prompt", "5 7 9"]
        + ["--num-tokens-to-generate", "4", "--greedy"],
        capture_output=True,
        text=True,
        env=launch.environment(),
        cwd=launch.ROOT,
    )
    assert text.returncode == 0, text.stderr
    run("--load-dir", tmp_path / "run", "--save-dir", tmp_path / "back")
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    moved = {name for name, value in trained.state_dict().items() if not torch.equal(value, theirs.state_dict()[name])}
    assert moved == set(theirs.state_dict())
    wanted = trained.generate(torch.tensor([[5, 7, 9]]), max_new_tokens=4, do_sample=False, eos_token_id=2)
    assert text.stdout.split() == [str(int(token)) for token in wanted[0]]
