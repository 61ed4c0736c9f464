"""Files with the values of one model: read them, and fit them to an architecture.

A file holds a state dictionary, as safetensors or as `torch.save` writes it. Nothing is unpickled
but tensors.
"""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from peerage.errors import InputError
from peerage.models.start import Architecture
from peerage.vectors import Weights, all_finite, float_buffers, trained_parameters

TENSORS = "save a state dictionary with safetensors or torch.save"


def read_model(path: Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of a model file by name; raises an InputError if its content has changed."""
    return parse_model(read_file(path, sha256), path)


def read_file(path: Path, sha256: str) -> bytes:
    """The content of a model file; raises an InputError if it has another hash."""
    content = _read(path)
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise InputError(
            f"model file {path} has the SHA-256 {found[:12]}..., but the experiment expects "
            f"{sha256[:12]}...; restore the file, or remove sha256 from the experiment"
        )
    return content


def hash_file(path: Path) -> str:
    """The SHA-256 of a model file."""
    return hashlib.sha256(_read(path)).hexdigest()


def parse_model(content: bytes, path: Path) -> dict[str, Tensor]:
    """The tensors in the content of a model file, whose path is for messages only."""
    try:
        if path.suffix in (".pt", ".pth"):
            tensors: Any = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        else:
            tensors = safetensors.torch.load(content)
    except (SafetensorError, RuntimeError, ValueError, KeyError, EOFError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"{path} is no model file ({reason}); {TENSORS}") from None
    except Exception as error:  # pickle raises many kinds
        raise InputError(f"{path} is no model file ({type(error).__name__}); {TENSORS}") from None
    if not isinstance(tensors, Mapping) or not all(
        isinstance(value, Tensor) for value in tensors.values()
    ):
        raise InputError(f"{path} holds other things than named tensors; {TENSORS}")
    return dict(tensors)


def fit_model(tensors: Mapping[str, Tensor], architecture: Architecture, source: Path) -> Weights:
    """The tensors as a model of an architecture; `source` is their file.

    Raises an InputError that names the first tensor that does not fit.
    """
    module = architecture.specimen()
    _check_names(tensors, module, architecture, source)
    module.load_state_dict(dict(tensors), strict=False)
    for name, value in architecture.constants.items():
        if name in tensors and not torch.equal(module.get_parameter(name).data, value):
            raise _misfit(name, architecture, source, "has other values than the frozen parameter")
    named, buffers = trained_parameters(module), float_buffers(module)
    return Weights(
        architecture.layout.flatten(dict(named)),
        architecture.buffer_layout.flatten(dict(buffers)),
        architecture.name,
    )


def _check_names(
    tensors: Mapping[str, Tensor], module: nn.Module, architecture: Architecture, source: Path
) -> None:
    """Raise an InputError for the first tensor that is missing, unknown or does not fit."""
    wanted = module.state_dict()
    given = {wanted[name].data_ptr() for name in tensors if name in wanted}
    for name, value in wanted.items():
        if name not in tensors:
            # Counters have no influence, and weights that layers share may be stored once.
            if value.is_floating_point() and value.data_ptr() not in given:
                raise _misfit(name, architecture, source, "is missing in the file")
            continue
        found = tensors[name]
        if found.shape != value.shape:
            shapes = f"{tuple(found.shape)} in the file and {tuple(value.shape)} in the model"
            raise _misfit(name, architecture, source, f"has the shape {shapes}")
        if value.is_floating_point() != found.is_floating_point():
            kinds = f"{found.dtype} in the file and {value.dtype} in the model"
            raise _misfit(name, architecture, source, f"has the type {kinds}")
        if not all_finite(found):
            raise _misfit(name, architecture, source, "has NaN or infinite entries in the file")
    for name in tensors:
        if name not in wanted:
            raise _misfit(name, architecture, source, "is in the file, but not in the model")


def _misfit(name: str, architecture: Architecture, source: Path, reason: str) -> InputError:
    return InputError(
        f"model file {source} does not fit model {architecture.name!r}: tensor {name!r} {reason}; "
        "use the --model of the file"
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read model file {path}: {error.strerror}; give a file that `peerage model` "
            "wrote, as in --init file:model.safetensors"
        ) from None
