"""Decentralised federated learning, from the paper to the network.

>>> import peerage as pg
>>> experiment = pg.Experiment(algorithm=pg.DecHW(), dataset="digits", nodes=8, rounds=2)
>>> result = pg.run(experiment)
>>> len(result.digest)
64
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; a test compares it with `_HOMES`
    from peerage import algorithms as algorithms
    from peerage import models as models
    from peerage.algorithm import Algorithm as Algorithm
    from peerage.algorithm import Node as Node
    from peerage.algorithms import ALGORITHMS as ALGORITHMS
    from peerage.algorithms.cfa import CFA as CFA
    from peerage.algorithms.dac import DAC as DAC
    from peerage.algorithms.dec_fedavg import DecFedAvg as DecFedAvg
    from peerage.algorithms.dec_fedavg import DecFedProx as DecFedProx
    from peerage.algorithms.dec_fml import DecFML as DecFML
    from peerage.algorithms.decavg import DecAvg as DecAvg
    from peerage.algorithms.decdiff import DecDiff as DecDiff
    from peerage.algorithms.decdiff import DecDiffVT as DecDiffVT
    from peerage.algorithms.dechw import DecHW as DecHW
    from peerage.algorithms.defkt import DefKT as DefKT
    from peerage.algorithms.deprl import DePRL as DePRL
    from peerage.algorithms.desa import DESA as DESA
    from peerage.algorithms.dfml import DFML as DFML
    from peerage.algorithms.dfml_neighbours import DFMLNeighbours as DFMLNeighbours
    from peerage.algorithms.dpsgd import DPSGD as DPSGD
    from peerage.algorithms.el import EL as EL
    from peerage.algorithms.facade import Facade as Facade
    from peerage.algorithms.fedavg import FedAvg as FedAvg
    from peerage.algorithms.fedcurv import FedCurv as FedCurv
    from peerage.algorithms.fednl import FedNL as FedNL
    from peerage.algorithms.fedprox import FedProx as FedProx
    from peerage.algorithms.hwa import HWA as HWA
    from peerage.algorithms.ifca import IFCA as IFCA
    from peerage.algorithms.local import Local as Local
    from peerage.algorithms.partial_training import DecFedDropout as DecFedDropout
    from peerage.algorithms.partial_training import DecFedRolex as DecFedRolex
    from peerage.algorithms.partial_training import DecHeteroFL as DecHeteroFL
    from peerage.data import Dataset as Dataset
    from peerage.data import in_memory as in_memory
    from peerage.data.clusters import Clusters as Clusters
    from peerage.data.examples import from_dataset as from_dataset
    from peerage.errors import PeerageError as PeerageError
    from peerage.experiment import Engine as Engine
    from peerage.experiment import Evaluation as Evaluation
    from peerage.experiment import Experiment as Experiment
    from peerage.experiment import Init as Init
    from peerage.experiment.families import datasets as datasets
    from peerage.experiment.families import partitions as partitions
    from peerage.experiment.families import topologies as topologies
    from peerage.hub import HubAlgorithm as HubAlgorithm
    from peerage.models.start import Split as Split
    from peerage.requests import Compute as Compute
    from peerage.requests import Inbox as Inbox
    from peerage.requests import Message as Message
    from peerage.runs.comparison import Comparison as Comparison
    from peerage.runs.comparison import compare as compare
    from peerage.runs.run import Result as Result
    from peerage.runs.run import resume as resume
    from peerage.runs.run import run as run
    from peerage.runs.saved import RunRecord as RunRecord
    from peerage.runs.saved import load as load
    from peerage.runs.verify import Verdict as Verdict
    from peerage.runs.verify import verify as verify
    from peerage.runs.watch import STOP as STOP
    from peerage.runs.watch import Watcher as Watcher
    from peerage.vectors import Layout as Layout
    from peerage.vectors import Weights as Weights
    from peerage.work.losses import ACE as ACE
    from peerage.work.losses import WSM as WSM
    from peerage.work.losses import CrossEntropy as CrossEntropy
    from peerage.work.losses import CurvaturePenalty as CurvaturePenalty
    from peerage.work.losses import Proximal as Proximal
    from peerage.work.losses import VirtualTeacher as VirtualTeacher
    from peerage.work.mutual import MutualBatch as MutualBatch
    from peerage.work.mutual import MutualKL as MutualKL
    from peerage.work.mutual import MutualLoss as MutualLoss
    from peerage.work.mutual import WeightedSoftLabels as WeightedSoftLabels
    from peerage.work.together import TrainedTogether as TrainedTogether
    from peerage.work.training import LocalSGD as LocalSGD
    from peerage.work.training import TrainStats as TrainStats

__version__ = "0.1.0"

# Public name -> the module that defines it. Names are imported on first use, so that
# `peerage --help` and the certificate commands start without torch.
_HOMES = {
    "ACE": "peerage.work.losses",
    "ALGORITHMS": "peerage.algorithms",
    "CFA": "peerage.algorithms.cfa",
    "DAC": "peerage.algorithms.dac",
    "DESA": "peerage.algorithms.desa",
    "DFML": "peerage.algorithms.dfml",
    "DPSGD": "peerage.algorithms.dpsgd",
    "EL": "peerage.algorithms.el",
    "HWA": "peerage.algorithms.hwa",
    "IFCA": "peerage.algorithms.ifca",
    "STOP": "peerage.runs.watch",
    "WSM": "peerage.work.losses",
    "Algorithm": "peerage.algorithm",
    "Clusters": "peerage.data.clusters",
    "Comparison": "peerage.runs.comparison",
    "Compute": "peerage.requests",
    "CrossEntropy": "peerage.work.losses",
    "CurvaturePenalty": "peerage.work.losses",
    "DFMLNeighbours": "peerage.algorithms.dfml_neighbours",
    "Dataset": "peerage.data",
    "DePRL": "peerage.algorithms.deprl",
    "DecAvg": "peerage.algorithms.decavg",
    "DecDiff": "peerage.algorithms.decdiff",
    "DecDiffVT": "peerage.algorithms.decdiff",
    "DecFML": "peerage.algorithms.dec_fml",
    "DecFedAvg": "peerage.algorithms.dec_fedavg",
    "DecFedDropout": "peerage.algorithms.partial_training",
    "DecFedProx": "peerage.algorithms.dec_fedavg",
    "DecFedRolex": "peerage.algorithms.partial_training",
    "DecHW": "peerage.algorithms.dechw",
    "DecHeteroFL": "peerage.algorithms.partial_training",
    "DefKT": "peerage.algorithms.defkt",
    "Engine": "peerage.experiment",
    "Evaluation": "peerage.experiment",
    "Experiment": "peerage.experiment",
    "Facade": "peerage.algorithms.facade",
    "FedAvg": "peerage.algorithms.fedavg",
    "FedCurv": "peerage.algorithms.fedcurv",
    "FedNL": "peerage.algorithms.fednl",
    "FedProx": "peerage.algorithms.fedprox",
    "HubAlgorithm": "peerage.hub",
    "Inbox": "peerage.requests",
    "Init": "peerage.experiment",
    "Layout": "peerage.vectors",
    "Local": "peerage.algorithms.local",
    "LocalSGD": "peerage.work.training",
    "Message": "peerage.requests",
    "MutualBatch": "peerage.work.mutual",
    "MutualKL": "peerage.work.mutual",
    "MutualLoss": "peerage.work.mutual",
    "Node": "peerage.algorithm",
    "PeerageError": "peerage.errors",
    "Proximal": "peerage.work.losses",
    "Result": "peerage.runs.run",
    "RunRecord": "peerage.runs.saved",
    "Split": "peerage.models.start",
    "TrainStats": "peerage.work.training",
    "TrainedTogether": "peerage.work.together",
    "Verdict": "peerage.runs.verify",
    "VirtualTeacher": "peerage.work.losses",
    "Watcher": "peerage.runs.watch",
    "WeightedSoftLabels": "peerage.work.mutual",
    "Weights": "peerage.vectors",
    "algorithms": "peerage",
    "compare": "peerage.runs.comparison",
    "datasets": "peerage.experiment.families",
    "from_dataset": "peerage.data.examples",
    "in_memory": "peerage.data",
    "load": "peerage.runs.saved",
    "models": "peerage",
    "partitions": "peerage.experiment.families",
    "resume": "peerage.runs.run",
    "run": "peerage.runs.run",
    "topologies": "peerage.experiment.families",
    "verify": "peerage.runs.verify",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'peerage' has no attribute {name!r}")
    home = _HOMES[name]
    if home == "peerage":  # a subpackage
        return import_module(f"peerage.{name}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
