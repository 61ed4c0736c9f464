"""Data sets, their files, and partitions of the examples over the nodes."""

from peerage.data.datasets import DATASETS as DATASETS
from peerage.data.datasets import DatasetSpec as DatasetSpec
from peerage.data.fetch import fetch as fetch
from peerage.data.fetch import status as status
from peerage.data.partition import PARTITIONS as PARTITIONS
from peerage.data.partition import Partition as Partition
from peerage.data.partition import hold_out as hold_out
from peerage.data.partition import label_counts as label_counts
from peerage.data.sources import PUBLISHED as PUBLISHED
from peerage.data.store import Progress as Progress
from peerage.data.store import cache_folder as cache_folder
from peerage.data.tensors import Dataset as Dataset
from peerage.data.tensors import in_memory as in_memory
