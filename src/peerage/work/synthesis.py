"""Synthetic examples that represent a node's data, by distribution matching.

For each class c of the node, `ipc` examples S_c start as noise and minimise

    sum_c | mean of e(a(x)) over real x of class c - mean of e(a(s)) over s in S_c |^2,

where the embedding e is a network with new random weights in every iteration, and a is a random
augmentation (shift, flip and brightness), the same for both. Only class means are compared. The
mean of a class with very few examples still reveals much, so this gives no privacy.

Zhao, Bilen, 2023. arXiv:2110.04181.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from peerage.errors import DiskError, InputError
from peerage.files import write_bytes
from peerage.randomness import torch_stream
from peerage.requests import Compute
from peerage.work.context import LocalContext
from peerage.work.evaluation import CHUNK

VERSION = 1  # of the computation; a new number invalidates cached files
LR, MOMENTUM = 1.0, 0.5  # of gradient descent on pixels
LAYERS = 3  # of an embedding; fewer if halving would make the sides of an image less than 2
AT_ONCE = 1 << 22  # numbers in a layer's output: 16 MB, so that a few fit into the cache
CHECKSUM = "sha256"  # name of its tensor in a file

Map = Callable[[Tensor], Tensor]
Synthetic = dict[int, Tensor]  # class -> [ipc, *shape]


@dataclass(frozen=True)
class Synthesis:
    """Options of the synthesis."""

    ipc: int = 50  # examples per class
    iterations: int = 1000
    batch: int = 256  # real examples per class and iteration; all if there are fewer
    width: int = 32  # filters, or units, in each layer of the random networks
    augment: bool = True  # shift, flip and brighten images at random; not for vectors

    def __post_init__(self) -> None:
        for name in ("ipc", "iterations", "batch", "width"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")


def synthesise(x: Tensor, y: Tensor, options: Synthesis, rng: torch.Generator) -> Synthetic:
    """Synthetic examples of every class, from examples x [n, *shape] with labels y."""
    shape, x = tuple(x.shape[1:]), channels_to_end(x)
    classes = sorted(set(y.tolist()))
    rows = [(y == c).nonzero().flatten() for c in classes]
    s = noise(x, (len(classes), options.ipc, *x.shape[1:]), rng)
    largest = max(options.ipc, min(options.batch, max(map(len, rows))))
    group = max(1, AT_ONCE // (largest * options.width * prod(shape[1:])))  # classes
    momentum = torch.zeros_like(s)
    for _ in range(options.iterations):
        view = random_view(shape, options, rng)
        momentum *= MOMENTUM
        for start in range(0, len(classes), group):
            some = slice(start, start + group)
            real = [x.index_select(0, draw(r, options.batch, rng)) for r in rows[some]]
            momentum[some] += matching_gradient(view, real, s[some])
        s = s - LR * momentum
    return {c: end_to_channels(images) for c, images in zip(classes, s, strict=True)}


def noise(x: Tensor, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Normal numbers with the mean and standard deviation of all numbers in x."""
    return x.mean() + x.std(correction=0) * torch.randn(shape, generator=rng)


def draw(rows: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Up to `count` of the rows, without replacement."""
    if len(rows) <= count:
        return rows
    return rows[torch.randperm(len(rows), generator=rng)[:count]]


def matching_gradient(view: Map, real: Sequence[Tensor], s: Tensor) -> Tensor:
    """The gradient of the distance at s [k, ipc, ...], for real examples of each class."""
    s = s.detach().requires_grad_()
    with torch.no_grad():
        target = class_means(view, real)
    distance = (class_means(view, list(s)) - target).square().sum()
    return torch.autograd.grad(distance, s)[0]


def class_means(view: Map, examples: Sequence[Tensor]) -> Tensor:
    """[k, e] the mean embedding of each group of examples, computed in one forward pass."""
    sizes = [len(group) for group in examples]
    groups = torch.split(view(torch.cat(list(examples))), sizes)
    return torch.stack([group.mean(0) for group in groups])


# Random networks and augmentations. Images are [B, H, W, C] here: shifts and flips keep that order
# in memory, and convolutions run fastest with it.


def random_view(shape: tuple[int, ...], options: Synthesis, rng: torch.Generator) -> Map:
    """A random augmentation, if enabled, followed by a random embedding."""
    embed = random_embedding(shape, options.width, rng)
    if not options.augment or len(shape) != 3:
        return embed
    change = random_change(shape, rng)
    return lambda x: embed(change(x))


def random_embedding(shape: tuple[int, ...], width: int, rng: torch.Generator) -> Map:
    """A network with random weights that maps examples of this shape to vectors."""
    side = min(shape[1:]) if len(shape) == 3 else 1  # of an image
    blocks = min(LAYERS, side.bit_length() - 2)  # each halves the sides, down to 2
    if blocks < 1:
        return random_perceptron(prod(shape), width, rng)
    weights = []
    for channels in [shape[0], *[width] * (blocks - 1)]:
        weight = torch.randn(width, 3, 3, channels, generator=rng) * (2 / (9 * channels)) ** 0.5
        weights.append(weight.movedim(-1, 1))

    def embed(x: Tensor) -> Tensor:
        x = x.movedim(-1, 1)
        for weight in weights:
            # One group keeps the ratios between filters, which matter most on tiny images.
            x = F.group_norm(F.conv2d(x, weight, padding=1), 1)
            x = F.avg_pool2d(F.relu(x, inplace=True), 2)
        return x.flatten(1)

    return embed


def random_perceptron(inputs: int, width: int, rng: torch.Generator) -> Map:
    """An embedding of vectors. Its layers are orthogonal, so that LR = 1 cannot diverge."""
    weights = []
    for size in (inputs, *[width] * (LAYERS - 1)):
        q = torch.linalg.qr(torch.randn(max(size, width), min(size, width), generator=rng)).Q
        weights.append(q if size >= width else q.T)  # [size, width]

    def embed(x: Tensor) -> Tensor:
        x = x.flatten(1)
        for weight in weights:
            x = F.relu(x @ weight)
        return x

    return embed


def random_change(shape: tuple[int, ...], rng: torch.Generator) -> Map:
    """One random shift by up to an eighth of a side, flip and brightness, for all images."""
    reach = torch.tensor(shape[1:]) // 8
    shift = (torch.rand(2, generator=rng) * (2 * reach + 1)).long() - reach
    down, right = shift.tolist()
    flip, brightness = torch.rand(2, generator=rng).tolist()

    def change(x: Tensor) -> Tensor:
        x = x.roll((down, right), (1, 2)) + (brightness - 0.5)
        return x.flip(2) if flip < 0.5 else x

    return change


def channels_to_end(x: Tensor) -> Tensor:
    """[B, C, H, W] as [B, H, W, C] in memory; vectors [B, d] unchanged."""
    last = x.movedim(1, -1)
    return last.flatten().view(last.shape)  # for one channel, `contiguous` may keep odd strides


def end_to_channels(x: Tensor) -> Tensor:
    """[B, H, W, C] as row-major [B, C, H, W], the order of all that is sent or saved."""
    return x.movedim(-1, 1).clone(memory_format=torch.contiguous_format)


# Requests


@dataclass(frozen=True)
class Synthesise(Compute[Synthetic]):
    """Synthetic examples of the node's own data, determined by the data, seed and options.

    They are expensive to compute, so they are cached in a file named by a hash of these inputs.
    """

    phase: ClassVar[str] = "synthesis"

    options: Synthesis

    def run(self, local: LocalContext) -> Synthetic:
        if len(local.indices) == 0:
            return {}
        x, y = local.data.take(local.indices)
        if not x.is_floating_point():
            raise InputError(
                "synthetic examples require floating-point data, but this data set has whole "
                "numbers, such as token ids; choose another algorithm"
            )
        path = None if local.cache is None else self.path(local.cache, local, x, y)
        found = read(path) if path else None
        if found is None:
            found = synthesise(x, y, self.options, self.stream(local))
            if path:
                write(path, found)
        return found

    def stream(self, local: LocalContext) -> torch.Generator:
        return torch_stream(local.seed, "synthesis", local.node)

    def path(self, cache: Path, local: LocalContext, x: Tensor, y: Tensor) -> Path:
        # Rounding depends on it, and no run may depend on the cached file of another machine.
        machine = (torch.__version__, torch.backends.cpu.get_cpu_capability())
        inputs = (VERSION, self.options, local.seed, local.node, tuple(x.shape), machine)
        key = sha256(repr(inputs).encode())
        key.update(channels_to_end(x).numpy().data)
        key.update(y.contiguous().numpy().data)
        return cache / "anchors" / f"{key.hexdigest()}.safetensors"


@dataclass(frozen=True)
class Logits(Compute[Tensor]):
    """[n, classes] logits of the node's model on examples x [n, *shape]."""

    params: Tensor
    buffers: Tensor
    x: Tensor

    def run(self, local: LocalContext) -> Tensor:
        model = local.model(self.params, self.buffers)
        model.module.eval()
        parts = torch.split(channels_to_end(self.x).movedim(-1, 1), CHUNK)
        with torch.no_grad():
            return torch.cat([model.module(part) for part in parts])


# The cache


def read(path: Path) -> Synthetic | None:
    """Read a cached file; None if it is absent or damaged, and must be computed again."""
    try:
        tensors = load(path.read_bytes())
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    checksum = tensors.pop(CHECKSUM, None)
    if checksum is None or not torch.equal(checksum, checksum_of(tensors)):
        return None
    return {c: tensors[str(c)] for c in sorted(map(int, tensors))}


def write(path: Path, made: Synthetic) -> None:
    """Write a cached file; errors of the disk are ignored, as a run does not need the cache."""
    tensors = {str(c): images for c, images in made.items()}
    with suppress(OSError, DiskError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, save({**tensors, CHECKSUM: checksum_of(tensors)}))


def checksum_of(tensors: dict[str, Tensor]) -> Tensor:
    """[32] SHA-256 over names, shapes and values."""
    checksum = sha256()
    for name, tensor in sorted(tensors.items()):
        checksum.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        checksum.update(tensor.numpy().data)
    return torch.tensor(list(checksum.digest()), dtype=torch.uint8)
