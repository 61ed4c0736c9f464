"""The replay of a run as a GIF."""

from pathlib import Path

import pytest
from PIL import Image
from support.command_line import peerage
from support.dashboards import make_run

from peerage.errors import InputError
from peerage.records.rows import RunRecord
from peerage.report import replay


@pytest.mark.slow
def test_a_replay_has_a_frame_for_each_round(tmp_path: Path) -> None:
    record = RunRecord.load(make_run(tmp_path, "run", rounds=4))
    out = tmp_path / "replay.gif"
    assert replay.write_replay(record, out) == 5
    with Image.open(out) as picture:
        assert (picture.n_frames, picture.info["loop"]) == (5, 0)
        first = picture.convert("RGB").tobytes()
        picture.seek(4)
        assert picture.convert("RGB").tobytes() != first
        assert picture.info["duration"] == replay.REST


@pytest.mark.slow
def test_many_rounds_are_thinned_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "FRAMES", 3)
    record = RunRecord.load(make_run(tmp_path, "run", rounds=9))
    assert replay.write_replay(record, tmp_path / "replay.gif") == 3


@pytest.mark.slow
def test_the_command_plot_writes_a_replay(tmp_path: Path) -> None:
    folder, out = make_run(tmp_path, "run", rounds=2), tmp_path / "replay.gif"
    assert peerage("plot replay", folder, "--out", out).code == 0
    with Image.open(out) as picture:
        assert picture.n_frames == 3
    wrong = peerage("plot replay", folder, "--out", tmp_path / "replay.pdf")
    assert (wrong.code, "ends in .gif" in wrong.err) == (2, True)


def test_what_cannot_be_replayed_is_an_error(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run")
    with pytest.raises(InputError, match=r"ends in \.gif"):
        replay.write_replay(RunRecord.load(folder), tmp_path / "replay.mp4")
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="needs an evaluated round"):
        replay.write_replay(RunRecord.load(folder), tmp_path / "replay.gif")
