"""The loss of a batch and its gradients, by autograd or by faster analytic formulas.

With autograd, fully connected networks on small batches spend a third of their time on overhead.
Here their gradients are a few matrix products, equal to those of autograd within rounding. The last
bits may differ, because a product that is written into a larger vector may be summed in another
order. The choice depends on the model and the loss, never on the engine or worker.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from peerage.errors import InputError
from peerage.work.losses import CrossEntropy

Gradients = tuple[Tensor, ...]  # one for each parameter
Differentiate = Callable[[Tensor, Tensor], tuple[Tensor, Gradients]]


def autograd_gradients(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    tensors: Sequence[Tensor],
    clamp: float | None,
    frozen: Sequence[Tensor] = (),
) -> Differentiate:
    """A function for the gradients of any loss; a loss above the clamp gives no gradient.

    The gradient of a parameter on which the loss does not depend is zero. Layers that depend on
    `frozen` parameters alone record nothing for a backward pass, as under `torch.no_grad`.
    """

    def differentiate(x: Tensor, y: Tensor) -> tuple[Tensor, Gradients]:
        if frozen:
            with without_gradients(frozen):
                loss = loss_of(x, y)
        else:
            loss = loss_of(x, y)
        return loss_gradients(loss, tensors, clamp)

    return differentiate


def loss_gradients(
    loss: Tensor, tensors: Sequence[Tensor], clamp: float | None
) -> tuple[Tensor, Gradients]:
    """The loss, which is not clamped, and its gradients."""
    clamped = loss if clamp is None else loss.clamp(max=clamp)
    if not clamped.requires_grad:
        raise InputError(
            "the loss does not depend on any parameter that is trained; check that the model "
            "uses its trained layers, and that the loss can be differentiated"
        )
    return loss.detach(), torch.autograd.grad(clamped, tensors, materialize_grads=True)


@contextmanager
def without_gradients(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Treat parameters as constants."""
    try:
        for tensor in tensors:
            tensor.requires_grad_(False)
        yield
    finally:
        for tensor in tensors:
            tensor.requires_grad_(True)


def first_layer(tensors: Sequence[Tensor], chosen: Sequence[Tensor]) -> int | None:
    """The number of the layer where the chosen parameters of a perceptron begin.

    None if they are not those of its last layers, of which each has a weight and a bias.
    """
    left = len(tensors) - len(chosen)
    is_tail = [id(tensor) for tensor in chosen] == [id(tensor) for tensor in tensors[left:]]
    return left // 2 if is_tail and left % 2 == 0 else None


def analytic_gradients(
    module: nn.Module,
    loss: object,
    clamp: float | None = None,
    first: int = 0,
    out: Sequence[Tensor] | None = None,
) -> Differentiate | None:
    """The same for the cross-entropy of a perceptron; None for other losses and models.

    `first` is the first linear layer whose gradients are computed. They are written into `out`, the
    tensors for the gradients of all parameters, or else are new.
    """
    layers = linear_layers(module)
    if type(loss) is not CrossEntropy or not layers:
        return None
    weights = [layer.weight.detach() for layer in layers]
    biases = [layer.bias.detach() for layer in layers]
    transposed = [weight.t() for weight in weights]
    outputs: Sequence[Tensor | None] = out or [None] * (2 * len(layers))

    def differentiate(x: Tensor, y: Tensor) -> tuple[Tensor, Gradients]:
        inputs = [x.flatten(1)]  # of every layer
        for bias, weight in zip(biases[:-1], transposed[:-1], strict=True):
            inputs.append(torch.addmm(bias, inputs[-1], weight).relu_())
        logits = torch.addmm(biases[-1], inputs[-1], transposed[-1])
        log_p = torch.log_softmax(logits, 1)
        loss = torch.nn.functional.nll_loss(log_p, y)
        scale = 1.0 / len(y) if clamp is None or float(loss) <= clamp else 0.0
        e = torch.zeros_like(log_p).scatter_(1, y.unsqueeze(1), -scale)
        e = torch._log_softmax_backward_data(e, log_p, 1, log_p.dtype)
        gradients: list[Tensor] = []
        for number in range(len(weights) - 1, first - 1, -1):
            gradients += [
                torch.sum(e, 0, out=outputs[2 * number + 1]),
                torch.mm(e.t(), inputs[number], out=outputs[2 * number]),
            ]
            if number > first:
                e = torch.ops.aten.threshold_backward(e.mm(weights[number]), inputs[number], 0)
        return loss, tuple(reversed(gradients))

    return differentiate


def linear_layers(module: nn.Module) -> list[nn.Linear]:
    """The linear layers of a perceptron (flatten, then linear and ReLU in turn), or none."""
    first, *rest = list(module.children()) or [module]
    flat = _is(first, nn.Flatten) and first.start_dim == 1
    layers = [part for part in rest[::2] if isinstance(part, nn.Linear)]
    kinds = [nn.ReLU if number % 2 else nn.Linear for number in range(len(rest))]
    alternate = all(_is(part, kind) for part, kind in zip(rest, kinds, strict=True))
    if not (_is(module, nn.Sequential) and flat and alternate and len(rest) % 2):
        return []
    tensors = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    distinct = len({id(tensor) for tensor in tensors}) == len(tensors)
    plain = distinct and all(tensor is not None and tensor.requires_grad for tensor in tensors)
    return layers if plain else []


def _is(part: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of exactly this type, which a subclass is not, and has no hooks."""
    return type(part) is kind and not _hooked(part)


def _hooked(module: nn.Module) -> bool:
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks)
