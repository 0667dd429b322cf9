"""The report of a run: what is read from the metrics file, and what the page shows."""

import base64
import json
import re

import pytest

from megatron_lite.cli.main import main
from megatron_lite.errors import DataError
from megatron_lite.training import report_picture
from megatron_lite.training.report import write_report
from megatron_lite.training.report_metrics import LOAD, duration, read_metrics, summary


def entry(iteration, loss, **more):
    return {
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "lm loss": loss,
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "loss_scale": 1.0,
        "elapsed_ms": 500.0,
        "tokens_per_s": 4096.0,
        **more,
    }


def write(folder, rows):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(tmp_path):
    rows = [entry(1, 9.0), entry(10, 8.0), {"iteration": 10, "validation": {"lm loss": 8.0}}]
    rows += [entry(20, 6.0), {"iteration": 20, "validation": {"lm loss": 5.0}}]
    folder = write(tmp_path / "run", rows)
    (folder / "config.yaml").write_text(
        "model:\n  num_layers: 4\n  # padded_vocab_size: 512\n  # bf16: false\n  data_path: ['<none>']\n"
    )
    return folder


def test_of_repeated_iterations_the_later_counts(tmp_path):
    """A run killed at 30 and resumed from 20 logs 21 to 30 twice."""
    folder = write(tmp_path, [entry(10, 5.0), entry(20, 4.0), entry(30, 9.9), entry(20, 4.0), entry(30, 3.0)])
    assert read_metrics(folder / "metrics.jsonl").series("lm loss") == ([10, 20, 30], [5.0, 4.0, 3.0])


def test_iterations_that_a_rollback_undid_are_gone_even_if_they_never_come_again(tmp_path):
    rows = [{"iteration": i, "lm loss": 6.0 - i} for i in (1, 2, 3)]
    rows += [{"iteration": 3, "validation": {"lm loss": 9.0}}, {"rolled_back_to": 1}, {"iteration": 4, "lm loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert list(metrics.train) == [1, 4] and not metrics.validation


def test_a_line_torn_by_a_kill_is_left_out_even_in_the_middle(tmp_path):
    folder = write(tmp_path, [entry(10, 5.0)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 20, "lm lo' + json.dumps(entry(15, 1.0)) + "\n" + json.dumps(entry(20, 4.0)) + "\n{")
    assert read_metrics(folder / "metrics.jsonl").series("lm loss") == ([10, 20], [5.0, 4.0])


@pytest.mark.parametrize("content", [None, "", "{torn", '{"no": "iteration"}\n'])
def test_metrics_without_an_entry_are_an_error_that_names_the_file(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "metrics.jsonl"))):
        write_report(tmp_path)


def test_time_counts_every_iteration_of_an_interval(run):
    """Entries hold the mean over the iterations since the one before: 1, 9 and 10 iterations of half a second."""
    assert read_metrics(run / "metrics.jsonl").seconds == 10.0


def test_the_summary_gives_first_and_last_value_and_the_fall(run):
    rows = summary(read_metrics(run / "metrics.jsonl"))
    assert rows["lm loss, training"] == "9.000 (iteration 1) -> 6.000 (iteration 20), -33%"
    assert rows["lm loss, validation"] == "8.000 (iteration 10) -> 5.000 (iteration 20), -38%"
    assert rows["lm loss, validation perplexity"] == "148.4"  # e^5
    assert rows["samples"] == "160" and rows["throughput, median"] == "4,096 tokens/s"


def test_losses_of_any_name_are_found(tmp_path):
    folder = write(tmp_path, [entry(1, 2.0, **{"sop loss": 0.7}), {"iteration": 1, "validation": {"mtp_1 loss": 1.0}}])
    assert read_metrics(folder / "metrics.jsonl").loss_keys == ["lm loss", "sop loss", "mtp_1 loss"]


def test_the_page_needs_nothing_beside_itself(run):
    picture, page = write_report(run, sample='print("<b>&")', timings={"training": 75.2})
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!data:)', text) and "<script" not in text and "url(" not in text
    inside = re.search(r'src="data:image/png;base64,([^"]+)"', text)
    assert inside and base64.b64decode(inside[1]) == picture.read_bytes()
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    assert "print(&quot;&lt;b&gt;&amp;&quot;)" in text, "the sample must not become markup"
    assert "1 min 15 s" in text and "<td>num_layers</td><td>4</td>" in text and "&lt;none&gt;" in text
    assert "All 4 settings" in text and "<td>padded_vocab_size</td><td>512</td>" in text, "derived values count too"
    assert not list(run.glob("*.partial"))


def test_nan_and_missing_values_do_not_stop_the_picture(tmp_path):
    folder = write(tmp_path, [entry(1, None, grad_norm=None), entry(2, 3.0, grad_norm=None), entry(3, None)])
    picture, _ = write_report(folder, tmp_path / "elsewhere")
    assert picture.parent.name == "elsewhere" and picture.exists()


def test_the_verb_redraws_with_the_sample_that_lies_beside(run, tmp_path, capsys):
    (run / "sample.txt").write_text("def sampled(): pass")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.split() == [str(run / "loss.png"), str(run / "report.html")]
    assert "def sampled(): pass" in (run / "report.html").read_text()
    assert main(["report", str(tmp_path / "nothing")]) == 1
    assert "metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    "seconds, text",
    [(0.25, "0.2 s"), (59.94, "59.9 s"), (75.2, "1 min 15 s"), (119.7, "2 min 0 s"), (7260, "2 h 1 min")],
)
def test_durations_read_naturally(seconds, text):
    assert duration(seconds) == text


# ------------------------------------------------------------------------------------------------------- several runs
@pytest.fixture
def two_runs(tmp_path):
    for name, loss, rate in (("small", 6.0, 1e-3), ("large", 5.0, 3e-4)):
        folder = write(
            tmp_path / name / "checkpoints",
            [entry(1, 9.0), entry(20, loss), {"iteration": 20, "validation": {"lm loss": loss + 0.5}}],
        )
        (folder / "config.yaml").write_text(f"lr: {rate}\nseed: 1\nsave: {folder}\n")
    return [tmp_path / name / "checkpoints" for name in ("small", "large")]


def test_several_runs_are_compared_in_one_picture_and_one_table(two_runs, tmp_path, capsys):
    """Runs of one folder name are told apart by what stands before it; settings that all share are not repeated."""
    assert main(["report", *map(str, two_runs), "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / f"out/comparison.{kind}") for kind in ("png", "html")]
    text = (tmp_path / "out" / "comparison.html").read_text()
    assert "<tr><td></td><td>small/checkpoints</td><td>large/checkpoints</td></tr>" in text
    assert "<tr><td>lr</td><td>0.001</td><td>0.0003</td></tr>" in text and "<td>seed</td>" not in text
    assert "<td>9.000 (iteration 1) -&gt; 6.000 (iteration 20), -33%</td>" in text
    assert not re.search(r'(src|href)="(?!data:)', text)


def test_all_runs_are_in_the_picture(two_runs, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self) or args[0].touch())
    report_picture.draw(
        {path.parent.name: read_metrics(path / "metrics.jsonl") for path in two_runs}, tmp_path / "x.png", "two"
    )
    losses, *small = drawn[0].axes
    labels = [text.get_text() for text in losses.get_legend().get_texts()]
    assert labels == [f"{name}: lm loss{end}" for name in ("small", "large") for end in ("", ", validation")]
    assert [len(axes.lines) for axes in small] == [2, 2, 2]  # learning rate, gradient norm, tokens/s: no experts


def test_experts_have_a_picture_of_their_own_and_their_losses_are_not_beside_the_models(tmp_path, monkeypatch):
    """A z-loss of 30 would press the curve that matters flat; numbers that are no losses were drawn as such."""
    from matplotlib.figure import Figure

    more = {"load_balancing_loss": 1.1, "z_loss": 30.0, LOAD: 1.7, "communication": [["dp", "all_reduce", 3]]}
    folder = write(tmp_path, [entry(1, 9.0, **more, max_attention_logit=3.0, joules_per_device=7.2e6)])
    metrics = read_metrics(folder / "metrics.jsonl")
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self) or args[0].touch())
    report_picture.draw({"run": metrics}, tmp_path / "x.png", "experts")
    losses, *small = drawn[0].axes
    assert [line.get_label() for line in losses.lines] == ["lm loss, training"]
    assert small[3].get_title(loc="left") == "experts: busiest / mean" and small[3].lines[0].get_ydata()[0] == 1.7
    rows = summary(metrics)
    assert rows["z_loss, last"] == "30" and rows["expert load (max / mean), last"] == "1.70"
    assert rows["energy per device"] == "2 kWh"
