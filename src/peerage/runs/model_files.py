"""Files with one trained model, for programs that do not use Peerage.

Names are those of the plain module, and tensors are row-major. `safetensors` and `pt` hold a state
dictionary, `onnx` the network itself, for batches of any size.
"""

import io
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from peerage.errors import InputError, did_you_mean
from peerage.files import write_bytes
from peerage.runs.saved_run import SavedModel

ENDINGS = {".safetensors": "safetensors", ".pt": "pt", ".pth": "pt", ".onnx": "onnx"}
TOLERANCE = 1e-3  # largest deviation by rounding, relative to the largest output


def write_model(
    model: SavedModel, path: Path, format: str | None = None, *, force: bool = False
) -> str:
    """Write a model to a new file and return its format, by default from the file's ending."""
    format = check_target(path, format, force)
    write_bytes(path, FORMATS[format](model), "write the model again")
    return format


def check_target(path: Path, format: str | None, force: bool) -> str:
    """The format of the file; raises an InputError if the file cannot be written."""
    if format is None:
        format = ENDINGS.get(path.suffix)
        if format is None:
            raise InputError(
                f"{path} has none of the endings {', '.join(ENDINGS)}; change --out, or add "
                "--format safetensors, pt or onnx"
            )
    if format not in FORMATS:
        raise InputError(f"unknown format {format!r}; {did_you_mean(format, FORMATS)}")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file to --out")
    if path.exists() and not force:
        raise InputError(f"{path} already exists; choose another --out, or add --force")
    if format == "onnx" and find_spec("onnx") is None:
        raise InputError('format onnx needs onnx; pip install "peerage[onnx]"')
    return format


def _safetensors(model: SavedModel) -> bytes:
    metadata = {"format": "pt", **_texts(model)}  # "pt" marks tensors of PyTorch
    return safetensors.torch.save(model.state_dict(), metadata)


def _pt(model: SavedModel) -> bytes:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.getvalue()


def _onnx(model: SavedModel) -> bytes:
    """The model as ONNX, traced by torch's older exporter.

    The newer one needs more packages and ten seconds to start. In a trace, whatever depends on the
    values or the number of examples is constant, so the result is tested on other examples.
    """
    import onnx  # optional, like the module below; check_target() says so if it is missing

    module, file = model.module(), io.BytesIO()
    axes = {"x": {0: "batch"}, "logits": {0: "batch"}}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module,
                (model.example,),
                file,  # type: ignore[arg-type]  # the older exporter takes an open file
                input_names=["x"],
                output_names=["logits"],
                dynamic_axes=axes,
                dynamo=False,
            )
    except Exception as error:  # a user's own module may fail in any way
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            f"torch cannot export {model.architecture.name} to ONNX: {reason}; use safetensors or "
            "pt"
        ) from None
    proto = onnx.load_from_string(file.getvalue())
    onnx.helper.set_model_props(proto, _texts(model))
    _check_outputs(model, module, proto)
    content: bytes = proto.SerializeToString()
    return content


def _check_outputs(model: SavedModel, module: torch.nn.Module, proto: Any) -> None:
    """Raise an error if file and module give different outputs for a batch of another size."""
    from onnx.reference import ReferenceEvaluator

    shape = (3, *model.example.shape[1:])
    stream = torch.Generator().manual_seed(0)
    x = torch.rand(shape, generator=stream).to(model.example.dtype)
    with torch.no_grad():
        expected = module(x)
    try:
        outputs: Any = ReferenceEvaluator(proto).run(None, {"x": x.numpy()})
        found = torch.from_numpy(outputs[0])
        same = found.shape == expected.shape and float((found - expected).abs().max()) <= (
            TOLERANCE * max(float(expected.abs().max()), 1.0)
        )
    except Exception:  # a network traced for one batch size fails in many ways
        same = False
    if not same:
        raise InputError(
            f"{model.architecture.name} gives other outputs as ONNX than as a module, perhaps "
            "because it depends on the batch size or on values; use safetensors or pt"
        )


def _texts(model: SavedModel) -> dict[str, str]:
    """The origin of the model, as metadata of a file."""
    return {key: str(value) for key, value in model.facts.items()}


FORMATS: dict[str, Callable[[SavedModel], bytes]] = {
    "safetensors": _safetensors,
    "pt": _pt,
    "onnx": _onnx,
}
