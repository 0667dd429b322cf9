"""`megatron-lite plan`: what it prints of a schedule and of a placement, and the pictures."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from megatron_lite.cli import main as cli
from megatron_lite.cli.timeline import shade
from megatron_lite.pipeline_parallel.actions import Kind


def plan(capsys, words: str) -> str:
    assert cli.main(["plan", *words.split()]) == 0
    return capsys.readouterr().out


def bubble(out: str) -> float:
    return float(re.search(r"bubble ([\d.]+)%", out)[1]) / 100


@pytest.mark.parametrize(
    ("words", "stages", "chunks", "microbatches"),
    [
        ("--pipeline-model-parallel-size 4 --num-microbatches 8", 4, 1, 8),
        ("--pipeline-model-parallel-size 8 --num-microbatches 24 --schedule gpipe", 8, 1, 24),
        ("--pipeline-model-parallel-size 8 --num-microbatches 32 --num-virtual-stages-per-pipeline-rank 4", 8, 4, 32),
        ("--pipeline-model-parallel-size 2 --num-microbatches 4 --forward-time 3 --backward-time 3", 2, 1, 4),
    ],
)
def test_the_bubble_is_that_of_the_papers(capsys, words, stages, chunks, microbatches):
    """(p - 1) / (v m), whatever a forward and a backward pass take."""
    assert bubble(plan(capsys, words)) == pytest.approx((stages - 1) / (chunks * microbatches), abs=5e-4)


def test_zero_bubble_waits_a_third_of_1f1b(capsys):
    """With F = I = W a stage waits (p - 1)(F + I - W), 1F1B (p - 1)(F + I + W); memory as 1F1B's stage 0."""
    out = plan(capsys, "--pipeline-model-parallel-size 4 --num-microbatches 8 --schedule 1f1b zero-bubble")
    first, second = out.split("Zero bubble")
    assert [bubble(first), bubble(second)] == pytest.approx([3 / 8, 1 / 8])
    assert re.findall(r"alive at once (\S+) +F", first) == ["4", "3", "2", "1"]
    assert re.findall(r"alive at once (\S+) +F", second) == ["4"] * 4


def test_lists_are_those_that_run(capsys):
    """Short lists in full, long ones by their ends."""
    out = plan(capsys, "--pipeline-model-parallel-size 2 --num-microbatches 3")
    assert "F0 F1 B0 F2 B1 B2\n" in out and "F0 B0 F1 B1 F2 B2\n" in out
    assert "a step takes 12, a stage computes for 9 of it and waits for 3" in out
    long = plan(capsys, "--pipeline-model-parallel-size 2 --num-microbatches 30")
    assert " ... " in long and "B28 B29\n" in long and max(map(len, long.splitlines())) < 120


def test_the_table_says_what_a_stage_holds(capsys):
    out = plan(
        capsys,
        "--pipeline-model-parallel-size 4 --num-microbatches 4 --num-layers 10 "
        "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2",
    )
    table = [re.split(r" {2,}", line.strip()) for line in out.split("holds", 1)[1].splitlines()[1:]]
    assert table == [
        ["stage 0", "embedding, layers 0 to 1", "2"],
        ["stage 1", "layers 2 to 4", "3"],
        ["stage 2", "layers 5 to 7", "3"],
        ["stage 3", "layers 8 to 9, loss", "2"],
    ]


def test_a_layout_string_tells_the_chunks(capsys):
    """8 chunks on 4 stages are 2 virtual stages each: the schedule is interleaved without another flag."""
    words = "--pipeline-model-parallel-size 4 --num-microbatches 8 --num-layers 6 --pipeline-model-parallel-layout "
    out = plan(capsys, words + "E|(t|)*6L")
    assert "Interleaved 1F1B, 2 chunks a stage" in out
    assert "stage 0   embedding   layer 3   1" in out and "stage 3   layer 2     loss      1" in out


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_picture_of_several_schedules(capsys, tmp_path, suffix):
    """Every pass is a box with its micro-batch in it, every kind and chunk has its name, the title tells the bubble."""
    path = tmp_path / f"timeline{suffix}"
    words = "--pipeline-model-parallel-size 2 --num-microbatches 4 --num-virtual-stages-per-pipeline-rank 2"
    out = plan(capsys, f"{words} --schedule 1f1b interleaved zero-bubble --output {path}")
    assert str(path) in out
    if suffix == ".png":
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        return
    text = path.read_text()
    ET.fromstring(text)
    written = re.findall(r"<!-- (.*?) -->", text)  # matplotlib draws letters as curves and remarks what they say
    # of 1F1B 2 passes on 2 stages, of the interleaved one twice as many, of zero bubble 3; the axes count by twos
    assert written.count("1") == written.count("3") == 4 + 8 + 6
    assert {"forward, chunk 1", "backward, chunk 0", "backward, weight gradients", "stage 1"} <= set(written)
    assert [title.split(",")[0] for title in written if "bubble " in title and "alive" in title] == [
        "1F1B: bubble 25.0%",
        "Interleaved 1F1B",
        "Zero bubble (ZB-H1): bubble 8.3%",
    ]


def test_chunks_have_shades_of_their_own():
    shades = {shade(kind, chunk, 4) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT_GRAD) for chunk in range(4)}
    assert len(shades) == 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--schedule interleaved", "--num-virtual-stages-per-pipeline-rank 2 or more"),
        ("--num-virtual-stages-per-pipeline-rank 2 --num-microbatches 2", "2 micro-batches"),
        ("--num-microbatches 0", "--num-microbatches 0"),
        ("--forward-time 0", "--forward-time 0"),
        ("--output timeline.jpg", ".svg or .png"),
        ("--output no/such/folder/timeline.svg", "No such file or directory"),
        ("--account-for-loss-in-pipeline-split", "--num-layers is missing"),
        ("--num-layers 6", "6 do not divide by 4"),
    ],
)
def test_what_cannot_be_planned_is_told(capsys, words, message):
    assert cli.main(["plan", *"--pipeline-model-parallel-size 4 --num-microbatches 8".split(), *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_planning_needs_no_torch():
    """A plan is arithmetic: it is there at once, also on a laptop without the rest."""
    words = ["plan", "--pipeline-model-parallel-size", "2", "--num-microbatches", "2"]
    code = f"import sys; from megatron_lite.cli.main import main; main({words!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_an_encoder_and_its_decoder_are_placed_as_one_row(capsys):
    """Evenly, by the decoder's first stage, or by a string; the schedule is that of any pipeline."""
    words = "--pipeline-model-parallel-size 2 --num-microbatches 4 --encoder-num-layers 6 --decoder-num-layers 2"
    assert "encoder layers 4 to 5, decoder layers 0 to 1, loss" in plan(capsys, words)
    split = plan(capsys, f"{words} --pipeline-model-parallel-split-rank 1")
    assert re.search(r"stage 0 +embedding, encoder layers 0 to 5 +6", split)
    assert re.search(r"stage 1 +decoder layers 0 to 1, loss +2", split)
    placed = plan(capsys, f"{words} --pipeline-model-parallel-layout Ettttttt|tL")
    assert "embedding, encoder layers 0 to 5, decoder layer 0" in placed
    one_stack = words.replace("--decoder-num-layers 2", "--pipeline-model-parallel-split-rank 1")
    assert cli.main(["plan", *one_stack.split()]) != 0
    assert "there is one stack" in capsys.readouterr().err
