"""The losses of candidate models, or of candidate parts of a model, on a node's own examples.

All candidates see the same examples, in evaluation mode. Heads over one core share its features:
the core runs once for each batch, and only the modules from the head on run for each candidate.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from peerage.errors import InputError, PeerageError
from peerage.requests import Compute, Inbox
from peerage.vectors import FlatModel, Weights
from peerage.work.context import LocalContext
from peerage.work.curvature import LARGE_BATCH
from peerage.work.losses import CrossEntropy


def read_candidates(
    owner: int,
    architecture: str,
    candidates: Inbox | Sequence[Tensor] | Sequence[Weights],
    buffers: Sequence[Tensor] | None,
) -> tuple[Weights, ...]:
    """The candidates of a node as models, or as parts of models; vectors have its architecture."""
    is_model = isinstance(candidates, Inbox) or any(isinstance(x, Weights) for x in candidates)
    if is_model and buffers is not None:
        raise PeerageError(
            f"node {owner} gave buffers beside candidates that have their own; leave out buffers, "
            "or give vectors of parameters"
        )
    if isinstance(candidates, Inbox):
        messages = candidates.messages
        other = next((m for m in messages if m.architecture != architecture), None)
        if other is not None:
            raise PeerageError(
                f"node {owner} cannot evaluate the model of node {other.sender}: it has "
                f"architecture {other.architecture!r}, not {architecture!r}; use "
                "inbox.alike(node.architecture), or give candidates as Weights"
            )
        candidates = candidates["x"]
        buffers = [m.payload["b"] for m in messages if "b" in m.payload] or None
    if buffers is not None and len(buffers) != len(candidates):
        raise PeerageError(
            f"node {owner} has {len(candidates)} candidates but the buffers of "
            f"{len(buffers)}; pass buffers for every candidate"
        )
    models: Sequence[Tensor | Weights] = candidates
    own = [torch.empty(0)] * len(models) if buffers is None else buffers
    return tuple(
        x if isinstance(x, Weights) else Weights(x, b, architecture)
        for x, b in zip(models, own, strict=True)
    )


@dataclass(frozen=True)
class Losses(Compute[Tensor]):
    """[k] mean loss of each candidate, on the same local examples."""

    phase: ClassVar[str] = "losses"

    candidates: tuple[Weights, ...]  # parameters and statistics of whole models, or of a part
    examples: int | None = None  # drawn from the stream; None means all
    stream: str = "losses"
    batch_size: int | None = None  # examples in one forward pass
    part: str | None = None
    own: Weights | None = None  # has the other part, which all candidates share

    def __post_init__(self) -> None:
        for name in ("examples", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")

    def run(self, local: LocalContext) -> Tensor:
        candidates = [self.fitted(local, candidate) for candidate in self.candidates]
        size = LARGE_BATCH if self.batch_size is None else self.batch_size
        batches = list(local.sample(self.examples, size, self.stream))
        with torch.no_grad():
            if self.own is not None:
                return torch.tensor(self.part_losses(local, self.own, candidates, batches))
            return torch.tensor([self.loss(local, model, batches) for model in candidates])

    def fitted(self, local: LocalContext, candidate: Weights) -> Weights:
        """The candidate, or its part; raises an error if it does not fit its architecture."""
        name, whole = candidate.architecture, candidate
        own = name if self.own is None else self.own.architecture
        if name not in local.models or name != own:
            raise PeerageError(
                f"node {local.node} cannot evaluate a candidate of architecture {name!r}; use one "
                f"of {', '.join(local.models)}, and with part={self.part} only the node's own"
            )
        layout, buffers = local.models[name].layout, local.models[name].buffer_layout
        sizes, about = (layout.size, buffers.size), ""
        if self.part is not None:
            if (whole.params.shape, whole.buffers.shape) == ((sizes[0],), (sizes[1],)):
                entries = layout.part(self.part), buffers.part(self.part)
                candidate = Weights(whole.params[entries[0]], whole.buffers[entries[1]], name)
            sizes = layout.part_size(self.part), buffers.part_size(self.part)
            about = f" the {self.part} of"
        if candidate.params.shape != (sizes[0],):
            raise PeerageError(
                f"node {local.node} cannot evaluate a candidate with {candidate.params.numel()} "
                f"parameters:{about} its model {name!r} has {sizes[0]}; choose candidates of the "
                "same architecture, as in inbox.alike(node.architecture)"
            )
        if candidate.buffers.shape != (sizes[1],):
            raise PeerageError(
                f"node {local.node} cannot evaluate a candidate with {candidate.buffers.numel()} "
                f"running statistics:{about} its model {name!r} has {sizes[1]}; send "
                "b=node.buffers with every model, and give node.losses the inbox, or buffers=..."
            )
        return candidate

    def loss(
        self, local: LocalContext, candidate: Weights, batches: list[tuple[Tensor, Tensor]]
    ) -> float:
        model = local.model(candidate.params, candidate.buffers, candidate.architecture)
        model.module.eval()
        total, count = 0.0, 0
        for x, y in batches:
            total += float(CrossEntropy()(model.module(x), y)) * len(y)
            count += len(y)
        return total / max(count, 1)

    def part_losses(
        self,
        local: LocalContext,
        own: Weights,
        candidates: list[Weights],
        batches: list[tuple[Tensor, Tensor]],
    ) -> list[float]:
        assert self.part is not None
        model = local.model(own.params, own.buffers, own.architecture)
        model.module.eval()
        tail = Tail(model) if self.part == "head" and len(candidates) > 1 else None
        entries, statistics = model.layout.part(self.part), model.buffer_layout.part(self.part)
        totals, count = [0.0] * len(candidates), 0
        for x, y in batches:
            again: Callable[[], Tensor] | None = None
            for number, candidate in enumerate(candidates):
                model.params[entries] = candidate.params
                model.buffers[statistics] = candidate.buffers
                if number == 0 and tail is not None:
                    logits, again = tail.run(x)
                else:
                    logits = model.module(x) if again is None else again()
                totals[number] += float(CrossEntropy()(logits, y)) * len(y)
            count += len(y)
        return [total / max(count, 1) for total in totals]


@dataclass(frozen=True)
class UnitCall:
    """A call of a module of the tail with one tensor."""

    unit: nn.Module
    features: Tensor
    version: int  # of the features when the call began
    output: Tensor


class Tail:
    """The modules at the end of a network: the head, and modules without tensors beside it.

    In a forward pass, those from the head on must run one after the other, each once on the output
    of the one before. Then the head can run again on the same features. A network that does
    something else between or after them, such as a function of torch, runs as a whole again.
    """

    def __init__(self, model: FlatModel) -> None:
        self.module = model.module
        owners = {
            layer: model.layout.in_part(f"{name}.", "head")
            for name, layer in self.module.named_modules()
            if any(True for _ in (*layer.parameters(False), *layer.buffers(False)))
        }
        self.head = {layer for layer, in_head in owners.items() if in_head}
        self.core = {layer for layer, in_head in owners.items() if not in_head}
        self.units = list(dict.fromkeys(self._units(self.module)))

    def _units(self, module: nn.Module) -> Iterator[nn.Module]:
        """The largest modules without the core, in the module or in its parts with the head."""
        inside = set(module.modules())
        if not inside & self.core:
            yield module
        elif inside & self.head:
            for child in module.children():
                yield from self._units(child)

    def run(self, x: Tensor) -> tuple[Tensor, Callable[[], Tensor] | None]:
        """Logits, and a function that computes them again with another head, if there is one."""
        calls: list[UnitCall] = []
        begun: list[int] = []  # versions of the inputs of calls
        heads = 0  # calls of units with a part of the head

        def begin(unit: nn.Module, inputs: tuple[Any, ...]) -> None:
            nonlocal heads
            heads += not self.head.isdisjoint(unit.modules())
            begun.append(inputs[0]._version if inputs and isinstance(inputs[0], Tensor) else -1)

        def end(
            unit: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any
        ) -> None:
            version = begun.pop()
            plain = len(inputs) == 1 and not options and version >= 0 and isinstance(output, Tensor)
            if not plain or (calls and calls[-1].output is not inputs[0]):
                calls.clear()
            if plain:
                calls.append(UnitCall(unit, inputs[0], version, output))

        hooks = [unit.register_forward_pre_hook(begin) for unit in self.units]
        hooks += [unit.register_forward_hook(end, with_kwargs=True) for unit in self.units]
        try:
            logits: Tensor = self.module(x)
        finally:
            for hook in hooks:
                hook.remove()
        return logits, self._again(calls, heads, logits)

    def _again(
        self, calls: Sequence[UnitCall], heads: int, logits: Tensor
    ) -> Callable[[], Tensor] | None:
        if not calls or calls[-1].output is not logits:
            return None
        with_head = [i for i, call in enumerate(calls) if set(call.unit.modules()) & self.head]
        covered = {layer for i in with_head for layer in calls[i].unit.modules()}
        if len(with_head) != heads or not self.head <= covered:
            return None
        first = calls[with_head[0]]
        if first.features._version != first.version:  # the head changes its input in place
            return None
        units, features = [call.unit for call in calls[with_head[0] :]], first.features

        def again() -> Tensor:
            output = features
            for unit in units:
                output = unit(output)
            return output

        return again
