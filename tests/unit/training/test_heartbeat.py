"""The heartbeat's age says whether a run lives; steps beat at most once a second, a full disk stops nothing."""

import json
import os
from argparse import Namespace

import pytest

from megatron_lite.cli.main import main
from megatron_lite.training import heartbeat
from megatron_lite.training.heartbeat import DONE, Heartbeat


@pytest.fixture
def args():
    return Namespace(iteration=3, train_iters=10)


def _aged(path, seconds):
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "time": content["time"] - seconds}))


def test_a_run_lives_until_it_is_silent_for_too_long_and_done_is_no_silence(tmp_path, args, capsys):
    path = tmp_path / "new" / "beat.json"
    beat = Heartbeat(str(path), args)
    beat.beat("iteration 4")
    assert main(["heartbeat", str(path)]) == 0
    assert f"iteration 4; 3 of 10 iterations done; process {os.getpid()}" in capsys.readouterr().out
    _aged(path, 700)
    assert main(["heartbeat", str(path)]) == 1 and "SILENT for 700 s: iteration 4" in capsys.readouterr().out
    assert main(["heartbeat", str(path), "--max-age", "900"]) == 0
    beat.beat(DONE)
    _aged(path, 7000)
    assert main(["heartbeat", str(path)]) == 0 and capsys.readouterr().out.splitlines()[-1].startswith("done; ")


def test_steps_beat_at_most_once_a_second_and_other_things_at_once(tmp_path, args, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    path = tmp_path / "beat.json"
    beat = Heartbeat(str(path), args)

    def doing():
        return json.loads(path.read_text())["doing"]

    beat.beat("iteration 4")
    now[0] += 0.9
    beat.beat("iteration 5")
    assert doing() == "iteration 4"
    beat.beat("save after iteration 5")
    assert doing() == "save after iteration 5"
    now[0] += 1.1
    beat.beat("iteration 6")
    assert doing() == "iteration 6" and os.listdir(tmp_path) == ["beat.json"]


def test_a_file_that_cannot_be_written_is_said_once(tmp_path, args, capsys):
    path = tmp_path / "beat.json"
    beat = Heartbeat(str(path), args)
    path.mkdir()
    for _ in range(3):
        beat.beat("save")
    assert capsys.readouterr().err.count("cannot be written, training goes on") == 1


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_what_is_no_heartbeat_is_told(tmp_path, content, capsys):
    if content is not None:
        (tmp_path / "x").write_text(content)
    assert main(["heartbeat", str(tmp_path / "x")]) == 1
    assert "holds no heartbeat" in capsys.readouterr().err
