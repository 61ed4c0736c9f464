"""The classes of each family by name, as in `pg.topologies.ErdosRenyi(p=0.2)`.

They are those of the registries, so a class that a user registers is there too. Algorithms and
models have the same in their packages, `pg.algorithms` and `pg.models`.
"""

from typing import TYPE_CHECKING, Any

from peerage import specs
from peerage.data.datasets import DATASETS
from peerage.data.partition import PARTITIONS
from peerage.graphs.topology import TOPOLOGIES

__all__ = ["Members", "datasets", "partitions", "topologies"]


class Members:
    """The classes of a family as attributes, which editors and notebooks complete."""

    def __init__(self, kind: str, family: specs.Family) -> None:
        self._kind, self._family = kind, family

    @property
    def __all__(self) -> list[str]:
        return specs.class_names(self._family)

    def __getattr__(self, name: str) -> type[Any]:
        return specs.class_named(name, self._kind, self._family)

    def __dir__(self) -> list[str]:
        return self.__all__

    def __repr__(self) -> str:
        return f"<{self._kind} classes: {', '.join(self.__all__)}>"


if TYPE_CHECKING:  # editors complete from the modules of the classes
    from peerage.data import datasets as datasets
    from peerage.data import partition as partitions
    from peerage.graphs import topology as topologies
else:
    datasets = Members("dataset", DATASETS)
    partitions = Members("partition", PARTITIONS)
    topologies = Members("topology", TOPOLOGIES)
