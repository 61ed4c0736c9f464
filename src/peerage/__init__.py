"""Decentralised federated learning, from the paper to the network.

>>> import peerage as pg
>>> experiment = pg.Experiment(algorithm=pg.DecHW(), dataset="digits", nodes=8, rounds=2)
>>> result = pg.run(experiment)
>>> len(result.digest)
64
"""

from peerage.algorithm import Algorithm, Node
from peerage.algorithms import ALGORITHMS
from peerage.algorithms.cfa import CFA
from peerage.algorithms.decavg import DecAvg
from peerage.algorithms.decdiff import DecDiff, DecDiffVT
from peerage.algorithms.dechw import DecHW
from peerage.algorithms.desa import DESA
from peerage.algorithms.fedavg import FedAvg
from peerage.algorithms.fedcurv import FedCurv
from peerage.algorithms.fednl import FedNL
from peerage.algorithms.fedprox import FedProx
from peerage.algorithms.hwa import HWA
from peerage.algorithms.local import Local
from peerage.data import Dataset, in_memory
from peerage.errors import PeerageError
from peerage.experiment import Engine, Evaluation, Experiment, Init
from peerage.hub import HubAlgorithm
from peerage.losses import CrossEntropy, CurvaturePenalty, Proximal, VirtualTeacher
from peerage.requests import Compute, Inbox, Message
from peerage.running import Result, resume, run
from peerage.saved import RunRecord
from peerage.training import LocalSGD, TrainStats
from peerage.vectors import Layout
from peerage.verifying import Verdict, verify

__all__ = [
    "ALGORITHMS",
    "CFA",
    "DESA",
    "HWA",
    "Algorithm",
    "Compute",
    "CrossEntropy",
    "CurvaturePenalty",
    "Dataset",
    "DecAvg",
    "DecDiff",
    "DecDiffVT",
    "DecHW",
    "Engine",
    "Evaluation",
    "Experiment",
    "FedAvg",
    "FedCurv",
    "FedNL",
    "FedProx",
    "HubAlgorithm",
    "Inbox",
    "Init",
    "Layout",
    "Local",
    "LocalSGD",
    "Message",
    "Node",
    "PeerageError",
    "Proximal",
    "Result",
    "RunRecord",
    "TrainStats",
    "Verdict",
    "VirtualTeacher",
    "in_memory",
    "resume",
    "run",
    "verify",
]
