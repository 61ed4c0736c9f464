"""Synthetic examples that stand for a node's own: distribution matching.

For each class c that the node holds, `ipc` examples S_c start as noise and descend on

    sum_c | mean of e(a(x)) over real x of class c - mean of e(a(s)) over s in S_c |^2,

where the embedding e is a network with fresh random weights in every iteration and a is a random
change (a shift, a flip, a brightness) that both sides share. Only means over a class are ever
compared. Of a class with very few examples they still tell a lot: this promises no privacy.

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

VERSION = 1  # of what is computed: another number makes older files in the cache unknown
LR, MOMENTUM = 1.0, 0.5  # of the descent on pixels
LAYERS = 3  # of an embedding; fewer where the halved sides of an image would go below 2
AT_ONCE = 1 << 22  # numbers in a layer's output: 16 MB, of which a few stay in the cache
SEAL = "sha256"

Map = Callable[[Tensor], Tensor]
Synthetic = dict[int, Tensor]  # class -> [ipc, *shape]


@dataclass(frozen=True)
class Synthesis:
    """How many synthetic examples are made, and with how much work."""

    ipc: int = 50  # examples per class
    iterations: int = 1000
    batch: int = 256  # real examples of a class in an iteration; all of them if there are fewer
    width: int = 32  # filters, or units, in each layer of the random networks
    augment: bool = True  # shift, flip and brighten images at random; vectors stay as they are

    def __post_init__(self) -> None:
        for name in ("ipc", "iterations", "batch", "width"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")


def synthesise(x: Tensor, y: Tensor, options: Synthesis, rng: torch.Generator) -> Synthetic:
    """Synthetic examples of every class among the labels y of the examples x [n, *shape]."""
    shape, x = tuple(x.shape[1:]), channels_to_end(x)
    classes = sorted(set(y.tolist()))
    rows = [(y == c).nonzero().flatten() for c in classes]
    s = noise(x, (len(classes), options.ipc, *x.shape[1:]), rng)
    largest = max(options.ipc, min(options.batch, max(map(len, rows))))
    together = max(1, AT_ONCE // (largest * options.width * prod(shape[1:])))  # classes
    momentum = torch.zeros_like(s)
    for _ in range(options.iterations):
        view = random_view(shape, options, rng)
        momentum *= MOMENTUM
        for start in range(0, len(classes), together):
            some = slice(start, start + together)
            real = [x.index_select(0, draw(r, options.batch, rng)) for r in rows[some]]
            momentum[some] += matching_gradient(view, real, s[some])
        s = s - LR * momentum
    return {c: end_to_channels(images) for c, images in zip(classes, s, strict=True)}


def noise(x: Tensor, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Normal numbers with the mean and the spread of all numbers in x."""
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
        wanted = class_means(view, real)
    distance = (class_means(view, list(s)) - wanted).square().sum()
    return torch.autograd.grad(distance, s)[0]


def class_means(view: Map, examples: Sequence[Tensor]) -> Tensor:
    """[k, e] the mean vector of each group of examples, all of them seen in one pass."""
    sizes = [len(group) for group in examples]
    groups = torch.split(view(torch.cat(list(examples))), sizes)
    return torch.stack([group.mean(0) for group in groups])


# Random networks and changes. Here the channels of images come last, [B, H, W, C]: shifts and flips
# keep that order in memory, and convolutions run fastest with it.


def random_view(shape: tuple[int, ...], options: Synthesis, rng: torch.Generator) -> Map:
    """A random change, if it is wanted, and then a random embedding."""
    embed = random_embedding(shape, options.width, rng)
    if not options.augment or len(shape) != 3:
        return embed
    change = random_change(shape, rng)
    return lambda x: embed(change(x))


def random_embedding(shape: tuple[int, ...], width: int, rng: torch.Generator) -> Map:
    """A network with random weights from examples of this shape to vectors."""
    side = min(shape[1:]) if len(shape) == 3 else 1  # of an image
    blocks = min(LAYERS, side.bit_length() - 2)  # each halves the sides, of which 2 must be left
    if blocks < 1:
        return random_perceptron(prod(shape), width, rng)
    weights = []
    for channels in [shape[0], *[width] * (blocks - 1)]:
        weight = torch.randn(width, 3, 3, channels, generator=rng) * (2 / (9 * channels)) ** 0.5
        weights.append(weight.movedim(-1, 1))

    def embed(x: Tensor) -> Tensor:
        x = x.movedim(-1, 1)
        for weight in weights:
            # One group keeps what filters say relative to each other; on an image of a few pixels,
            # that is nearly all there is.
            x = F.group_norm(F.conv2d(x, weight, padding=1), 1)
            x = F.avg_pool2d(F.relu(x, inplace=True), 2)
        return x.flatten(1)

    return embed


def random_perceptron(inputs: int, width: int, rng: torch.Generator) -> Map:
    """For vectors. Orthogonal layers lengthen nothing, so that steps of length 1 cannot diverge."""
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
    """One shift by up to an eighth of a side, flip and brightness, for all images alike."""
    reach = torch.tensor(shape[1:]) // 8
    shift = (torch.rand(2, generator=rng) * (2 * reach + 1)).long() - reach
    down, right = shift.tolist()
    flip, brightness = torch.rand(2, generator=rng).tolist()

    def change(x: Tensor) -> Tensor:
        x = x.roll((down, right), (1, 2)) + (brightness - 0.5)
        return x.flip(2) if flip < 0.5 else x

    return change


def channels_to_end(x: Tensor) -> Tensor:
    """[B, C, H, W] as [B, H, W, C] in memory; vectors [B, d] as they are."""
    last = x.movedim(1, -1)
    return last.flatten().view(last.shape)  # for one channel, `contiguous` may keep odd strides


def end_to_channels(x: Tensor) -> Tensor:
    """The other way round, row by row in memory, as everything that is sent or saved."""
    return x.movedim(-1, 1).clone(memory_format=torch.contiguous_format)


# What an algorithm awaits


@dataclass(frozen=True)
class Synthesise(Compute[Synthetic]):
    """Synthetic examples of the node's own data: the same for the same data, seed and options.

    They are dear, so a file in the cache keeps them under a name that all of this decides about.
    """

    phase: ClassVar[str] = "synthesis"

    options: Synthesis

    def run(self, local: LocalContext) -> Synthetic:
        if len(local.indices) == 0:
            return {}
        x, y = local.data.take(local.indices)
        if not x.is_floating_point():
            raise InputError(
                "synthetic examples cannot be made of whole numbers that a model looks up, such as "
                "token ids; choose another algorithm"
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
        # It decides about rounding, and no run may depend on what another left in the cache.
        machine = (torch.__version__, torch.backends.cpu.get_cpu_capability())
        about = (VERSION, self.options, local.seed, local.node, tuple(x.shape), machine)
        key = sha256(repr(about).encode())
        key.update(channels_to_end(x).numpy().data)
        key.update(y.contiguous().numpy().data)
        return cache / "anchors" / f"{key.hexdigest()}.safetensors"


@dataclass(frozen=True)
class Logits(Compute[Tensor]):
    """[n, classes] what the node's model says about examples x [n, *shape] that it was sent."""

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
    """What a file holds; None for one that is absent or damaged, which is then made anew."""
    try:
        tensors = load(path.read_bytes())
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    seal = tensors.pop(SEAL, None)
    if seal is None or not torch.equal(seal, sealed(tensors)):
        return None
    return {c: tensors[str(c)] for c in sorted(map(int, tensors))}


def write(path: Path, made: Synthetic) -> None:
    """Keep it if the disk allows: a run does not need the cache."""
    tensors = {str(c): images for c, images in made.items()}
    with suppress(OSError, DiskError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, save({**tensors, SEAL: sealed(tensors)}))


def sealed(tensors: dict[str, Tensor]) -> Tensor:
    """[32] a digest of names, shapes and values."""
    digest = sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.numpy().data)
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)
