"""topology, diffuse and plan on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import peerage

from peerage.cli.graphs import MEANINGS


def answer(line: str, *more: object) -> dict[str, Any]:
    ended = peerage(line + " --json", *more)
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.lines[-1])
    return found


def test_diffuse_prints_the_limits_of_the_deviations() -> None:
    found = answer("diffuse --topology complete --nodes 100 --rounds 5 --noise 0 --parameters 4000")
    assert len(found["sigma_ap"]) == len(found["sigma_an"]) == 6
    assert found["gain"] == pytest.approx(10)
    assert found["limit_ap"] == pytest.approx(0.1)
    # 4000 numbers of one consensus: their deviation is known to about a percent.
    assert found["sigma_ap"][-1] == pytest.approx(0.1, rel=0.05)
    assert found["sigma_an"][-1] == pytest.approx(0, abs=1e-6)
    assert found["stabilisation"] == 1


def test_diffuse_for_people_and_as_a_picture(tmp_path: Path) -> None:
    ended = peerage("diffuse --nodes 60 --rounds 12 --plot", tmp_path / "model.png")
    assert ended.code == 0
    shown = {line[:18].strip(): line[18:].strip() for line in ended.lines}
    assert float(shown["sigma ap start"].split()[0]) == pytest.approx(1, abs=0.1)
    assert "deviation across a node's parameters, at first" in ended.out
    assert ended.err == ""  # progress is for terminals
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("width", ["44", "80", "120"])
@pytest.mark.parametrize("line", ["topology er:p=0.2 --nodes 30", "diffuse --nodes 60 --rounds 2"])
def test_every_number_is_explained(line: str, width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    ended = peerage(line)
    shown = " ".join(ended.out.split())
    # The curves are shown by their ends.
    curves = [f"sigma_{which} {when}" for which in ("ap", "an") for when in ("start", "end")]
    keys = answer(line).keys() - {"topology", "seed", "sigma_ap", "sigma_an"}
    for key in (*keys, *(curves if "diffuse" in line else ())):
        assert MEANINGS[key] in shown
    meanings = [line for line in ended.lines if line.startswith(" ")]
    assert max(map(len, meanings), default=0) <= int(width)


def test_a_graph_can_be_rewired_first() -> None:
    before = answer("topology er:degree=6 --nodes 80 --seed 2")
    after = answer("topology er:degree=6 --nodes 80 --seed 2 --assortativity 0.3")
    assert after["degree_histogram"] == before["degree_histogram"]
    assert after["gain"] == pytest.approx(before["gain"])
    assert after["spectral_gap"] != before["spectral_gap"]


def test_plan_by_hand() -> None:
    """A ring of ten, logistic regression on digits: 650 numbers, 2600 bytes."""
    found = answer(
        "plan --topology ring --nodes 10 --dataset digits --model logistic --algorithm decavg "
        "--rounds 7"
    )
    assert found["parameters"] == 650
    assert found["payload"] == 1
    assert found["sent"] == {"least": 5200, "mean": 5200, "most": 5200}
    assert found["sent_total"] == 7 * 10 * 5200
    assert found["gain"]["mean"] == pytest.approx(10**0.5)
    twice = answer("plan --topology ring --nodes 10 --dataset digits --algorithm dechw")
    assert twice["payload"] == 2


def test_plan_counts_the_links_within_clusters() -> None:
    line = "plan --topology ring --nodes 10 --dataset digits --algorithm decavg"
    found = answer(f"{line} --clusters 7/3:rotate")
    assert (found["clusters"], found["links_within"]) == ([7, 3], 0.8)
    assert answer(line)["links_within"] is None
    assert "7/3 nodes; 80.0 % of the links are within" in peerage(f"{line} --clusters 7/3").out


def test_plan_knows_the_shape_that_options_give() -> None:
    line = "plan --nodes 4 --topology ring --algorithm decavg --model logistic --dataset cifar10"
    assert answer(line)["parameters"] == 3072 * 10 + 10
    assert answer(line + ":grey=true,side=28")["parameters"] == 784 * 10 + 10


def test_plan_counts_the_bytes_of_the_wire_format() -> None:
    """With int8, 256 numbers and their scale take 260 bytes. Messages in memory are float32."""
    line = "plan --nodes 4 --topology ring --algorithm decavg --model logistic --dataset mnist"
    plain = answer(line)
    for wire, width in {"fp32": 4, "bf16": 2, "int8": 260 / 256}.items():
        found = answer(f"{line} --wire {wire}")
        assert found["sent"]["mean"] == 2 * 7850 * width
        assert (found["memory"], found["payload"]) == (plain["memory"], 1)


def test_plan_of_a_mix() -> None:
    """On a ring of five nodes, every node has another model and two neighbours."""
    line = "plan --topology ring --nodes 5 --algorithm decavg --dataset cifar10 --model h2-cnn"
    found = answer(line)
    counts = [1_089_290, 279_562, 94_858, 75_786, 70_730]
    assert found["mix"] == counts
    assert found["parameters"] == round(sum(counts) / 5)
    assert found["payload"] == 1
    assert found["sent"]["most"] == 2 * 4 * max(counts)
    # Of node 3: model, gradients and momentum, the models of nodes 2 and 4, and activations, which
    # are twice as large for batches of 16, the default.
    half = answer(f"{line} --batch-size 8")["memory"]["least"]
    assert 2 * half - found["memory"]["least"] == 4 * (3 * 75_786 + 94_858 + 70_730)
    text = " ".join(peerage(line).out.split())
    assert "h2-cnn: nodes take in turn 5 models of 1,089,290, 279,562, 94,858, 75,786, 70" in text
    alone = answer(line.replace("h2-cnn", "h0-cnn"))
    assert (alone["mix"], alone["parameters"]) == ([], 94_858)


def test_plan_counts_the_models_of_participants() -> None:
    """26 of 50 clients meet at the aggregator."""
    line = "plan --topology complete --nodes 50 --dataset cifar10 --model h2-cnn --batch-size 64"
    found = answer(f"{line} --algorithm dfml")
    assert (found["held_models"], found["batch_size"]) == (25, 64)
    # The process of the benchmark `together-memory` has 1.15 GB, of which 0.28 are the program.
    assert 0.7e9 < found["memory"]["least"] <= found["memory"]["most"] < 1.0e9
    text = " ".join(peerage(f"{line} --algorithm dfml").out.split())
    assert "as an aggregator the 25 largest models that it may receive" in text
    # To average them needs less, and so does an aggregator that trains its own model alone.
    averaged = answer(f"{line} --algorithm dec-fedavg")["memory"]["most"]
    assert answer(f"{line} --algorithm dfml:teacher=vanilla")["memory"]["most"] == averaged
    assert averaged < found["memory"]["most"] / 4


def test_plan_warns() -> None:
    ended = peerage("plan --topology er:p=0.01,connected=false --nodes 60 --algorithm decavg")
    assert ended.code == 0
    assert "components" in ended.out
    assert "warning " in ended.out


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("diffuse --rounds 0", "rounds must be at least 1, got 0"),
        ("diffuse --noise -1", "noise must lie between 0 and 1e+12 times init, got -1.0"),
        ("diffuse --start gauss", "start must be one of normal, uniform; got 'gauss'"),
        ("diffuse --topology dynamic-regular", "requires a static graph"),
        (
            "plan --optimizer adam",
            "optimizer must be one of sgd, adamw; got 'adam', did you mean 'adamw'?",
        ),
        ("plan --wire int4", "wire must be one of fp32, bf16, int8; got 'int4'"),
        ("plan --batch-size 0", "batch_size must be at least 1, got 0"),
        ("plan --model h2-cn", "unknown model 'h2-cn'; did you mean 'h2-cnn'"),
        ("plan --algorithm decag", "unknown algorithm 'decag'; did you mean 'decavg'?"),
        ("topology regular:k=4 --assortativity 0.1", "all nodes with edges have the same degree"),
        ("topology er:p=0.2 --assortativity 1.5", "assortativity must lie in [-1, 1], got 1.5"),
        ("topology er:p=0.2 --assortativity 0.999", "do not allow an assortativity of 0.999"),
        ("run --gain exponent:a=2", "a must lie in [0, 1], got 2.0"),
        (
            "run --gain graph --topology er:p=0.01,connected=false",
            "components, each with its own gain",
        ),
        ("run --gain graph --topology er:p=0,connected=false", "the graph has no edges"),
        ("run --assortativity 0.99", "do not allow an assortativity of 0.99"),
    ],
)
def test_bad_input_is_one_line(line: str, error: str) -> None:
    ended = peerage(line)
    assert ended.code == 2
    assert error in ended.err
    assert ended.err.count("\n") == 1
