"""Data sets, their files, and partitions of the examples over the nodes."""

from peerage.data.datasets import DATASETS, DatasetSpec
from peerage.data.fetch import fetch, status
from peerage.data.partition import PARTITIONS, Partition, hold_out, label_counts
from peerage.data.sources import PUBLISHED
from peerage.data.store import Progress, cache_folder
from peerage.data.tensors import Dataset, in_memory

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "PUBLISHED",
    "Dataset",
    "DatasetSpec",
    "Partition",
    "Progress",
    "cache_folder",
    "fetch",
    "hold_out",
    "in_memory",
    "label_counts",
    "status",
]
