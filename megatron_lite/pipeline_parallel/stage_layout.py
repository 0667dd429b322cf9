"""Which layers each pipeline stage holds, and in which of its chunks. Pure, no torch.

    8 layers, 2 stages of 2 chunks        stage 0   chunk 0: embedding, layers 0 1     chunk 1: layers 4 5
    (the model runs down the columns)     stage 1   chunk 0: layers 2 3                chunk 1: layers 6 7, loss

Ways to place them: evenly; with other numbers for the first and the last stage; with the embedding or the loss counted
as a layer, because they cost about as much; or by a string:

    Ett|(tt|)*2,tL      E embedding, t layer, m multi-token prediction, L loss, | end of a chunk,
                        x*n and (...)*n repeat, commas separate nothing and may stand for the eye

Chunks of the string fill the stages in order: chunk i is on stage i mod p, as its chunk i div p.

An encoder and the decoder behind it are placed as one row of layers (`encoder_decoder_layout`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from megatron_lite.errors import ConfigError


@dataclass(frozen=True)
class Cell:
    """One chunk of one stage. layers: global numbers, counted from 0. With an encoder beside them: the decoder's."""

    layers: range
    embedding: bool = False
    loss: bool = False
    mtp: int = 0
    encoder: range | None = None

    def __str__(self) -> str:
        parts = ["embedding"] if self.embedding else []
        stacks = [("", self.layers)]
        if self.encoder is not None:
            stacks = [("encoder ", self.encoder), ("decoder ", self.layers)]
        for stack, held in stacks:
            if held:
                parts.append(stack + (f"layers {held[0]} to {held[-1]}" if len(held) > 1 else f"layer {held[0]}"))
        parts += [f"{self.mtp} prediction modules"] if self.mtp else []
        parts += ["loss"] if self.loss else []
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class StageLayout:
    """Every chunk of every stage: `cells[chunk][stage]`."""

    cells: tuple[tuple[Cell, ...], ...]

    def cell(self, stage: int, chunk: int | None = None) -> Cell:
        """What a stage's chunk holds; None = its only one."""
        return self.cells[chunk or 0][stage]

    def describe(self, stage: int) -> str:
        """One line for the start-up output."""
        held = [str(row[stage]) for row in self.cells]
        return held[0] if len(held) == 1 else "; ".join(f"chunk {v}: {text}" for v, text in enumerate(held))


def stage_layout(
    num_layers: int,
    stages: int,
    chunks: int = 1,
    first: int | None = None,
    last: int | None = None,
    count_embedding: bool = False,
    count_loss: bool = False,
    layout: str | None = None,
    mtp_layers: int = 0,
) -> StageLayout:
    """Place the layers.

    Args:
        first, last: layers of the first and of the last stage, over all their chunks; the others share the rest.
        count_embedding, count_loss: the stage that holds them takes a layer less.
        layout: a string as above; excludes the others.
        mtp_layers: modules for multi-token prediction, with the loss unless the layout says where.
    Raises: ConfigError where the numbers do not come out even, naming the flags.
    """
    if layout is not None:
        if first is not None or last is not None or count_embedding or count_loss:
            raise ConfigError(
                f"--pipeline-model-parallel-layout {layout!r} with another way to place layers",
                why="the string says where every layer goes",
                fix="leave out --decoder-first/last-pipeline-num-layers and --account-for-*-in-pipeline-split",
            )
        return _from_string(layout, num_layers, stages, chunks, mtp_layers)
    if (first is not None or last is not None) and (count_embedding or count_loss):
        raise ConfigError(
            "--decoder-first/last-pipeline-num-layers with --account-for-*-in-pipeline-split",
            why="both say how many layers the end stages hold",
            fix="one of the two",
        )
    if first is not None or last is not None:
        per_stage = _with_ends(num_layers, stages, chunks, first, last)
    else:
        per_stage = _even(num_layers, stages, chunks, count_embedding, count_loss)
    counts = [[count] * chunks for count in per_stage]
    if count_embedding:
        counts[0][0] -= 1
    if count_loss:
        counts[-1][-1] -= 1
    return _fill([[counts[stage][chunk] for stage in range(stages)] for chunk in range(chunks)], mtp_layers)


def encoder_decoder_layout(
    encoder_layers: int,
    decoder_layers: int,
    stages: int,
    chunks: int = 1,
    split: int | None = None,
    layout: str | None = None,
    **ends: Any,
) -> StageLayout:
    """Place an encoder and the decoder behind it. Both are one row of layers, which may be cut anywhere.

    Args:
        split: the first stage of the decoder; each side divides its layers evenly over its stages. None: the row is
            divided like a single stack, by the other arguments of `stage_layout`. In a layout string every t is a
            layer, the encoder's come first.
    Raises: ConfigError as `stage_layout`.
    """
    if split is not None:
        _check_split(encoder_layers, decoder_layers, stages, chunks, split, layout is not None or any(ends.values()))
        sides = [encoder_layers // split] * split + [decoder_layers // (stages - split)] * (stages - split)
        placed = _fill([sides], 0)
    else:
        placed = stage_layout(encoder_layers + decoder_layers, stages, chunks, layout=layout, **ends)

    def sides_of(cell: Cell) -> Cell:
        first, end = cell.layers.start, cell.layers.stop
        encoder = range(min(first, encoder_layers), min(end, encoder_layers))
        return replace(
            cell,
            encoder=encoder,
            layers=range(max(first - encoder_layers, 0), max(end - encoder_layers, 0)),
        )

    return StageLayout(tuple(tuple(map(sides_of, row)) for row in placed.cells))


def _check_split(
    encoder_layers: int, decoder_layers: int, stages: int, chunks: int, split: int, placed_otherwise: bool
) -> None:
    name = f"--pipeline-model-parallel-split-rank {split}"
    if placed_otherwise or chunks > 1:
        raise ConfigError(
            f"{name} with " + ("another way to place layers" if placed_otherwise else f"{chunks} chunks on a stage"),
            why="it divides encoder and decoder evenly over the stages before it and from it on, one chunk each",
            fix="leave it out, or place every layer with --pipeline-model-parallel-layout",
        )
    if not 0 < split < stages:
        raise ConfigError(
            f"{name} with {stages} pipeline stages",
            why="it is the first stage of the decoder, and the encoder needs stages before it",
            fix=f"1 to {stages - 1}" if stages > 1 else "--pipeline-model-parallel-size 2 or more",
        )
    for side, layers, many in (("encoder", encoder_layers, split), ("decoder", decoder_layers, stages - split)):
        if layers % many:
            raise ConfigError(
                f"{name}: {layers} {side} layers over {many} of {stages} stages",
                why=f"{layers} do not divide by {many}",
                fix="another stage, another number of layers, or --pipeline-model-parallel-layout",
            )


def _even(num_layers: int, stages: int, chunks: int, count_embedding: bool, count_loss: bool) -> list[int]:
    """Places of each chunk, per stage."""
    places = num_layers + count_embedding + count_loss
    per_chunk, rest = divmod(places, stages * chunks)
    if rest:
        extra = [flag for flag, given in (("embedding", count_embedding), ("loss", count_loss)) if given]
        counted = f" and {' and '.join(extra)}" if extra else ""
        up = -(-places // (stages * chunks)) * stages * chunks - len(extra)
        down = places // (stages * chunks) * stages * chunks - len(extra)
        raise ConfigError(
            f"--num-layers {num_layers}{counted} over {stages} stages" + (f" of {chunks} chunks" if chunks > 1 else ""),
            why=f"{places} do not divide by {stages * chunks}, and no layer may be left out",
            fix=f"--num-layers {down or up} or {up}, or place them with --decoder-first-pipeline-num-layers, "
            "--decoder-last-pipeline-num-layers or --pipeline-model-parallel-layout",
        )
    return [per_chunk] * stages


def _with_ends(num_layers: int, stages: int, chunks: int, first: int | None, last: int | None) -> list[int]:
    """Layers of each chunk, per stage, with given end stages."""
    if stages == 1:
        raise ConfigError(
            "--decoder-first/last-pipeline-num-layers with one pipeline stage",
            why="the only stage holds all layers",
            fix="leave it out, or --pipeline-model-parallel-size 2 or more",
        )
    ends = {0: first, stages - 1: last}
    for stage, count in ends.items():
        if count is not None and (count < 0 or count % chunks):
            raise ConfigError(
                f"{count} layers on stage {stage} of {chunks} chunks",
                why="each chunk of a stage holds as many layers",
                fix=f"a multiple of {chunks}",
            )
    given = {stage: count for stage, count in ends.items() if count is not None}
    middle, rest = num_layers - sum(given.values()), stages - len(given)
    if middle < 0 or (rest == 0 and middle) or (rest and middle % (rest * chunks)):
        over = f"{rest} other stages" + (f" of {chunks} chunks" if chunks > 1 else "")
        raise ConfigError(
            f"--num-layers {num_layers} with {given} layers on stages given by number",
            why=f"{middle} layers are left for {over}" + ("" if rest else ", where there is no place"),
            fix="other numbers on the end stages, or --pipeline-model-parallel-layout",
        )
    return [given.get(stage, middle // rest if rest else 0) // chunks for stage in range(stages)]


def _fill(counts: list[list[int]], mtp_layers: int) -> StageLayout:
    """`counts[chunk][stage]` layers, numbered in the order in which the model runs."""
    cells, begin = [], 0
    for chunk, row in enumerate(counts):
        line = []
        for stage, count in enumerate(row):
            if count < 0:
                raise ConfigError(
                    f"stage {stage} has no room for what it must hold",
                    why="an embedding or loss counts as a layer and there are too few layers",
                    fix="fewer stages or chunks",
                )
            final = (chunk, stage) == (len(counts) - 1, len(row) - 1)
            held = range(begin, begin + count)
            line.append(Cell(held, embedding=chunk == stage == 0, loss=final, mtp=mtp_layers if final else 0))
            begin += count
        cells.append(tuple(line))
    return StageLayout(tuple(cells))


def parse_layout(text: str) -> list[str]:
    """The chunks of a layout string, repeats written out: 'Et|(t|)*2,tL' -> ['Et', 't', 't', 'tL']."""
    plain = re.sub(r"[\s,]", "", text)

    def fail(why: str) -> ConfigError:
        return ConfigError(
            f"--pipeline-model-parallel-layout {text!r}", why=why, fix="for example 'Ett|(tt|)*2,tL' for four stages"
        )

    wrong = re.search(r"[^EtmL|()*\d]", plain)
    if wrong:
        raise fail(f"{wrong.group()!r} means nothing: E, t, m, L, |, (), *n do")
    group = re.compile(r"\(([^()]*)\)(?:\*(\d+))?|([EtmL|])\*(\d+)")
    while group.search(plain):
        plain = group.sub(
            lambda m: m.group(1) * int(m.group(2) or 1) if m.group(3) is None else m.group(3) * int(m.group(4)), plain
        )
    left = re.search(r"[()*\d]", plain)
    if left:
        raise fail(f"{left.group()!r} has no partner: repeats are x*n or (...)*n")
    return plain.split("|")


def _from_string(text: str, num_layers: int, stages: int, chunks: int, mtp_layers: int) -> StageLayout:
    parts = parse_layout(text)

    def fail(why: str, fix: str) -> ConfigError:
        return ConfigError(f"--pipeline-model-parallel-layout {text!r}", why=why, fix=fix)

    if len(parts) != stages * chunks:
        raise fail(
            f"it has {len(parts)} chunks, and {stages} stages"
            + (f" of {chunks} chunks take {stages * chunks}" if chunks > 1 else f" take {stages}"),
            "one | fewer than there are chunks in all",
        )
    whole = "".join(parts)
    for letter, name, count in (("E", "embedding", 1), ("L", "loss", 1), ("t", "--num-layers", num_layers)):
        if whole.count(letter) != count:
            raise fail(f"it holds {whole.count(letter)} {letter} ({name}), not {count}", f"{count} times {letter}")
    if not whole.startswith("E") or not whole.endswith("L"):
        raise fail("the model begins with its embedding and ends with its loss", "E first, L last")
    if whole.count("m") not in (0, mtp_layers):
        raise fail(f"it holds {whole.count('m')} m, and --mtp-num-layers is {mtp_layers}", f"{mtp_layers} times m")
    with_mtp = [i for i, part in enumerate(parts) if "m" in part]
    if with_mtp and (len(with_mtp) > 1 or whole.index("m") < whole.rindex("t") or with_mtp[0] // stages != chunks - 1):
        raise fail("the m stand together behind all t, in a last chunk", "for example '...|t|mL'")
    cells, begin = [], 0
    for part in parts:
        held = range(begin, begin + part.count("t"))
        cells.append(
            Cell(
                held,
                embedding="E" in part,
                loss="L" in part,
                mtp=part.count("m") if with_mtp else mtp_layers * ("L" in part),
            )
        )
        begin = held.stop
    return StageLayout(tuple(tuple(cells[chunk * stages : (chunk + 1) * stages]) for chunk in range(chunks)))
