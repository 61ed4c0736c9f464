"""DePRL: nodes share the core of the model and keep their own heads (a baseline of P3).

Xiong, Yan, Wang, Li, 2024. arXiv:2312.10815. Each round trains the head with the core fixed, then
the core with the head fixed, and averages the cores. As in P3, a node trains before it averages.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from peerage.algorithm import Algorithm, Cost, Dimensions, Node
from peerage.algorithms.averaging import all_others, average_cores
from peerage.errors import InputError, check_at_least
from peerage.requests import TensorSpec
from peerage.vectors import Layout
from peerage.work.training import LocalSGD


@dataclass(frozen=True)
class DePRL(Algorithm[None]):
    """Train the head, then the core; average the cores and keep the head.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DePRL(core_epochs=2))
    >>> experiment == pg.Experiment(algorithm="deprl:core_epochs=2")
    True
    """

    personal: ClassVar[bool] = True
    evaluated_at: ClassVar[Literal["after-training", "after-aggregation"]] = "after-aggregation"

    local: LocalSGD = LocalSGD()  # of the head, and of the core unless there is a number below
    # Of the core phase: passes over the data, or batches. P3 has 1 batch on two of its data sets.
    core_epochs: int | None = None
    core_steps: int | None = None
    weights: Literal["uniform", "metropolis"] = "uniform"  # of the cores
    final_mean: bool = True  # replace all cores by their mean after the last round

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local.only is not None:
            raise InputError(
                f"deprl trains both parts in turn, got only={self.local.only}; leave it out"
            )
        if self.core_epochs is not None and self.core_steps is not None:
            raise InputError(
                f"core_epochs={self.core_epochs} and core_steps={self.core_steps} exclude each "
                "other; give one of them"
            )
        for name in ("core_epochs", "core_steps"):
            check_at_least(name, getattr(self, name), 1)
        self.phase("head")  # raise an error if a phase is not possible
        self.phase("core")

    def check_layout(self, layout: Layout) -> None:
        layout.check_parts("deprl")

    def phase(self, part: Literal["head", "core"]) -> LocalSGD:
        """The training of one part."""
        work = replace(self.local, only=part)
        if part == "core" and (self.core_epochs or self.core_steps):
            work = replace(work, epochs=self.core_epochs, steps=self.core_steps)
        return work

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        return {
            "core": TensorSpec((dimensions.layout.part_size("core"),)),
            "core_b": TensorSpec((dimensions.buffer_layout.part_size("core"),)),
        }

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        layout, core = dimensions.layout, self.phase("core")
        batches = (core.steps or 0) * core.batch_size
        passes = core.epochs or batches / max(examples, 1.0)
        return Cost(
            vectors=layout.part_size("core") / layout.size, passes=float(passes), shared_mean=True
        )

    async def round(self, node: Node[None]) -> None:
        await node.train(self.phase("head"))
        await node.train(self.phase("core"))
        await average_cores(node, self.weights)

    @property
    def has_final(self) -> bool:
        return self.final_mean

    async def final(self, node: Node[None]) -> None:
        await average_cores(node, "uniform", to=all_others(node))
