"""The numbers printed in P3 agree with each other, and with our definitions."""

from math import isclose

from peerage.papers.p3 import printed
from peerage.papers.p3.settings import FOUR, SIZES
from peerage.report.fairness import fair_accuracy

ROUNDING = 0.0002  # of fractions that are printed in percent with two digits


def test_all_lines_are_there() -> None:
    lines = printed.lines()
    settings = dict.fromkeys((dataset, sizes) for dataset, sizes, _ in lines)
    assert [sizes for _, sizes in settings] == [
        "16:16", "24:8", "30:2", "12:12", "16:8", "20:4", "8:8", "14:2",
    ]  # fmt: skip
    assert list(lines) == [(*setting, method) for setting in settings for method in FOUR]
    line = lines["cifar10", "30:2", "FACADE"]
    assert line.minority == (0.5996, 0.0072)
    assert line.odds == (0.1491, 0.0059)
    assert line.fair_accuracy == 0.7331


def test_our_fair_accuracy_of_the_printed_accuracies_is_the_printed_one() -> None:
    differing = {
        place: (ours, line.fair_accuracy)
        for place, line in printed.lines().items()
        if not isclose(
            ours := fair_accuracy([line.majority[0], line.minority[0]]),
            line.fair_accuracy,
            abs_tol=ROUNDING,
        )
    }
    assert differing == {}


def test_the_mean_over_all_nodes_follows_from_the_sizes_that_we_run() -> None:
    differing = {}
    for place, line in printed.lines().items():
        sizes = SIZES["paper"].sizes.get(place[1], place[1])
        majority, minority = map(int, sizes.split(":"))
        total = majority * line.majority[0] + minority * line.minority[0]
        if not isclose(total / (majority + minority), line.accuracy[0], abs_tol=ROUNDING):
            differing[place] = total / (majority + minority)
    assert differing == {}


def test_equalised_odds_of_p3_include_false_positives_and_are_means() -> None:
    # If all classes have the same gap g in true positive rate, the errors of ten classes are
    # spread over nine others: g + g / 9.
    line = printed.lines()["cifar10", "30:2", "EL"]
    gap = line.majority[0] - line.minority[0]
    assert isclose(gap + gap / 9, line.odds[0], abs_tol=0.001)
