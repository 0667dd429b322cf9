"""What the datasets of a run are made of, as a table for the start of its log.

    split  dataset                  weight  samples    tokens     epochs  tokens an epoch
    train  data/web_text_document  0.69999     7007   7175168  1.20 of 2          5979201
    train  data/wiki_text_document 0.30001     3002   3074048  0.31 of 1          9902811

`epochs` is how often the corpus is gone through by these samples, of how many its index holds.
"""

from collections.abc import Sequence

from megatron_lite.datasets.blended_dataset import BlendedDataset
from megatron_lite.datasets.megatron_dataset import MegatronDataset
from megatron_lite.datasets.utils import Split

TopLevelDataset = BlendedDataset | MegatronDataset | list[MegatronDataset] | None

_HEADER = ("split", "dataset", "weight", "samples", "tokens", "epochs", "tokens an epoch")
_TEXT = 2  # columns from the left that hold words; the others hold numbers, which end in line


def mids_of(top: TopLevelDataset) -> list[MegatronDataset]:
    """The mid-level datasets below a top-level one."""
    if top is None:
        return []
    if isinstance(top, BlendedDataset):
        return top.datasets
    return top if isinstance(top, list) else [top]


def dataset_table(tops: Sequence[TopLevelDataset], sequence_length: int) -> list[str]:
    """The lines of the table, its header first. `tops` are those of train, valid and test."""
    rows = [_HEADER]
    for split, top in zip(Split, tops):
        mids = mids_of(top)
        samples = top.samples_per_dataset() if isinstance(top, BlendedDataset) else [len(mid) for mid in mids]
        weights = [f"{weight:g}" for weight in top.weights] if isinstance(top, BlendedDataset) else ["-"] * len(mids)
        for mid, number, weight in zip(mids, samples, weights, strict=True):
            tokens, epoch = number * sequence_length, getattr(mid, "tokens_per_epoch", None)
            drawn = f"{tokens / epoch:.2f} of {mid.num_epochs}" if epoch else "-"  # type: ignore[attr-defined]
            name = mid.dataset_path or "mock data"
            rows.append((split.name, name, weight, str(number), str(tokens), drawn, str(epoch) if epoch else "-"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(_padded(cell, width, at) for at, (cell, width) in enumerate(zip(row, widths))) for row in rows]


def _padded(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < _TEXT else cell.rjust(width)
