"""`megatron-lite generate` for a Retro: what is written looks up its neighbours as it goes.

    tokens so far     0 ... 63 | 64 ... 127 | 128 ... 140        chunks as in training, counted from the beginning
    tokens so far     0 ... 63 | 64 ... 127 | 128 ... 140      chunks as in training, counted from the beginning
    neighbours        searched   searched     none yet         a chunk's are searched once, when its last token is there

Nothing of the run is kept between tokens but the neighbours, so a token costs a whole forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_lite.cli.generate import Generator
from megatron_lite.cli.loaded_model import LoadedModel
from megatron_lite.cli.retro_tasks import State
from megatron_lite.cli.sampling import Sampling, next_token
from megatron_lite.datasets.retro_dataset import retrieved, tokens_of
from megatron_lite.datasets.retro_project import RetroProject


def retro_generator(loaded: LoadedModel) -> RetroGenerator:
    """The model of a checkpoint with the database and the index of its project.

    Raises: DataError where the project is not there, or has no index.
    """
    args = loaded.args
    project = RetroProject.read(args.retro_project_dir)
    return RetroGenerator(
        loaded.model,
        loaded.tokenizer,
        args.seq_length,
        args.device,
        state=State(str(project.folder), project.settings),
        num_neighbors=args.retro_num_neighbors,
        num_retrieved_chunks=args.retro_num_retrieved_chunks,
        missing=args.retro_missing_chunks,
    )


@dataclass(frozen=True, kw_only=True)
class RetroGenerator(Generator):
    """A Generator that retrieves.

    Args:
        state: tokenizer, embedder, database and index of the project.
        num_neighbors, num_retrieved_chunks, missing: as in training.
    """

    state: State
    num_neighbors: int
    num_retrieved_chunks: int
    missing: str

    def neighbors_of(self, chunk: Sequence[int]) -> np.ndarray:
        """Tokens of a chunk -> those of its neighbours, int64 `[k, r]`."""
        db = self.state.db()
        vector = self.state.embedder.embed([self.state.text(chunk)])
        _, rows = self.state.index().search(vector, self.num_neighbors)
        return tokens_of(retrieved(rows[0], db, self.num_retrieved_chunks, self.missing), db)

    @torch.inference_mode()
    def tokens(self, prompt: Sequence[int], limit: int, sampling: Sampling, seed: int) -> Iterator[int]:
        """As Generator has it."""
        m, eod = self.state.chunk_length, self.tokenizer.eod
        end = min(len(prompt) + limit, self.context_length)
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        nothing = np.full((self.num_neighbors, self.num_retrieved_chunks * m), eod, np.int64)
        found: list[np.ndarray] = []
        while len(text) < end:
            while (len(found) + 1) * m <= len(text):
                found.append(self.neighbors_of(text[len(found) * m : (len(found) + 1) * m]))
            chunks = -(-len(text) // m)
            ids = torch.full((1, chunks * m), eod, device=self.device)
            ids[0, : len(text)] = torch.tensor(text)
            positions = torch.arange(chunks * m, device=self.device)[None]
            context = torch.from_numpy(np.concatenate([*found, nothing][:chunks])).to(self.device)
            logits = self.model(ids, positions, None, context_input_ids=context)
            token = next_token(logits[0, len(text) - 1, : self.tokenizer.vocab_size], sampling, generator)
            yield token
            if token == self.tokenizer.eod:
                return
            text.append(token)
