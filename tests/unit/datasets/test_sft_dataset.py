"""Conversations to samples: packed, cut, padded; loss on answers; nothing crosses from one to the next."""

import json
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lite.datasets.sft_dataset import SFTDataset, SFTLowLevelDataset, conversations_of
from megatron_lite.errors import ConfigError, DataError
from tests.unit.datasets.corpora import Words, build

PAD = 9


class Chats(Words):
    """Each message is its numbers after the number of its role; answers are trained without that number."""

    unique_identifiers = OrderedDict([("class", "Chats")])
    pad = PAD
    roles = {"system": 1, "user": 2, "assistant": 3}

    def __init__(self):
        pass

    def tokenize_conversation(self, conversation, return_target, add_generation_prompt):
        assert return_target and not add_generation_prompt
        tokens, targets = [], []
        for message in conversation:
            ids = [int(word) for word in message["content"].split()]
            tokens += [self.roles[message["role"]], *ids]
            targets += [-100, *(ids if message["role"] == "assistant" else [-100] * len(ids))]
        return np.array(tokens, np.int64), np.array(targets, np.int64)


def chat(*contents):
    """Messages of user and assistant in turns, a system message first where the first content is marked."""
    messages = []
    if contents[0].startswith("!"):
        messages.append({"role": "system", "content": contents[0][1:]})
        contents = contents[1:]
    return messages + [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def write(path, records, key="messages") -> str:
    path.write_text("".join(json.dumps({key: record}) + "\n" for record in records))
    return str(path)


def samples(path, size=None, **options):
    return build(([path], None), (size, None, None), cls=SFTDataset, tokenizer=Chats(), **options)[0]


def test_answers_are_trained_and_the_rest_is_read(tmp_path):
    dataset = samples(write(tmp_path / "c.jsonl", [chat("10 11", "20 21 22")]), sequence_length=10)
    sample = dataset[0]
    assert sample["tokens"].tolist() == [2, 10, 11, 3, 20, 21, 22, PAD, PAD, PAD]
    assert sample["labels"].tolist() == [0, 0, 0, 20, 21, 22, 0, 0, 0, 0]
    assert sample["loss_mask"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert sample["position_ids"].tolist() == list(range(10))
    assert sample["cu_seqlens"].tolist() == [0] + [10] * 10 and sample["max_seqlen"] == 10
    assert not dataset[None]["loss_mask"].any()


def test_conversations_of_a_record_are_packed_and_kept_apart(tmp_path):
    record = [*chat("!40", "10", "20"), *chat("!41", "11", "21")]
    sample = samples(write(tmp_path / "c.jsonl", [record]), sequence_length=14)[0]
    assert sample["tokens"].tolist() == [1, 40, 2, 10, 3, 20, 1, 41, 2, 11, 3, 21, PAD, PAD]
    assert np.flatnonzero(sample["loss_mask"]).tolist() == [4, 10]
    assert sample["position_ids"].tolist() == [0, 1, 2, 3, 4, 5, *range(8)]
    assert sample["cu_seqlens"].tolist()[:3] == [0, 6, 14] and sample["max_seqlen"] == 8


def test_no_conversation_predicts_the_next_one(tmp_path):
    """Also where everything is trained, and where a conversation begins with an answer."""
    record = [*chat("!40", "10"), {"role": "system", "content": ""}, {"role": "assistant", "content": "21"}]

    class Everything(Chats):
        def tokenize_conversation(self, *args, **kwargs):
            tokens, _ = super().tokenize_conversation(*args, **kwargs)
            return tokens, tokens.copy()

    path = write(tmp_path / "c.jsonl", [record])
    sample = build(([path], None), cls=SFTDataset, tokenizer=Everything(), sequence_length=8)[0][0]
    assert sample["tokens"].tolist() == [1, 40, 2, 10, 1, 3, 21, PAD]
    assert sample["loss_mask"].tolist() == [1, 1, 1, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("s", range(1, 14))
def test_what_does_not_fit_is_cut_on_the_right(tmp_path, s):
    record = [*chat("!40", "10", "20"), *chat("!41", "11", "21")]
    path = write(tmp_path / "c.jsonl", [record])
    whole, cut = samples(path, sequence_length=14)[0], samples(path, sequence_length=s)[0]
    for field in ("tokens", "labels", "loss_mask", "position_ids"):
        np.testing.assert_array_equal(cut[field], whole[field][:s], err_msg=field)
    assert cut["cu_seqlens"].tolist() == [min(int(end), s) for end in whole["cu_seqlens"][: s + 1]]


def test_a_sample_without_an_answer_is_said_once(tmp_path, capsys):
    path = write(tmp_path / "c.jsonl", [chat("10", "20"), chat("10 11 12 13", "20"), chat("10 11 12 13", "20")])
    dataset = samples(path, sequence_length=4)
    assert dataset[0]["loss_mask"].any() and "no answer" not in capsys.readouterr().out
    assert not any(dataset[i]["loss_mask"].any() for i in (1, 2))
    said = capsys.readouterr()
    (line,) = [line for line in (said.out + said.err).splitlines() if "no answer" in line]
    assert f"record 2 of {path} has no answer in its first 4 tokens" in line


def test_records_come_in_order_again_and_again_and_are_split(tmp_path):
    path = write(tmp_path / "c.jsonl", [chat(str(10 + i), "20") for i in range(10)])
    train, valid, _ = build(
        ([path], None), (20, 4, None), cls=SFTDataset, tokenizer=Chats(), sequence_length=8, split="80,20,0"
    )
    assert [int(train[i]["tokens"][1]) for i in range(20)] == [10 + i % 8 for i in range(20)]
    assert [int(valid[i]["tokens"][1]) for i in range(4)] == [18, 19, 18, 19]
    with pytest.raises(IndexError):
        train[20]


def test_loader_and_blend_take_it(tmp_path):
    paths = [write(tmp_path / f"{i}.jsonl", [chat(str(10 + i), "20")] * 3) for i in range(2)]
    blend = build((paths, [1.0, 1.0]), (8, None, None), cls=SFTDataset, tokenizer=Chats(), sequence_length=8)[0]
    batch = next(iter(DataLoader(blend, batch_size=4)))
    assert batch["tokens"].shape == (4, 8) and batch["cu_seqlens"].dtype == torch.int32
    assert batch["tokens"][:, 1].tolist() == [10, 11, 10, 11]


def test_file_is_indexed_line_by_line(tmp_path):
    path = tmp_path / "c.jsonl"
    lines = [json.dumps({"conversations": chat("10", "2" * n)}) for n in (1, 200, 3)]
    path.write_bytes(("\n" + lines[0] + "\r\n\n  \n" + lines[1] + "\n" + lines[2]).encode())
    low = pickle.loads(pickle.dumps(SFTLowLevelDataset(str(path))))
    assert len(low) == 3 and [len(low[i][1]["content"]) for i in range(3)] == [1, 200, 3]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "JSONDecodeError"),
        ('{"text": "x"}', "neither messages nor conversations"),
        ('{"messages": []}', "a role and a content"),
        ('{"messages": [{"role": "user"}]}', "content"),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', "both text"),
        ('{"messages": 3}', "TypeError"),
        ("[1]", "neither"),
    ],
)
def test_bad_line_is_named_with_its_number(tmp_path, line, why):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": chat("10", "20")}) + "\n" + line + "\n")
    dataset = samples(str(path), sequence_length=8)
    with pytest.raises(DataError, match="c.jsonl, line 2") as error:
        dataset[1]
    assert why in error.value.why


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read the conversations"):
        samples(str(tmp_path / "nothere.jsonl"))
    path = write(tmp_path / "c.jsonl", [chat("10", "20")])
    with pytest.raises(ConfigError, match="Words reads no conversations"):
        build(([path], None), cls=SFTDataset)
    with pytest.raises(DataError, match="valid split of .* has no conversations, 5 samples"):
        build(([path], None), (1, 5, None), cls=SFTDataset, tokenizer=Chats(), split="80,20,0")


def test_conversations_begin_with_a_system_message():
    record = [*chat("!1", "2", "3"), *chat("!4", "5")]
    assert [len(part) for part in conversations_of(record)] == [3, 2]
    assert conversations_of(chat("1", "2")) == [chat("1", "2")]
