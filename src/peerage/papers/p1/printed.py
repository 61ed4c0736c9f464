"""The numbers as printed in P1, which our tables show beside ours.

Accuracies are in percent, with deviations over seeds. Figures print no numbers.
"""

from itertools import product
from typing import NamedTuple

from peerage.papers.datasets import CALTECH, CARS, CIFAR, CIFAR100, PETS
from peerage.papers.p1.settings import (
    CLIENTS,
    H0_CNN,
    H1_CNN,
    H1_RESNET,
    H1_VIT,
    H2_CNN,
    H2_EFFICIENTNET,
    SPLITS,
)


class Case(NamedTuple):
    """A column of a table."""

    dataset: str
    models: str
    clients: int
    split: str


class Printed(NamedTuple):
    """The columns of a table, without splits, and its lines: a title and the cells."""

    columns: tuple[tuple[str, str, int], ...]  # data set, models, clients; each has both splits
    text: str


SIGNALS = ("CE, fixed", "CE, cyclic", "WSM, fixed", "WSM, cyclic")  # the lines of Table 9


def _columns(
    models: tuple[str, ...], datasets: tuple[str, ...], clients: tuple[int, ...] = (CLIENTS,)
) -> tuple[tuple[str, str, int], ...]:
    return tuple((data, kind, count) for count, kind, data in product(clients, models, datasets))


TABLES = {
    3: Printed(
        _columns((H0_CNN,), (CIFAR, CIFAR100)),
        """
Dec. FedAvg  | 80.00±0.19 74.68±0.06 48.32±0.18 43.17±0.16
Dec. FedProx | 79.93±0.04 74.55±0.19 47.97±0.34 42.41±0.47
Def-KT       | 79.29±0.18 72.59±0.34 48.43±0.18 43.84±0.24
DFML         | 80.96±0.07 76.27±0.40 50.47±0.29 46.41±0.48
""",
    ),
    4: Printed(
        _columns((H1_CNN, H1_RESNET, H1_VIT), (CIFAR, CIFAR100)),
        """
Dec. FedAvg   | 72.09±0.20 59.84±0.18 33.59±0.06 27.03±0.23 79.84±0.16 54.93±0.76 39.98±0.45 28.80±0.24 64.50±0.13 50.76±0.26 27.43±0.22 22.27±0.03
Dec. HeteroFL | 73.96±0.21 64.21±0.67 37.62±0.16 32.98±0.10 81.70±0.11 68.92±0.60 43.33±0.34 34.92±0.29 65.08±0.61 53.90±0.09 29.60±0.53 25.65±0.25
Dec. FedRolex | 74.38±0.02 64.30±0.41 37.65±0.27 32.83±0.16 81.70±0.17 69.41±0.19 43.30±0.20 34.94±0.43 65.17±0.40 53.56±0.61 30.44±0.21 25.81±0.06
DFML          | 79.02±0.04 73.87±0.19 48.60±0.03 44.26±0.20 85.68±0.01 71.24±0.02 53.32±0.07 46.27±0.38 68.38±0.03 54.50±0.01 36.48±0.20 28.56±0.60
""",  # noqa: E501 (a line of the table)
    ),
    5: Printed(
        _columns((H1_RESNET,), (CALTECH, PETS, CARS)),
        """
Dec. FedAvg   | 36.74±0.61 22.83±0.34 10.25±0.43  9.21±0.31  2.83±0.24  3.44±0.21
Dec. HeteroFL | 49.05±0.21 38.04±0.16 23.35±0.14 17.68±0.12  5.55±0.14  6.25±0.10
Dec. FedRolex | 49.14±0.32 37.75±0.22 22.67±0.14 18.39±0.15  5.88±0.11  6.09±0.09
DFML          | 60.05±0.04 50.07±0.06 40.42±0.16 31.25±0.11 41.12±0.10 25.31±0.09
""",
    ),
    6: Printed(
        _columns((H2_CNN,), (CIFAR, CIFAR100), (10, 50, 100)),
        """
Dec. FedAvg | 72.65±0.17 43.78±0.06 33.58±0.08 23.01±0.09 71.51±0.24 59.05±0.22 33.19±0.19 26.27±0.30 71.00±0.32 57.79±0.11 32.30±0.30 26.93±0.13
DFML        | 83.87±0.22 74.30±0.88 54.03±0.15 49.67±0.20 81.74±0.04 75.51±0.12 50.39±0.09 46.22±0.07 79.94±0.03 71.75±0.05 47.66±0.06 42.84±0.23
""",  # noqa: E501 (a line of the table)
    ),
    7: Printed(
        _columns((H2_EFFICIENTNET,), (CALTECH, PETS, CARS), (10,)),
        """
Dec. FedAvg | 54.75±0.24 30.92±0.16 18.34±0.31 15.34±0.21  6.07±0.25 11.83±0.12
DFML        | 83.42±0.20 65.70±0.13 68.90±0.22 42.94±0.13 70.29±0.19 50.63±0.23
""",
    ),
    9: Printed(
        _columns((H1_CNN, H1_RESNET, H1_VIT), (CIFAR100,)),
        """
CE, fixed   | 47.44±0.08 29.16±2.27 49.13±0.30 18.78±0.67 35.66±0.02 14.02±0.01
CE, cyclic  | 48.44±0.23 41.47±0.30 55.29±0.13 41.07±1.27 36.62±0.30 22.34±0.12
WSM, fixed  | 47.57±0.26 43.59±0.35 49.77±0.24 30.91±0.96 34.04±0.21 25.04±0.56
WSM, cyclic | 48.60±0.03 44.26±0.20 53.32±0.07 46.27±0.38 36.48±0.20 28.56±0.60
""",
    ),
    11: Printed(
        _columns((H1_RESNET,), (CIFAR, CIFAR100)),
        """
Dec. FedAvg   | 44.71±0.12 22.11±0.06 10.36±0.16  7.51±0.14
Dec. HeteroFL | 58.91±0.17 43.45±0.21 18.24±0.13 14.81±0.22
Dec. FedRolex | 58.91±0.09 43.54±0.19 18.20±0.08 15.10±0.11
DFML          | 78.87±0.01 68.52±0.02 45.02±0.02 40.31±0.03
""",
    ),
    12: Printed(
        _columns((H2_CNN,), (CIFAR, CIFAR100)),
        """
Dec. FedAvg | 51.45±0.01 25.03±0.02 27.10±0.11 20.16±0.21
DFML        | 78.87±0.10 68.52±0.18 45.01±0.15 40.30±0.15
""",
    ),
}
# Table 8: the round of Dec. FedAvg -> the rounds that DFML needs for its accuracy, in the columns
# of Table 6.
ROUNDS_NEEDED = {
    100: (10, 20, 20, 10, 30, 40, 30, 30, 50, 60, 40, 50),
    500: (20, 20, 20, 20, 90, 90, 90, 80, 150, 190, 130, 130),
}

Accuracy = tuple[float, float]  # mean and deviation over seeds, as fractions


def cases(table: int) -> list[Case]:
    """The columns of a table."""
    return [Case(*column, split) for column in TABLES[table].columns for split in SPLITS]


def lines(table: int) -> dict[str, dict[Case, Accuracy]]:
    """The lines of a table by their titles."""
    found = {}
    for line in TABLES[table].text.strip().splitlines():
        title, cells = line.split("|")
        pairs = [cell.split("±") for cell in cells.split()]
        values = [(float(mean) / 100, float(deviation) / 100) for mean, deviation in pairs]
        found[title.strip()] = dict(zip(cases(table), values, strict=True))
    return found
