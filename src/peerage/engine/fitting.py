"""Whether a model fits the data, and whether it takes examples as float32 or as whole numbers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from peerage.data import Dataset
from peerage.errors import InputError
from peerage.models.start import Architecture

TABLES = (nn.Embedding, nn.EmbeddingBag)
FAILURES = (RuntimeError, ValueError, TypeError, IndexError)  # of a model that cannot take examples


def check_fit(architecture: Architecture, dataset: Dataset) -> torch.dtype:
    """The type of examples for the model: float32, or int64 if it looks them up in an embedding.

    It is tried out, so that a model that does not fit the data says so before the run.
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
    # The smallest and the largest id show whether an embedding has a row for each.
    x = _with_extremes(dataset) if tables else dataset.train_x[:2]
    dtype = torch.float32
    with _requests(tables) as requested:
        outcome = _attempt(module, x)
    looked_up = any(_holds(indices, x) for indices in requested)
    whole = (looked_up or isinstance(outcome, Exception)) and _is_whole(dataset)
    if looked_up and not whole:
        raise InputError(
            f"model {architecture.name!r} looks the examples of {dataset.name} up in an "
            "nn.Embedding, but they are not whole numbers; if they are bytes, which are divided by "
            "255, say scale=false, else give whole numbers"
        )
    if whole:
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
                f"model {integers[0]!r} takes whole numbers only and model {name!r} takes none; "
                "convert the examples inside the models, with x.long() or x.float()"
            )
    return torch.int64 if integers else torch.float32


def _attempt(module: nn.Module, x: Tensor) -> tuple[int, ...] | Exception:
    """The shape of the outputs, or what went wrong."""
    try:
        with torch.no_grad():
            return tuple(module(x).shape)
    except FAILURES as error:
        return error


@contextmanager
def _requests(tables: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """A list that fills with what the embeddings are asked for."""
    requested: list[Tensor] = []
    hooks = [
        table.register_forward_pre_hook(lambda _, inputs: requested.extend(inputs[:1]))
        for table in tables
    ]
    try:
        yield requested
    finally:
        for hook in hooks:
            hook.remove()


def _holds(indices: Tensor, x: Tensor) -> bool:
    """Whether these are the numbers of the examples, rounded down, in any order.

    What else models look up, such as positions, are other numbers.
    """
    one, other = (part.long().flatten().sort().values for part in (indices, x))
    return torch.equal(one, other)


def _is_whole(dataset: Dataset) -> bool:
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
