"""Check that models fit the data and each other, and whether they take floats or integers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from peerage.data import Dataset
from peerage.errors import InputError
from peerage.models.scaled import why_not_scalable, why_not_scaled
from peerage.models.start import Architecture

TABLES = (nn.Embedding, nn.EmbeddingBag)
FAILURES = (RuntimeError, ValueError, TypeError, IndexError)  # raised if examples do not fit


def check_fit(architecture: Architecture, dataset: Dataset) -> torch.dtype:
    """The type of examples for the model: float32, or int64 if it looks them up in an embedding.

    Runs the model on a few examples, so that a misfit is found before the run.
    """
    module = architecture.specimen().eval()
    if not list(module.parameters()):
        raise InputError(f"model {architecture.name!r} has no parameters to learn")
    if not architecture.layout.size:
        raise InputError(
            f"all parameters of model {architecture.name!r} are frozen (requires_grad=False); "
            "leave at least one layer to train"
        )
    tables = [layer for layer in module.modules() if isinstance(layer, TABLES)]
    # The smallest and the largest id show whether the embedding has a row for every id.
    x = _with_extremes(dataset) if tables else dataset.train_x[:2]
    dtype = torch.float32
    with _requests(tables) as requests:
        outcome = _attempt(module, x)
    looked_up = any(_same_numbers(indices, x) for indices in requests)
    try_integers = (looked_up or isinstance(outcome, Exception)) and _is_integer(dataset)
    if looked_up and not try_integers:
        raise InputError(
            f"model {architecture.name!r} looks up the examples of {dataset.name} in an "
            "nn.Embedding, but they are not integers; give integers, or use scale=false if they "
            "are bytes, which are divided by 255"
        )
    if try_integers:
        as_integers = _attempt(module, x.long())
        if not isinstance(as_integers, Exception):
            dtype, outcome = torch.int64, as_integers
        elif tables and isinstance(outcome, Exception):
            outcome = as_integers
    if isinstance(outcome, Exception):
        raise _misfit(architecture, dataset, outcome) from None
    if outcome != (len(x), len(dataset.classes)):
        raise InputError(
            f"model {architecture.name!r} gives {outcome[1:]} outputs for an example of "
            f"{dataset.name}, which has {len(dataset.classes)} classes; change its output layer"
        )
    return dtype


def common_dtype(
    architectures: Mapping[str, Architecture],
    dtypes: Mapping[str, torch.dtype],
    dataset: Dataset,
) -> torch.dtype:
    """The type of examples that all models take."""
    integers = [name for name, dtype in dtypes.items() if dtype == torch.int64]
    for name, architecture in architectures.items():
        if not integers or name in integers:
            continue
        module = architecture.specimen().eval()
        if isinstance(_attempt(module, dataset.train_x[:2].long()), Exception):
            raise InputError(
                f"model {integers[0]!r} takes only integers and model {name!r} takes none; "
                "convert the examples inside the models, with x.long() or x.float()"
            )
    return torch.int64 if integers else torch.float32


def check_widths(architectures: Sequence[Architecture]) -> None:
    """Raise an InputError unless each model is the next larger one without some channels.

    So the largest of any of them contains the others. A single model may be of any kind.
    """
    ordered = sorted(architectures, key=lambda architecture: architecture.layout.size)
    conflict = next(_width_conflicts(ordered), None) if len(ordered) > 1 else None
    if conflict is not None:
        raise InputError(
            f"the algorithm requires models that differ in width alone, but {conflict}; use one "
            "family, such as --model h1-cnn"
        )


def _width_conflicts(ordered: Sequence[Architecture]) -> Iterator[str]:
    for architecture in ordered:
        reason = why_not_scalable(architecture.specimen())
        if reason is not None:
            yield f"{architecture.name!r} has no other widths: {reason}"
    for small, large in pairwise(ordered):
        reason = why_not_scaled(small.specimen(), large.specimen())
        if reason is not None:
            yield f"{small.name!r} is no narrower version of {large.name!r}: {reason}"


def _attempt(module: nn.Module, x: Tensor) -> tuple[int, ...] | Exception:
    """The shape of the outputs, or the error."""
    try:
        with torch.no_grad():
            return tuple(module(x).shape)
    except FAILURES as error:
        return error


@contextmanager
def _requests(tables: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """A list that collects the indices that the embeddings receive."""
    requests: list[Tensor] = []
    hooks = [
        table.register_forward_pre_hook(lambda _, inputs: requests.extend(inputs[:1]))
        for table in tables
    ]
    try:
        yield requests
    finally:
        for hook in hooks:
            hook.remove()


def _same_numbers(indices: Tensor, x: Tensor) -> bool:
    """Whether the indices are the numbers of the examples, rounded down, in any order.

    Other indices that models look up, such as positions, differ from them.
    """
    one, other = (part.long().flatten().sort().values for part in (indices, x))
    return torch.equal(one, other)


def _is_integer(dataset: Dataset) -> bool:
    return all(torch.equal(x, x.trunc()) for x in (dataset.train_x, dataset.test_x))


def _with_extremes(dataset: Dataset) -> Tensor:
    """Four examples with the smallest and the largest numbers of the training and the test set."""
    rows = [
        x[int(x.flatten(1).amax(1).argmax() if largest else x.flatten(1).amin(1).argmin())]
        for x in (dataset.train_x, dataset.test_x)
        for largest in (False, True)
    ]
    return torch.stack(rows)


def _misfit(architecture: Architecture, dataset: Dataset, error: Exception) -> InputError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, IndexError) and "out of range" in reason:
        low, high = torch.stack([*dataset.train_x.aminmax(), *dataset.test_x.aminmax()]).aminmax()
        return InputError(
            f"model {architecture.name!r} has no embedding for some examples of {dataset.name}, "
            f"whose numbers go from {low:.0f} to {high:.0f}; number them from 0, or enlarge its "
            "nn.Embedding"
        )
    return InputError(
        f"model {architecture.name!r} does not fit data of shape {dataset.shape}: {reason}; "
        "choose another --model (see `peerage list models`)"
    )
