"""Several documents laid one after another in one sequence, without padding to one length ("thd": tokens, heads, size).

    tokens           | document 0 | document 1 |   document 2   |
    cu_seqlens       0            5            9                16

Attention stays inside a document. Context-parallel ranks each hold a share of every document (`context_parallel`); the
numbers here are those of the whole sequence on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_lite.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class Document(NamedTuple):
    """Tokens [begin, end) of a sequence, of which those from `begin` to `seen` may be attended to: then padding."""

    begin: int
    end: int
    seen: int


@dataclass
class PackedSeqParams:
    """Where documents lie. Field names are Megatron's.

    qkv_format: "thd".
    cu_seqlens_q, cu_seqlens_kv: int32 `[documents + 1]`, where each ends, from 0.
    cu_seqlens_q_padded, cu_seqlens_kv_padded: where each ends together with its padding: then these are the places,
        and `cu_seqlens_*` count tokens alone.
    max_seqlen_q, max_seqlen_kv: tokens of the longest; accepted as Megatron has them.
    local_cp_size, cp_group: another context-parallel group for this micro-batch alone: refused where set.
    """

    qkv_format: str | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    local_cp_size: int | None = None
    cp_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        self._documents: dict[str, tuple[Document, ...]] = {}

    def documents(self, of: str = "q") -> tuple[Document, ...]:
        """The documents of queries ("q"), or of keys and values ("kv"). Looks at the device once.

        Raises: ConfigError for another format, and for what is not a list of ends.
        """
        if of not in self._documents:
            self._documents[of] = self._read(of)
        return self._documents[of]

    def _read(self, of: str) -> tuple[Document, ...]:
        if self.qkv_format != "thd":
            raise ConfigError(
                f"packed_seq_params with qkv_format {self.qkv_format!r}",
                why="documents that are packed lie one after another: that is thd",
                fix="qkv_format='thd', or no packed_seq_params",
            )
        if self.local_cp_size is not None or self.cp_group is not None:
            raise ConfigError(
                "packed_seq_params with a context-parallel group of its own",
                why="the context-parallel size is one for all micro-batches",
                fix="local_cp_size=None, cp_group=None",
            )
        ends, places = getattr(self, f"cu_seqlens_{of}"), getattr(self, f"cu_seqlens_{of}_padded")
        if ends is None:
            raise ConfigError(f"packed_seq_params without cu_seqlens_{of}", fix="where each document ends, from 0")
        tokens = [int(end) for end in ends.tolist()]
        padded = tokens if places is None else [int(end) for end in places.tolist()]
        lengths = [b - a for a, b in zip(tokens, tokens[1:])]
        found = tuple(Document(a, b, a + n) for a, b, n in zip(padded, padded[1:], lengths))
        if padded[:1] != [0] or len(padded) != len(tokens) or any(not d.begin <= d.seen <= d.end for d in found):
            raise ConfigError(
                f"cu_seqlens_{of} {tokens}" + ("" if places is None else f" with cu_seqlens_{of}_padded {padded}"),
                why="they count from 0 upwards, and a document has room for its tokens",
                fix="one entry for each document's end, after a 0",
            )
        return tuple(document for document in found if document.end > document.begin)
