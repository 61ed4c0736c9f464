"""All algorithms by name. To add one, write one file, one line here and one test of its numbers."""

from typing import Any

from peerage.algorithm import Algorithm
from peerage.algorithms.cfa import CFA
from peerage.algorithms.dac import DAC
from peerage.algorithms.dec_fedavg import DecFedAvg, DecFedProx
from peerage.algorithms.dec_fml import DecFML
from peerage.algorithms.decavg import DecAvg
from peerage.algorithms.decdiff import DecDiff, DecDiffVT
from peerage.algorithms.dechw import DecHW
from peerage.algorithms.defkt import DefKT
from peerage.algorithms.deprl import DePRL
from peerage.algorithms.desa import DESA
from peerage.algorithms.dfml import DFML
from peerage.algorithms.dfml_neighbours import DFMLNeighbours
from peerage.algorithms.dpsgd import DPSGD
from peerage.algorithms.el import EL
from peerage.algorithms.facade import Facade
from peerage.algorithms.fedavg import FedAvg
from peerage.algorithms.fedcurv import FedCurv
from peerage.algorithms.fednl import FedNL
from peerage.algorithms.fedprox import FedProx
from peerage.algorithms.hwa import HWA
from peerage.algorithms.ifca import IFCA
from peerage.algorithms.local import Local
from peerage.algorithms.partial_training import DecFedDropout, DecFedRolex, DecHeteroFL

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "local": Local,
    "decavg": DecAvg,
    "cfa": CFA,
    "decdiff": DecDiff,
    "decdiff-vt": DecDiffVT,
    "desa": DESA,
    "dechw": DecHW,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedcurv": FedCurv,
    "fednl": FedNL,
    "hwa": HWA,
    "dpsgd": DPSGD,
    "el": EL,
    "deprl": DePRL,
    "dac": DAC,
    "facade": Facade,
    "ifca": IFCA,
    "dfml": DFML,
    "dfml-neighbours": DFMLNeighbours,
    "dec-fedavg": DecFedAvg,
    "dec-fedprox": DecFedProx,
    "dec-heterofl": DecHeteroFL,
    "dec-fedrolex": DecFedRolex,
    "dec-fed-dropout": DecFedDropout,
    "def-kt": DefKT,
    "dec-fml": DecFML,
}


def __getattr__(name: str) -> type[Algorithm[Any]]:
    """A class that a user has added to `ALGORITHMS`."""
    for cls in ALGORITHMS.values():
        if cls.__name__ == name:
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({"ALGORITHMS", *(cls.__name__ for cls in ALGORITHMS.values())})
