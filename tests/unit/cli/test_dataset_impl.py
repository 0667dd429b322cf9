"""The choice of a data format, which Megatron once had: nothing that is accepted leads to data that cannot be read."""

import json

import pytest

from megatron_lite.cli import preprocess as verb
from megatron_lite.errors import ConfigError
from megatron_lite.training.arguments import build_parser, parse_args
from tests.unit.datasets.corpora import build


@pytest.mark.parametrize("value", ["mmap", "lazy", "cached", "infer"])
def test_c033_whatever_format_preprocess_takes_trains(tmp_path, value):
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(json.dumps({"text": " ".join(map(str, range(1, 30)))}) for _ in range(4)) + "\n")
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--dataset-impl", value]
    assert verb.main(["--input", str(source), "--output-prefix", str(tmp_path / "out"), *words]) == 0
    dataset = build(([str(tmp_path / "out_text_document")], None), (10, 0, 0))[0]
    assert dataset[0]["tokens"].max() < 30 and len(dataset) >= 10


def test_c033_no_help_offers_a_format(capsys):
    with pytest.raises(SystemExit):
        verb.main(["--help"])
    assert "dataset-impl" not in capsys.readouterr().out
    assert "data-impl" not in build_parser().format_help()


@pytest.mark.parametrize(("value", "works"), [("mmap", True), ("infer", True), ("lazy", False), ("cached", False)])
def test_c033_training_takes_the_format_that_there_is(value, works):
    if works:
        parse_args(["--data-impl", value])
    else:
        with pytest.raises(ConfigError, match="preprocess again"):
            parse_args(["--data-impl", value])
