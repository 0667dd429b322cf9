"""Layer placement: every layer once, in order, on every layout; what does not come out even is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.errors import ConfigError
from megatron_lite.pipeline_parallel.stage_layout import (
    encoder_decoder_layout,
    parse_layout,
    stage_layout,
)


def layers_in_order(layout):
    return [layer for row in layout.cells for cell in row for layer in cell.layers]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_even_splits_hold_every_layer_once(stages, chunks, per_chunk, embedding, loss):
    """With the ends counted as layers too: one embedding first, one loss last."""
    num_layers = stages * chunks * per_chunk - embedding - loss
    if num_layers < 1 or per_chunk < embedding + loss:
        return
    layout = stage_layout(num_layers, stages, chunks, count_embedding=embedding, count_loss=loss)
    assert layers_in_order(layout) == list(range(num_layers))
    cells = [cell for row in layout.cells for cell in row]
    assert [cell.embedding for cell in cells] == [True] + [False] * (len(cells) - 1)
    assert [cell.loss for cell in cells] == [False] * (len(cells) - 1) + [True]


def test_c086_no_layer_is_dropped():
    """C086: six layers on four stages are refused with ways out, never cut to four."""
    with pytest.raises(ConfigError, match="6 do not divide by 4.*no layer may be left out"):
        stage_layout(6, 4)
    layout = stage_layout(6, 4, layout="Et|tt|tt|tL")
    assert layers_in_order(layout) == list(range(6))


def test_c087_end_stages_need_stages():
    """C087: a layer count for the last stage of one stage."""
    with pytest.raises(ConfigError, match="with one pipeline stage"):
        stage_layout(20, 1, last=1)


@pytest.mark.parametrize(("first", "last"), [(None, 2), (2, None), (2, 4)])
def test_c088_only_one_end_given(first, last):
    """C088: interleaved, with one end's count: layer numbers are 0 ... L - 1, each once, in order."""
    middle = 4 - (first is not None) - (last is not None)
    num_layers = (first or 0) + (last or 0) + middle * 4
    layout = stage_layout(num_layers, 4, 2, first=first, last=last)
    assert layers_in_order(layout) == list(range(num_layers))
    if last is not None:
        assert sum(len(layout.cell(3, chunk).layers) for chunk in range(2)) == last


def test_layout_strings():
    """Repeats, groups, commas, and the place of each chunk."""
    assert parse_layout("Ett|(tt|)*2,tL") == ["Ett", "tt", "tt", "tL"]
    assert parse_layout("Et*3|(t|(tt|)*2)*2L") == ["Ettt", "t", "tt", "tt", "t", "tt", "tt", "L"]
    layout = stage_layout(7, 4, layout="Ett|(tt|)*2,tL")
    assert [len(layout.cell(stage).layers) for stage in range(4)] == [2, 2, 2, 1]
    layout = stage_layout(5, 2, 2, layout="E|tt|ttt|mL", mtp_layers=1)
    assert [str(layout.cell(stage, chunk)) for chunk in range(2) for stage in range(2)] == [
        "embedding",
        "layers 0 to 1",
        "layers 2 to 4",
        "1 prediction modules, loss",
    ]
    assert layout.describe(0) == "chunk 0: embedding; chunk 1: layers 2 to 4"


WRONG = {
    "tt|tL": "holds 0 E",
    "Ett|t": "holds 0 L",
    "Ett|L": "holds 2 t",
    "tE|ttL": "begins with its embedding",
    "Et|tLt": "ends with its loss",
    "Et|t|tL": "3 chunks, and 2 stages take 2",
    "Ex|ttL": "'x' means nothing",
    "E(tt|tL": "has no partner",
    "Et3|L": "has no partner",
    "Ett|tmL": "holds 1 m",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_layout_strings(text):
    """What is wrong is named."""
    with pytest.raises(ConfigError, match=WRONG[text].replace("|", r"\|")):
        stage_layout(3, 2, layout=text)


def test_two_ways_at_once():
    """A string and numbers, or end counts and counted ends, contradict each other."""
    with pytest.raises(ConfigError, match="another way"):
        stage_layout(3, 2, first=1, layout="Ett|tL")
    with pytest.raises(ConfigError, match="account-for"):
        stage_layout(8, 4, first=1, count_loss=True)
    with pytest.raises(ConfigError, match="multiple of 2"):
        stage_layout(8, 4, 2, first=1)
    with pytest.raises(ConfigError, match="no place"):
        stage_layout(8, 2, first=1, last=1)


@pytest.mark.parametrize(
    "how, cells",
    [
        ({"stages": 1}, ["embedding, encoder layers 0 to 3, decoder layers 0 to 1, loss"]),
        ({"stages": 2}, ["embedding, encoder layers 0 to 2", "encoder layer 3, decoder layers 0 to 1, loss"]),
        ({"stages": 2, "split": 1}, ["embedding, encoder layers 0 to 3", "decoder layers 0 to 1, loss"]),
        (
            {"stages": 3, "split": 2},
            ["embedding, encoder layers 0 to 1", "encoder layers 2 to 3", "decoder layers 0 to 1, loss"],
        ),
        (
            {"stages": 2, "layout": "Ettttt|tL"},
            ["embedding, encoder layers 0 to 3, decoder layer 0", "decoder layer 1, loss"],
        ),
        (
            {"stages": 2, "chunks": 3},
            [
                "embedding, encoder layer 0",
                "encoder layer 1",
                "encoder layer 2",
                "encoder layer 3",
                "decoder layer 0",
                "decoder layer 1, loss",
            ],
        ),
        (
            {"stages": 3, "last": 0},
            ["embedding, encoder layers 0 to 2", "encoder layer 3, decoder layers 0 to 1", "loss"],
        ),
    ],
    ids=str,
)
def test_an_encoder_and_its_decoder_are_one_row_that_is_cut_anywhere(how, cells):
    layout = encoder_decoder_layout(4, 2, **how)
    stages, chunks = how["stages"], how.get("chunks", 1)
    assert [str(layout.cell(stage, chunk)) for chunk in range(chunks) for stage in range(stages)] == cells


@pytest.mark.parametrize(
    "how, message",
    [
        ({"stages": 2, "split": 2}, "1 to 1"),
        ({"stages": 1, "split": 1}, "--pipeline-model-parallel-size 2 or more"),
        ({"stages": 4, "split": 1}, "2 decoder layers over 3 of 4 stages"),
        ({"stages": 4, "split": 3}, "4 encoder layers over 3 of 4 stages"),
        ({"stages": 2, "split": 1, "chunks": 2}, "2 chunks on a stage"),
        ({"stages": 2, "split": 1, "layout": "Ettttt|tL"}, "another way to place layers"),
        ({"stages": 4}, "--num-layers 6 over 4 stages"),
    ],
    ids=str,
)
def test_splits_that_cannot_be(how, message):
    with pytest.raises(ConfigError, match=message):
        encoder_decoder_layout(4, 2, **how)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(1, 3))
def test_every_layer_of_both_stacks_is_somewhere_in_its_order(encoder, decoder, stages, chunks):
    if (encoder + decoder) % (stages * chunks):
        return
    layout = encoder_decoder_layout(encoder, decoder, stages, chunks)
    cells = [layout.cell(stage, chunk) for chunk in range(chunks) for stage in range(stages)]
    assert [i for cell in cells for i in cell.encoder] == list(range(encoder))
    assert [i for cell in cells for i in cell.layers] == list(range(decoder))
    behind = [bool(cell.layers) for cell in cells]
    assert behind == sorted(behind), "a decoder layer stands before an encoder layer"
