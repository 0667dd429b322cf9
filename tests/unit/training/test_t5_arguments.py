"""T5's flags: what follows from what, what is refused at the command line, and what a batch is."""

import numpy as np
import pytest
import torch

from megatron_lite.errors import ConfigError
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.derived import tokens_per_sample
from megatron_lite.training.families import defaults_of
from megatron_lite.training.t5_data import get_t5_batch
from tests.e2e.launch import ROOT

BASE = """--encoder-num-layers 4 --hidden-size 32 --num-attention-heads 4
    --encoder-seq-length 32 --decoder-seq-length 16 --max-position-embeddings 32 --vocab-extra-ids 100
    --vocab-file vocab.txt --data-path corpus --micro-batch-size 1 --train-iters 10 --lr 1e-3"""


def resolve(words: str = "", base: str = BASE, world_size: int = 8, family: str = "t5"):
    args = parse_args([*base.split(), *words.split()], args_defaults=defaults_of(family))
    return validate_args(args, world_size)


def test_the_decoder_is_as_deep_as_the_encoder_unless_it_is_said():
    args = resolve()
    assert args.num_layers == args.encoder_num_layers == args.decoder_num_layers == 4
    assert args.seq_length == args.encoder_seq_length == 32 and tokens_per_sample(args) == 48
    assert args.tokenizer_type == "BertWordPieceLowerCase" and args.mask_prob == 0.15
    assert resolve("--decoder-num-layers 2").decoder_num_layers == 2


def test_virtual_stages_count_the_layers_of_both_stacks():
    args = resolve("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 8")
    assert args.virtual_pipeline_model_parallel_size == 2
    assert resolve("--pipeline-model-parallel-size 4 --pipeline-model-parallel-split-rank 3", BASE.replace(
        "--encoder-num-layers 4", "--encoder-num-layers 3 --decoder-num-layers 5"
    )).pipeline_model_parallel_split_rank == 3  # fmt: skip


WRONG = {
    "--vocab-extra-ids 0": "--vocab-extra-ids 100",
    "--decoder-seq-length 2": "--decoder-seq-length 2",
    "--decoder-seq-length 64": "--max-position-embeddings 64",
    "--decoder-seq-length 15 --tensor-model-parallel-size 2 --sequence-parallel": "--decoder-seq-length 14 or 16",
    "--group-query-attention --num-query-groups 2": "a key/value head for every query head",
    "--window-size 4,0": "no common positions",
    "--position-embedding-type none": "learned_absolute, rope or relative",
    "--position-embedding-type relative --attention-backend flash": "--attention-backend auto",
    "--position-embedding-type relative --context-parallel-size 2": "--position-embedding-type rope",
    "--decoder-seq-length 14 --context-parallel-size 2": "--decoder-seq-length 12 or 16",
    "--pipeline-model-parallel-size 3": "8 do not divide by 3",
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-split-rank 2": "1 to 1",
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttL": "it holds 4 t",
    "--mtp-num-layers 1": "--mtp-num-layers 1",
    "--decoder-num-layers 0": "--decoder-num-layers 0",
}


@pytest.mark.parametrize("words", WRONG)
def test_c126_what_a_t5_cannot_be_is_told_at_the_command_line(words):
    with pytest.raises(ConfigError, match=WRONG[words].replace("|", r"\|")):
        resolve(words, world_size=6 if "size 3" in words else 8)


def test_the_decoders_length_is_asked_for():
    with pytest.raises(ConfigError, match="--decoder-seq-length is missing"):
        resolve(base=BASE.replace("--decoder-seq-length 16", ""))


GPT = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --micro-batch-size 1 --train-iters 10 --lr 1e-3
    --pipeline-model-parallel-size 2"""


def test_one_stack_has_no_split_and_no_relative_positions():
    """Except for the values that say nothing."""
    for value in (0, 2):
        resolve(f"--pipeline-model-parallel-split-rank {value}", GPT, family="gpt")
    with pytest.raises(ConfigError, match="this model is one stack"):
        resolve("--pipeline-model-parallel-split-rank 1", GPT, family="gpt")
    with pytest.raises(ConfigError, match="pretrain_t5.py"):
        resolve("--position-embedding-type relative", GPT, family="gpt")


def test_c125_labels_of_a_batch_are_in_the_vocabulary_and_padding_has_weight_0():
    sample = {
        "text_enc": np.array([[5, 8, 6, 0]]),
        "enc_mask": np.array([[1, 1, 1, 0]]),
        "text_dec": np.array([[3, 8, 7, 0]]),
        "labels": np.array([[8, 7, 4, -1]]),
        "loss_mask": np.array([[1, 1, 1, 0]]),
        "dec_mask": np.array([[1, 1, 1, 0]]),
        "truncated": np.array([0]),
    }
    rows = iter([{name: torch.from_numpy(value) for name, value in sample.items()}])
    batch = get_t5_batch(rows, torch.device("cpu"), 9)
    assert batch.labels.tolist() == [[8, 7, 4, 0]] and batch.loss_mask.tolist() == [[1.0, 1.0, 1.0, 0.0]]
    assert batch.padding.shape == (1, 1, 1, 4) and batch.padding.flatten().tolist() == [False, False, False, True]


def test_the_quickstarts_config_is_a_run():
    """`configs/t5_small.yaml` with data and vocabulary, as `make train MODEL=t5` gives them."""
    words = ["--config", str(ROOT / "configs/t5_small.yaml"), "--data-path", "corpus", "--vocab-file", "vocab.txt"]
    args = validate_args(parse_args(words, args_defaults=defaults_of("t5")), 1)
    assert (args.num_layers, args.decoder_num_layers) == (4, 3)
    assert args.tokenizer_type == "BertWordPieceCase" and args.vocab_extra_ids == 100
