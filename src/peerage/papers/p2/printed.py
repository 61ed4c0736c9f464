"""The numbers as printed in P2, which our tables show beside ours.

Accuracies and their deviations over ten trials are in percent. The figures print no numbers; the
claims of their studies quote the text.
"""

from peerage.papers.datasets import CIFAR, FASHION, MNIST

IID, TYPE_I, TYPE_II = SPLITS = ("IID", "non-IID (I)", "non-IID (II)")  # the order of the columns
FOUR = ("FedAvg", "FedProx", "FedCurv", "HWA")
TEST = "p-value"  # of a one-way analysis of variance over the four
SEEDS = 10

# A line is epochs, method, and one cell per split.
TABLES = {
    MNIST: """
5  FedAvg   98.14±0.040  93.46±1.796  89.46±1.332
5  FedProx  98.13±0.026  93.45±1.789  89.27±1.425
5  FedCurv  98.10±0.025  93.43±1.770  89.44±1.421
5  HWA      98.11±0.066  94.30±1.255  92.49±0.618
5  p-value  0.676        0.073        0.077e-3
10 FedAvg   98.09±0.037  90.0±2.415   88.46±0.746
10 FedProx  98.08±0.032  93.0±1.658   89.73±0.798
10 FedCurv  98.07±0.025  90.31±2.384  88.54±0.659
10 HWA      98.06±0.020  93.36±0.747  92.18±0.449
10 p-value  0.93         0.056        0.006e-5
""",
    FASHION: """
5  FedAvg   87.38±0.162  72.51±5.368  74.41±3.332
5  FedProx  87.43±0.123  72.45±5.433  74.12±3.474
5  FedCurv  87.39±0.175  72.69±5.115  72.55±4.881
5  HWA      87.39±0.176  76.60±4.278  78.25±2.809
5  p-value  0.944        0.043        0.017
10 FedAvg   88.78±0.132  70.17±5.331  70.0±5.907
10 FedProx  88.76±0.139  70.54±8.849  69.62±6.323
10 FedCurv  88.85±0.117  73.84±5.290  70.04±5.425
10 HWA      88.79±0.261  77.45±3.561  76.88±1.410
10 p-value  0.857        0.049        0.029
""",
    CIFAR: """
5  FedAvg   77.56±0.416  64.86±1.885  60.86±1.190
5  FedProx  77.61±0.461  64.53±2.136  59.20±1.055
5  FedCurv  77.54±0.497  64.70±2.442  62.03±0.961
5  HWA      77.40±0.388  67.21±1.225  63.26±0.947
5  p-value  0.863        0.03         0.05e-5
10 FedAvg   77.99±0.289  64.05±2.022  58.31±3.116
10 FedProx  77.92±0.245  64.74±1.259  59.01±2.328
10 FedCurv  77.88±0.237  64.34±2.230  59.62±2.266
10 HWA      77.72±0.156  67.15±1.159  62.42±1.504
10 p-value  0.876        0.092        0.016
""",
}

# Table 4: accuracy on FEMNIST after these rounds.
MARKS = (50, 250, 500, 750, 1000)
FEMNIST = """
FedAvg   29.41 72.10 74.54 74.77 74.87
FedProx  29.96 71.92 74.46 74.66 74.78
FedCurv  29.54 72.48 74.82 75.00 75.08
HWA      43.85 73.16 77.66 77.83 78.02
"""

# Fig. 8 and 11. The sigmas of Fig. 11 are not printed; these are a guess.
ALPHAS = (10.0, 1.0, 0.2, 0.1, 0.05)
SIGMAS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.5)

Coordinates = tuple[str, str, str, str]  # data set, split, epochs such as "E = 5", method


def accuracies() -> dict[Coordinates, tuple[float, float]]:
    """Means and deviations over seeds, both as fractions."""
    return {
        place: (numbers[0] / 100, numbers[1] / 100)
        for place, numbers in _numbers().items()
        if place[-1] != TEST
    }


def tests() -> dict[Coordinates, float]:
    """The p-values over the four methods."""
    return {place: numbers[0] for place, numbers in _numbers().items() if place[-1] == TEST}


def _numbers() -> dict[Coordinates, tuple[float, ...]]:
    found = {}
    for dataset, text in TABLES.items():
        for line in text.strip().splitlines():
            epochs, method, *cells = line.split()
            for split, cell in zip(SPLITS, cells, strict=True):
                place = (dataset, split, f"E = {epochs}", method)
                found[place] = tuple(map(float, cell.split("±")))
    return found


def femnist() -> dict[tuple[str, int], float]:
    """(method, rounds) -> accuracy as a fraction."""
    found = {}
    for line in FEMNIST.strip().splitlines():
        method, *cells = line.split()
        for mark, cell in zip(MARKS, cells, strict=True):
            found[method, mark] = float(cell) / 100
    return found
