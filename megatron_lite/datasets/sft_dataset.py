"""Fine-tuning on conversations: a record of chat messages becomes a sample whose loss counts on the answers.

    a line of the file    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
    conversations         a system message begins one; those of a record are packed into one sample
    tokens      [s]       | conversation 0 | conversation 1 |  padding  |
    loss_mask   [s]       |      111       |   11    11     |           |    where the next token belongs to an answer
    cu_seqlens            0                a                b ... s          attention and positions stay inside

What does not fit into `sequence_length` is cut off on the right; a sample that keeps no answer trains nothing, which is
said when the first one is read. Records are read in the order of the file.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from megatron_lite.datasets.gpt_dataset import GPTDatasetConfig, document_boundaries
from megatron_lite.datasets.megatron_dataset import MegatronDataset
from megatron_lite.datasets.utils import Split
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.log import warn_rank_0

IGNORE_INDEX = -100  # as the tokenizer marks what is not trained
_KEYS = ("messages", "conversations")
_CHUNK_BYTES = 1 << 24
_SHORTEST_RECORD = len('{"messages":[]}')


class SFTLowLevelDataset:
    """A file of JSON lines: item i is the list of messages of its record i. Empty lines are no records.

    Pickling keeps the path alone.

    Raises: DataError if the file cannot be read; for an item if its line is no conversation.
    """

    def __init__(self, path: str):
        self.path = path
        self._open()

    def _open(self) -> None:
        try:
            self._bytes: np.ndarray = np.memmap(self.path, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise DataError(
                f"cannot read the conversations {self.path}: {getattr(error, 'strerror', None) or error}",
                why="with --sft a data path is a file of JSON lines",
                fix="--data-path FILE.jsonl",
            ) from error
        ends = [
            begin + np.flatnonzero(self._bytes[begin : begin + _CHUNK_BYTES] == ord("\n"))
            for begin in range(0, len(self._bytes), _CHUNK_BYTES)
        ]
        stops = np.concatenate([*ends, [len(self._bytes)]]).astype(np.int64)
        starts = np.concatenate([[0], stops[:-1] + 1])
        # Only short lines are looked at: a record of messages is longer than this.
        numbers = [
            i
            for i, size in enumerate((stops - starts).tolist())
            if size > _SHORTEST_RECORD or self._bytes[starts[i] : stops[i]].tobytes().strip()
        ]
        self._starts, self._stops, self._lines = starts[numbers], stops[numbers], np.array(numbers, np.int64) + 1

    def __getstate__(self) -> str:
        return self.path

    def __setstate__(self, state: str) -> None:
        self.path = state
        self._open()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, idx: int) -> list[dict[str, Any]]:
        line = self._bytes[self._starts[idx] : self._stops[idx]].tobytes()
        try:
            record = json.loads(line)
            messages = next(record[key] for key in _KEYS if key in record)
            if not (messages and all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages)):
                raise ValueError("a message has a role and a content, both text")
        except StopIteration:
            raise self._bad(idx, f"it has neither {' nor '.join(_KEYS)}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise self._bad(idx, f"{type(error).__name__}: {error}") from None
        return messages

    def _bad(self, idx: int, why: str) -> DataError:
        return DataError(
            f"{self.path}, line {self._lines[idx]} is no conversation",
            why=why,
            fix='{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
        )


class SFTDataset(MegatronDataset):
    """One split of a file of conversations. Item i, of record i modulo their number, is a dictionary of numpy arrays:

    - `tokens`, `labels`, `position_ids`: int64 `[s]`; positions restart with each conversation
    - `loss_mask`: float32 `[s]`, 1 where the label is part of an answer
    - `cu_seqlens`: int32 `[s + 1]`, `max_seqlen`: int32, as GPTDataset has them; padding belongs to the last one

    Item None is a filler for the last batch: item 0 without loss.

    Args: as GPTDataset; `config.tokenizer` offers `tokenize_conversation`.
    Raises: DataError if samples are asked for and there is no record.
    """

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ):
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        if not hasattr(config.tokenizer, "tokenize_conversation"):
            raise ConfigError(
                f"{type(config.tokenizer).__name__} reads no conversations", fix="--tokenizer-type SFTTokenizer"
            )
        if num_samples and not len(indices):
            raise DataError(
                f"the {index_split.name} split of {dataset_path} has no conversations, {num_samples} samples were "
                "asked for",
                why=f"0 of {len(dataset)} records belong to it (--split {config.split})",
                fix="give this split a larger share, or ask for no samples of it",
            )
        self._length = len(indices) if num_samples is None else num_samples
        self._said = False

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> SFTLowLevelDataset:
        assert dataset_path is not None
        return SFTLowLevelDataset(dataset_path)

    @staticmethod
    def num_tokens(low_level_dataset: Any, indices: np.ndarray) -> int:
        """Records, each of which has tokens: how many is known when they are read."""
        return len(indices)

    def __len__(self) -> int:
        return self._length

    def origin(self, idx: int) -> str:
        """For people: which record item `idx` is."""
        return f"record {int(self.indices[idx % len(self.indices)])} of {self.dataset_path}"

    def __getitem__(self, idx: int | None) -> dict[str, np.ndarray]:
        s = self.config.sequence_length
        number = 0 if idx is None else int(idx)
        if not 0 <= number < self._length:
            raise IndexError(f"sample {idx} of {self._length} of {self.dataset_path}")
        record = int(self.indices[number % len(self.indices)])
        messages = self.dataset[record]
        tokens = np.full(s + 1, self._filler(), np.int64)
        targets = np.full(s + 1, IGNORE_INDEX, np.int64)
        filled, lengths = 0, []
        for conversation in conversations_of(messages):
            ids, trained = self.config.tokenizer.tokenize_conversation(
                conversation, return_target=True, add_generation_prompt=False
            )
            room = min(len(ids), s + 1 - filled)
            tokens[filled : filled + room] = ids[:room]
            # Nothing inside a conversation predicts its first token.
            targets[filled + 1 : filled + room] = trained[1:room]
            filled += room
            lengths.append(room)
        labels = targets[1:]
        loss_mask = (labels != IGNORE_INDEX).astype(np.float32)
        if not self._said and not loss_mask.any():
            self._said = True
            warn_rank_0(
                f"record {record + 1} of {self.dataset_path} has no answer in its first {s} tokens: it is read without "
                "loss, as are others like it (--seq-length, or the file, may be wrong)"
            )
        if idx is None:
            loss_mask[:] = 0.0
        starts, cu_seqlens, max_seqlen = document_boundaries(lengths, s)
        return {
            "tokens": tokens[:-1].copy(),
            "labels": np.where(labels == IGNORE_INDEX, 0, labels),
            "loss_mask": loss_mask,
            "position_ids": np.arange(s) - starts,
            "cu_seqlens": cu_seqlens,
            "max_seqlen": max_seqlen,
        }

    def _filler(self) -> int:
        pad: int = self.config.tokenizer.pad
        return max(pad, 0)


def conversations_of(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The conversations of a record: each but the first begins with a system message."""
    parts: list[list[dict[str, Any]]] = []
    for message in messages:
        if not parts or message["role"] == "system":
            parts.append([])
        parts[-1].append(message)
    return parts
