"""The sum of squared per-example gradients: the diagonal of the empirical Fisher information.

For examples b with losses l_b and parameters w this is  h = sum_b (dl_b/dw)^2, element by
element. Plain backpropagation only yields sum_b dl_b/dw, whose square is different.

For linear and convolutional layers, h has a closed form in the input a_b of a layer and the
gradient e_b of its output, which backpropagation computes anyway. Other networks use `torch.func`,
which is slower; `benchmarks/persample.py` compares both. The idea is from BackPACK: Dangel,
Kunstner, Hennig, 2020. arXiv:1912.10985.
"""

from collections.abc import Callable
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap

from peerage.vectors import trained_parameters

Loss = Callable[[Tensor, Tensor], Tensor]
Layer = nn.Linear | nn.Conv2d

_CACHE = 2**18  # numbers that fit into the second-level cache of a core: 1 MB
_MEMORY = 2**23  # numbers in per-example gradients at once: 32 MB


def sum_squared_gradients(module: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """For each trained parameter, the sum over examples of the squared gradient of their loss.

    The loss must be a mean over examples. The gradient at an example's outputs, times the batch
    size, is then that of the example's own loss. The module must be in eval mode and use each
    parameter in one layer only. Parameters, their `.grad` and hooks are not changed.
    """
    layers = _layers(module)
    signals = _backpropagate(module, layers, loss, x, y) if layers else []
    if not signals:
        return squares_by_vmap(module, loss, x, y)
    squares = {}
    for layer, (a, e) in zip(layers, signals, strict=True):
        weight, bias = _conv(layer, a, e) if isinstance(layer, nn.Conv2d) else _linear(a, e)
        squares[layer.weight] = weight
        if layer.bias is not None:
            squares[layer.bias] = bias
    return {name: squares[parameter] for name, parameter in trained_parameters(module)}


def squares_by_vmap(module: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The same for any module, from batches of per-example gradients."""
    parameters = {name: parameter.detach() for name, parameter in trained_parameters(module)}

    def own_loss(parameters: dict[str, Tensor], example: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(module, parameters, (example.unsqueeze(0),))
        return loss(logits, label.unsqueeze(0))

    gradients = vmap(grad(own_loss), in_dims=(None, 0, 0))
    at_once = max(1, _MEMORY // sum(parameter.numel() for parameter in parameters.values()))
    squares = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for examples, labels in zip(torch.split(x, at_once), torch.split(y, at_once), strict=True):
        for name, g in gradients(parameters, examples, labels).items():
            squares[name] += g.square().sum(0)
    return squares


def _layers(module: nn.Module) -> list[Layer]:
    """The layers with trained parameters; empty unless each of them has a closed form."""
    owners = [
        owner
        for owner in module.modules()
        if any(parameter.requires_grad for parameter in owner.parameters(recurse=False))
    ]
    layers = [owner for owner in owners if _has_closed_form(owner)]
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    is_shared = len(names) > len(list(module.parameters()))
    return [] if is_shared or len(layers) < len(owners) else layers


def _has_closed_form(layer: nn.Module) -> TypeGuard[Layer]:
    named = dict(layer.named_parameters())
    if not named.keys() <= {"weight", "bias"} or not all(p.requires_grad for p in named.values()):
        return False
    if type(layer) is nn.Conv2d:
        pads_zeros = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return layer.groups == 1 and pads_zeros
    return type(layer) is nn.Linear  # not a subclass, which may compute something else


def _backpropagate(
    module: nn.Module, layers: list[Layer], loss: Loss, x: Tensor, y: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Input and output gradient of each layer; empty unless each runs exactly once on the batch."""
    calls: dict[nn.Module, list[tuple[Tensor, GradientEdge]]] = {layer: [] for layer in layers}

    def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        # An edge, because the output itself may be overwritten by an in-place activation.
        calls[layer] += [(a.detach(), get_gradient_edge(output)) for a in inputs]

    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        with torch.enable_grad():
            total = len(x) * loss(module(x), y)
    finally:
        for handle in handles:
            handle.remove()
    if not all(_ran_once(layer, calls[layer], len(x)) for layer in layers):
        return []
    inputs, edges = zip(*(calls[layer][0] for layer in layers), strict=True)
    errors = torch.autograd.grad(total, edges, allow_unused=True)
    signals = [(a, e) for a, e in zip(inputs, errors, strict=True) if e is not None]
    return signals if len(signals) == len(layers) else []


def _ran_once(layer: Layer, calls: list[tuple[Tensor, GradientEdge]], batch: int) -> bool:
    """Whether the layer saw the batch as [B, i] or [B, c, h, w], which the closed forms assume."""
    shapes = [a.shape for a, _ in calls]
    return len(shapes) == 1 and len(shapes[0]) == layer.weight.dim() and shapes[0][0] == batch


def _linear(a: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients are outer products e_b a_b^T, so their squares are outer products of squares."""
    e = e.square()
    return e.T @ a.square(), e.sum(0)  # [o, i], [o]


def _conv(layer: nn.Conv2d, a: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of an example is the matrix product of its errors and its image patches."""
    batch, outputs, rows, columns = e.shape
    positions, inputs = rows * columns, layer.weight[0].numel()
    e = e.permute(0, 2, 3, 1).reshape(batch, positions, outputs)
    weight = e.new_zeros(outputs, inputs)
    at_once = max(1, _CACHE // (inputs * max(positions, outputs)))
    for some_a, some_e in zip(torch.split(a, at_once), torch.split(e, at_once), strict=True):
        patches = _patches(layer, some_a, rows, columns).reshape(-1, positions, inputs)
        g = some_e.transpose(1, 2) @ patches  # [b, o, i]
        weight += g.square_().sum(0)
    weight = weight.view(outputs, *layer.kernel_size, -1).permute(0, 3, 1, 2)
    return weight, e.sum(1).square().sum(0)


def _patches(layer: nn.Conv2d, a: Tensor, rows: int, columns: int) -> Tensor:
    """Inputs of each output position, [b, rows, columns, kernel height, kernel width, channels].

    It is a view of the padded image. With channels last, copying it moves long runs of memory.
    """
    vertical, horizontal = map(int, layer.padding)
    padding = (0, 0, horizontal, horizontal, vertical, vertical)
    image = F.pad(a.permute(0, 2, 3, 1), padding).contiguous()
    one, down, right, channel = image.stride()
    steps = (down * layer.stride[0], right * layer.stride[1])
    taps = (down * layer.dilation[0], right * layer.dilation[1])
    shape = (len(a), rows, columns, *layer.kernel_size, layer.in_channels)
    return image.as_strided(shape, (one, *steps, *taps, channel))
