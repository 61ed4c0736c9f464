"""The numbers as printed in P3, which our tables show beside ours.

The final values of Tables II to IV; accuracies are in percent. Deviations are over seeds. The
figures print no numbers; the claims of their studies quote the text.
"""

from typing import NamedTuple

from peerage.papers.datasets import CIFAR, FLICKR, IMAGENETTE

# A line is sizes of the clusters, method, accuracies of the majority, of the minority and of all
# nodes, demographic parity, equalised odds, and fair accuracy.
TABLES = {
    CIFAR: """
16:16 EL     64.03±0.54 63.80±0.42 63.91±0.43 0.0032±0.0007 0.0204±0.0038 75.87
16:16 DAC    63.82±1.34 63.79±1.43 63.81±0.31 0.0065±0.0008 0.0402±0.0057 75.86
16:16 DePRL  55.51±0.34 55.50±0.29 55.50±0.26 0.0020±0.0004 0.0099±0.0026 70.33
16:16 FACADE 69.50±0.32 69.61±0.20 69.55±0.25 0.0060±0.0015 0.0267±0.0079 79.67
24:8  EL     69.13±0.45 54.76±0.59 65.53±0.31 0.0103±0.0012 0.1596±0.0097 69.84
24:8  DAC    69.88±0.28 51.30±1.31 65.24±0.19 0.0131±0.0015 0.2067±0.0175 67.53
24:8  DePRL  57.40±0.13 54.21±0.24 56.60±0.15 0.0030±0.0003 0.0361±0.0013 69.48
24:8  FACADE 71.61±0.27 66.81±0.34 70.41±0.29 0.0079±0.0025 0.0582±0.0033 77.87
30:2  EL     71.99±0.70 38.77±0.62 69.91±0.67 0.0306±0.0014 0.3693±0.0081 59.18
30:2  DAC    72.21±0.24 34.94±0.72 69.88±0.25 0.0340±0.0027 0.4143±0.0075 56.63
30:2  DePRL  58.47±0.59 52.56±0.78 58.10±0.57 0.0047±0.0013 0.0684±0.0072 68.37
30:2  FACADE 73.32±0.15 59.96±0.72 72.48±0.19 0.0086±0.0026 0.1491±0.0059 73.31
""",
    IMAGENETTE: """
12:12 EL     66.43±0.56 66.85±0.67 66.64±0.59 0.0033±0.0008 0.0208±0.0035 77.62
12:12 DAC    65.73±0.73 64.45±0.54 65.09±0.47 0.0054±0.0004 0.0286±0.0036 76.30
12:12 DePRL  43.14±1.00 43.49±1.20 43.31±1.07 0.0078±0.0016 0.0319±0.0039 62.10
12:12 FACADE 68.18±0.35 68.59±0.34 68.39±0.27 0.0050±0.0010 0.0239±0.0035 78.78
16:8  EL     69.69±0.27 60.21±0.44 67.32±0.29 0.0121±0.0008 0.1061±0.0050 73.48
16:8  DAC    68.55±0.62 56.92±1.32 65.64±0.57 0.0136±0.0019 0.1299±0.0176 71.28
16:8  DePRL  43.40±0.79 43.09±1.22 43.33±0.89 0.0096±0.0025 0.0361±0.0060 62.06
16:8  FACADE 69.61±0.37 66.44±0.19 68.82±0.30 0.0054±0.0011 0.0397±0.0014 77.63
20:4  EL     70.17±0.28 56.06±0.56 67.81±0.33 0.0186±0.0006 0.1566±0.0026 70.71
20:4  DAC    69.05±0.74 50.93±1.65 66.03±0.45 0.0226±0.0039 0.2009±0.0249 67.29
20:4  DePRL  43.67±1.01 42.64±1.16 43.50±1.02 0.0090±0.0024 0.0388±0.0078 61.76
20:4  FACADE 69.61±0.46 64.15±0.39 68.70±0.42 0.0064±0.0015 0.0630±0.0057 76.10
""",
    FLICKR: """
8:8   EL     59.97±0.23 59.92±0.22 59.94±0.19 0.0006±0.0001 0.0094±0.0014 73.28
8:8   DAC    60.56±0.60 59.94±0.32 60.25±0.33 0.0016±0.0002 0.0203±0.0012 73.29
8:8   DePRL  44.92±0.61 45.61±1.23 45.26±0.85 0.0047±0.0004 0.0373±0.0039 63.28
8:8   FACADE 65.50±0.55 64.92±0.41 65.21±0.47 0.0035±0.0001 0.0467±0.0018 76.62
14:2  EL     64.92±0.21 49.71±0.20 63.02±0.17 0.0057±0.0002 0.1349±0.0034 66.47
14:2  DAC    66.11±0.46 46.70±4.75 63.68±0.63 0.0067±0.0010 0.1836±0.0409 64.47
14:2  DePRL  45.69±0.82 45.91±0.79 45.72±0.81 0.0072±0.0005 0.0644±0.0027 63.80
14:2  FACADE 67.63±0.49 59.55±1.06 66.62±0.56 0.0058±0.0004 0.1077±0.0109 73.03
""",
}

Coordinates = tuple[str, str, str]  # data set, sizes of the clusters as printed, method
Cell = tuple[float, float]  # a mean and its deviation over seeds


class Line(NamedTuple):
    """A line of a table; accuracies are fractions."""

    majority: Cell
    minority: Cell
    accuracy: Cell  # over all nodes
    parity: Cell
    odds: Cell
    fair_accuracy: float  # printed without a deviation


def lines() -> dict[Coordinates, Line]:
    """All lines of Tables II to IV."""
    found = {}
    for dataset, text in TABLES.items():
        for line in text.strip().splitlines():
            sizes, method, *cells, fair = line.split()
            pairs = [tuple(map(float, cell.split("±"))) for cell in cells]
            majority, minority, accuracy = ((m / 100, s / 100) for m, s in pairs[:3])
            parity, odds = ((m, s) for m, s in pairs[3:])
            found[dataset, sizes, method] = Line(
                majority, minority, accuracy, parity, odds, float(fair) / 100
            )
    return found
