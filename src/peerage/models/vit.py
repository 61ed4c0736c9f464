"""Vision transformers for small images (P1).

Dosovitskiy et al., 2021. arXiv:2010.11929. Shifted patch tokenisation and locality self-attention
make up for the lack of pretraining: Lee, Lee, Song, 2021. arXiv:2112.13492.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerage import specs
from peerage.errors import InputError, check_at_least
from peerage.models.base import check_dropout, dropout, image_shape
from peerage.models.scaled import ChannelAxis, Channels, NamedAxes, layer_axes, norm_axes

HEAD_DIMENSION = 64
WIDTH = Channels("width")  # of the tokens, which residual connections carry through all blocks
COPIES = 5  # of the image: itself, and shifted by half a patch in the four diagonal directions


class PatchTokens(nn.Module):
    """Shifted patch tokenisation: the tokens [B, T, D] of an image, with their positions.

    The image and its four shifted copies are stacked as channels and cut into patches; layer norm
    and a linear layer make each patch a token. A class token comes first.
    """

    def __init__(self, image: tuple[int, int, int], patch: int, width: int) -> None:
        super().__init__()
        channels, height, columns = image
        pixels = COPIES * channels * patch**2
        self.patch = patch
        self.norm = nn.LayerNorm(pixels)
        self.linear = nn.Linear(pixels, width)
        self.class_token = nn.Parameter(torch.empty(width))
        tokens = 1 + (height // patch) * (columns // patch)
        self.positions = nn.Parameter(torch.empty(tokens, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw class token and positions from the standard normal distribution."""
        nn.init.normal_(self.class_token)
        nn.init.normal_(self.positions)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.linear(self.norm(patches(shifted(x, self.patch // 2), self.patch)))
        first = self.class_token.expand(x.shape[0], 1, -1)  # len(x) would be fixed in ONNX
        return torch.cat([first, tokens], dim=1) + self.positions

    def channel_axes(self, name: str) -> NamedAxes:
        yield from layer_axes(f"{name}.linear", self.linear, outputs=WIDTH)
        yield f"{name}.class_token", (ChannelAxis(0, *WIDTH),)
        yield f"{name}.positions", (ChannelAxis(1, *WIDTH),)


def shifted(x: Tensor, by: int) -> Tensor:
    """The image [B, C, H, W] and its diagonal shifts, as channels [B, 5 C, H, W]; zeros move in."""
    height, width = x.shape[2:]
    wide, ends = F.pad(x, (by, by, by, by)), (0, 2 * by)
    copies = [wide[:, :, j : j + height, i : i + width] for i in ends for j in ends]
    return torch.cat([x, *copies], dim=1)


def patches(x: Tensor, side: int) -> Tensor:
    """Square patches of an image [B, C, H, W] as rows [B, T, side * side * C]."""
    batch, channels, height, width = x.shape
    rows, columns = height // side, width // side
    cut = x.permute(0, 2, 3, 1).reshape(batch, rows, side, columns, side, channels)
    return cut.transpose(2, 3).reshape(batch, rows * columns, side * side * channels)


class LocalAttention(nn.Module):
    """Locality self-attention: no token attends to itself, and every head learns its scale.

    Without `output_layer`, the tokens must be as wide as the heads together.
    """

    def __init__(self, width: int, heads: int, drop: float, output_layer: bool = True) -> None:
        super().__init__()
        inner = heads * HEAD_DIMENSION
        self.heads = heads
        self.query = nn.Linear(width, inner, bias=False)
        self.key = nn.Linear(width, inner, bias=False)
        self.value = nn.Linear(width, inner, bias=False)
        self.scale = nn.Parameter(torch.empty(heads))
        self.drop_weights = dropout(drop)
        self.out = nn.Linear(inner, width) if output_layer else None
        self.drop = dropout(drop) if output_layer else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let every head start with the usual scale, one over the root of its dimension."""
        nn.init.constant_(self.scale, HEAD_DIMENSION**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = q @ k.transpose(2, 3) * self.scale[:, None, None]  # [B, heads, T, T]
        itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        weights = self.drop_weights(scores.masked_fill(itself, float("-inf")).softmax(-1))
        together = (weights @ v).transpose(1, 2).flatten(2)  # [B, T, heads * dimension]
        out: Tensor = self.drop(together if self.out is None else self.out(together))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, heads * dimension] as [B, heads, T, dimension]."""
        return x.view(*x.shape[:2], self.heads, HEAD_DIMENSION).transpose(1, 2)

    def channel_axes(self, name: str) -> NamedAxes:
        heads = Channels(f"{name}.heads")
        inner = heads._replace(block=HEAD_DIMENSION)
        yield from layer_axes(f"{name}.query", self.query, WIDTH, inner)
        yield from layer_axes(f"{name}.key", self.key, WIDTH, inner)
        # Without an output layer, the values themselves are added to the tokens.
        values = WIDTH if self.out is None else inner
        yield from layer_axes(f"{name}.value", self.value, WIDTH, values)
        yield f"{name}.scale", (ChannelAxis(0, *heads),)
        if self.out is not None:
            yield from layer_axes(f"{name}.out", self.out, inner, WIDTH)


class TransformerBlock(nn.Module):
    """Attention and two linear layers with GELU, each after layer norm and added to its input."""

    def __init__(self, attention: LocalAttention, width: int, hidden: int, drop: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, hidden)
        self.gelu = nn.GELU()
        self.drop1 = dropout(drop)
        self.out = nn.Linear(hidden, width)
        self.drop2 = dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.drop1(self.gelu(self.hidden(self.norm2(x))))
        out: Tensor = x + self.drop2(self.out(h))
        return out

    def channel_axes(self, name: str) -> NamedAxes:
        hidden = Channels(f"{name}.hidden")
        yield from norm_axes(f"{name}.norm1", self.norm1, WIDTH)
        yield from self.attention.channel_axes(f"{name}.attention")
        yield from norm_axes(f"{name}.norm2", self.norm2, WIDTH)
        yield from layer_axes(f"{name}.hidden", self.hidden, WIDTH, hidden)
        yield from layer_axes(f"{name}.out", self.out, hidden, WIDTH)


class FirstToken(nn.Module):
    """The class token [B, D] of the tokens [B, T, D]."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class ViTLayers(nn.Sequential):
    """The layers of `ViT`; widths and whole heads are cut, never the dimension of a head."""

    def channel_axes(self) -> NamedAxes:
        for name, layer in self.named_children():
            if isinstance(layer, PatchTokens | TransformerBlock):
                yield from layer.channel_axes(name)
            elif isinstance(layer, nn.LayerNorm):
                yield from norm_axes(name, layer, WIDTH)
            elif isinstance(layer, nn.Linear):
                yield from layer_axes(name, layer, inputs=WIDTH)


@dataclass(frozen=True)
class ViT:
    """Vision transformer for small images without pretraining; 3 316 730 parameters on 3x32x32.

    For the DFML experiments (P1), with shifted patch tokenisation and locality self-attention.
    Heads have 64 dimensions; there are width / 64 of them, and at least one. The paper does not
    state this number, nor the width of the hidden layer of a block, here `mlp` times the width.
    """

    width: int = 512
    depth: int = 2  # blocks
    patch: int = 4  # pixels of its side; must divide the sides of images
    mlp: int = 1  # hidden units of a block, in multiples of the width
    dropout: float = 0.1
    embedding_dropout: float = 0.1
    # Whether attention has an output layer: always, or as in the reference code not where one head
    # is as wide as the tokens (width 64). That model is then no scaled version of the others.
    output_layer: Literal["always", "reference"] = "always"

    def __post_init__(self) -> None:
        specs.check_choices(self)
        for name in ("width", "depth", "patch", "mlp"):
            check_at_least(name, getattr(self, name), 1)
        check_dropout("dropout", self.dropout)
        check_dropout("embedding_dropout", self.embedding_dropout)
        if self.width > HEAD_DIMENSION and self.width % HEAD_DIMENSION:
            raise InputError(
                f"width must be a multiple of {HEAD_DIMENSION}, the dimension of a head, or at "
                f"most {HEAD_DIMENSION}, got {self.width}"
            )

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        image = image_shape("vit", shape, least=self.patch)
        if image[1] % self.patch or image[2] % self.patch:
            raise InputError(
                f"model 'vit' cuts images into patches of {self.patch}x{self.patch}, but the data "
                f"has images of {image[1]}x{image[2]}; choose a patch that divides both sides, as "
                "in vit:patch=2"
            )
        blocks = {f"block{number}": self._block() for number in range(1, self.depth + 1)}
        layers: dict[str, nn.Module] = {
            "tokens": PatchTokens(image, self.patch, self.width),
            "drop": dropout(self.embedding_dropout),
            **blocks,
            "first": FirstToken(),
            "norm": nn.LayerNorm(self.width),
            "head": nn.Linear(self.width, classes),
        }
        return ViTLayers(OrderedDict(layers))

    def _block(self) -> TransformerBlock:
        heads = max(1, self.width // HEAD_DIMENSION)
        output_layer = self.output_layer == "always" or (heads, self.width) != (1, HEAD_DIMENSION)
        attention = LocalAttention(self.width, heads, self.dropout, output_layer)
        return TransformerBlock(attention, self.width, self.mlp * self.width, self.dropout)
