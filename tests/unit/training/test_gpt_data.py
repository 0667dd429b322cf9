"""The data flags of a GPT run reach the data sets, and do there what they say."""

import json

import pytest

from megatron_lite.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron_lite.datasets.fim_dataset import GPTFIMDataset
from megatron_lite.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron_lite.datasets.sft_dataset import SFTDataset
from megatron_lite.errors import DataError
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.gpt_data import gpt_dataset_class, gpt_dataset_config
from tests.unit.datasets.corpora import EOD, Words, numbered, write_corpus
from tests.unit.datasets.test_fim_dataset import SPECIAL, Letters
from tests.unit.datasets.test_sft_dataset import Chats, chat
from tests.unit.datasets.test_sft_dataset import write as write_chats
from tests.unit.training.test_rules import BASE


def line(flags: str) -> list[str]:
    words = {**BASE, "--seq-length": "8", "--max-position-embeddings": "8"}
    return [word for pair in words.items() for word in pair] + flags.split()


def dataset(flags: str, tokenizer=None):
    """The training set of a run with these flags."""
    args = validate_args(parse_args(line(flags)), 1)
    kind, config = gpt_dataset_class(args), gpt_dataset_config(args, tokenizer or Words())
    return BlendedMegatronDatasetBuilder(kind, [20, None, None], lambda: True, config).build()[0]


@pytest.fixture
def data(tmp_path):
    """The flags of a corpus."""
    return f"--data-path {write_corpus(tmp_path / 'c', numbered(9))} --split 1,0,0 --data-cache-path {tmp_path}/cache"


def test_masks_travel_only_where_they_say_something(data):
    assert "attention_mask" not in dataset(data)[0]
    assert "attention_mask" not in dataset(f"{data} --no-create-attention-mask-in-dataloader")[0]
    assert dataset(f"{data} --reset-attention-mask")[0]["attention_mask"].shape == (1, 8, 8)


def test_inter_document_masking_gives_boundaries_in_place_of_masks(data):
    sample = dataset(f"{data} --dataloader-inter-document-masking")[0]
    assert sample["cu_seqlens"].shape == (9,) and "attention_mask" not in sample


def test_ambiguous_pad_tokens_count_when_the_flag_says_so(data):
    for flag, masked in (("", False), ("--allow-ambiguous-pad-tokens", True)):
        built = dataset(f"{data} {flag}", Words(pad=EOD))
        assert any((built[i]["loss_mask"] == 0).any() for i in range(20)) == masked


def test_trusted_caches_must_be_there_and_may_stay_closed(data):
    with pytest.raises(DataError, match="index cache cannot be read"):
        dataset(f"{data} --dataloader-fast-cache-load")
    plain = dataset(data)
    quick = dataset(f"{data} --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap")
    assert quick[3]["tokens"].tolist() == plain[3]["tokens"].tolist()


def test_announced_counts_come_from_their_file(data, tmp_path):
    table = tmp_path / "counts.json"
    flags = f"{data} --per-dataset-sequences-path {table}"
    with pytest.raises(DataError, match="cannot be read"):
        dataset(flags)
    table.write_text("[1, 2]")
    with pytest.raises(DataError, match="no table of counts"):
        dataset(flags)
    table.write_text(json.dumps({str(tmp_path / "c"): [9, 10]}))
    assert len(dataset(flags)) >= 20
    table.write_text(json.dumps({str(tmp_path / "c"): [8, 10]}))
    with pytest.raises(DataError, match="were announced"):
        dataset(flags)


def test_conversations_are_read_with_sft(tmp_path):
    path = write_chats(tmp_path / "c.jsonl", [chat("10", "20")])
    flags = f"--sft --tokenizer-type SFTTokenizer --tokenizer-model x --data-path {path} --split 1,0,0"
    args = validate_args(parse_args(line(flags)), 1)
    assert gpt_dataset_class(args) is SFTDataset
    config = gpt_dataset_config(args, Chats())
    built = BlendedMegatronDatasetBuilder(SFTDataset, [20, None, None], lambda: True, config).build()[0]
    assert built[7]["labels"].tolist() == [0, 0, 20, 0, 0, 0, 0, 0]


def test_classes_follow_the_flags(data):
    assert type(dataset(data)) is GPTDataset
    assert type(dataset("--mock-data")) is MockGPTDataset
    flags = " ".join(f"--fim-{name}-token {word}" for name, word in SPECIAL.items())
    built = dataset(f"{data} --fim-data --fim-rate 1 --fim-spm-rate 0 {flags}", Letters())
    assert type(built) is GPTFIMDataset and Letters.vocab["<pre>"] in built[0]["tokens"]
