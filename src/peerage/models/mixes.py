"""Named mixes of models, which nodes take in turn: the modes of P1 (Table 10).

In H0 all models are equal, in H1 they differ in width alone, in H2 also in depth. The order is that
of the table.
"""

from typing import NamedTuple

RESNETS = tuple(f"preact-resnet:widths={w}+{2 * w}+{4 * w}+{8 * w}" for w in (64, 32, 16, 8, 4))
VITS = tuple(f"vit:width={width}" for width in (512, 256, 128, 64, 32))
CNNS = tuple(
    f"dfml-cnn:channels={channels}"
    for channels in ("32+64+128+256", "32+64+128", "32+64", "16+32+64", "8+16+32+64")
)


class Mix(NamedTuple):
    """Several models under one name."""

    about: str
    members: tuple[str, ...]


MIXES = {
    "h0-cnn": Mix("Convolutional networks of mode H0, all alike.", ("dfml-cnn:channels=32+64",)),
    "h1-cnn": Mix(
        "Convolutional networks of five widths, mode H1.",
        tuple(f"dfml-cnn:channels={w}+{2 * w}" for w in (128, 64, 32, 16, 8)),
    ),
    "h1-resnet": Mix("Pre-activated ResNets of five widths, mode H1.", RESNETS),
    "h1-vit": Mix("Vision transformers of five widths, mode H1.", VITS),
    "h2-cnn": Mix("Convolutional networks of different depths and widths, mode H2.", CNNS),
    "h2-efficientnet": Mix(
        "EfficientNet B0 to B4, mode H2.",
        tuple(f"efficientnet:variant=b{number}" for number in range(5)),
    ),
    "ten-architectures": Mix(
        "Two vision transformers, four ResNets and four convolutional networks (P1 Fig. 6).",
        (*VITS[:2], *RESNETS[:4], *CNNS[:4]),
    ),
}
