"""Shifts of images by hand, and the exact way from normalised numbers to values in [0, 1]."""

from pathlib import Path

import numpy as np
import pytest
import torch

from peerage.data.datasets import MNIST_SCALING, Cifar10, Digits
from peerage.data.scaling import Scaling
from peerage.data.shifts import Colour, Labels, Rotate, parse_labels
from peerage.errors import InputError

PICTURE = torch.arange(6.0).view(1, 1, 2, 3) / 6
SQUARE = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).view(2, 3, 4, 4) / 96


@pytest.mark.parametrize("angle", [90, 180, 270, 450, -90])
def test_quarter_turns_move_pixels_and_change_none(angle: float) -> None:
    turned = Rotate((0, angle))(SQUARE, 1)
    wanted = np.rot90(SQUARE.numpy(), angle // 90, (2, 3))
    assert np.array_equal(turned.numpy(), wanted)


@pytest.mark.parametrize("quarter", [1, 2, 3])
def test_other_angles_turn_the_same_way(quarter: int) -> None:
    exact = Rotate((90.0 * quarter,))(SQUARE, 0)
    near = Rotate((90.0 * quarter + 1e-3,))(SQUARE, 0)
    assert not torch.equal(near, exact)
    # The pixels at the border mix with the darkness outside, but only a little.
    torch.testing.assert_close(near, exact, rtol=0, atol=1e-3)


def test_an_eighth_turn_by_hand() -> None:
    """A dot 2 pixels right of the centre comes up and to the right, in the middle of four."""
    picture = torch.zeros(1, 1, 7, 7)
    picture[0, 0, 3, 5] = 1.0
    turned = Rotate((45.0,))(picture, 0)[0, 0]
    assert turned.argmax() == 2 * 7 + 4  # one row up, one column right: 1.41 of 2 pixels
    assert float(turned[:3, 4:].sum()) > 0.6
    assert float(turned[4:].sum()) == 0.0


def test_a_wide_picture_can_be_turned_upside_down_only() -> None:
    assert torch.equal(Rotate((180,))(PICTURE, 0), PICTURE.flip(2, 3))
    with pytest.raises(InputError, match="2 x 3 pixels by 90 degrees changes their shape"):
        Rotate((90,))(PICTURE, 0)


def test_angles_are_a_full_turn_divided_by_the_clusters() -> None:
    assert Rotate().fit(2).angles == (0, 180)
    assert Rotate().fit(4).angles == (0, 90, 180, 270)
    assert Rotate((0, 90, 180)).fit(3).angles == (0, 90, 180)
    with pytest.raises(InputError, match="angles has 2 values for 3 clusters; give one per clus"):
        Rotate((0, 180)).fit(3)


def test_filters_by_hand() -> None:
    x = torch.tensor([0.8, 0.4, 0.2]).view(1, 3, 1, 1)
    luma = 0.299 * 0.8 + 0.587 * 0.4 + 0.114 * 0.2
    wanted = {
        "none": [0.8, 0.4, 0.2],
        "saturated": [1.0, 2 * 0.4 - luma, 0.0],  # both ends are clamped
        "sepia": [
            0.393 * 0.8 + 0.769 * 0.4 + 0.189 * 0.2,
            0.349 * 0.8 + 0.686 * 0.4 + 0.168 * 0.2,
            0.272 * 0.8 + 0.534 * 0.4 + 0.131 * 0.2,
        ],
        "grey": [1.4 / 3] * 3,
        "red": [0.8, 0.2, 0.1],
        "green": [0.4, 0.4, 0.1],
        "blue": [0.4, 0.2, 0.2],
    }
    shift = Colour().fit(len(wanted))
    assert shift.filters == tuple(wanted)
    for cluster, values in enumerate(wanted.values()):
        found = shift(x, cluster)
        assert found.shape == x.shape
        torch.testing.assert_close(found.flatten(), torch.tensor(values))


def test_colours_need_three_channels_and_pictures() -> None:
    with pytest.raises(InputError, match=r"colour requires images of 3 channels, got .*1, 2, 3"):
        Colour(("sepia",))(PICTURE, 0)
    with pytest.raises(InputError, match=r"rotate requires images, got examples of shape \(4,\)"):
        Rotate((0.0,))(torch.ones(2, 4), 0)
    with pytest.raises(InputError, match="'speia', did you mean 'sepia'"):
        Colour(("speia",)).fit(1)


def test_labels_are_numbers_and_ranges() -> None:
    assert parse_labels("0/1/8/9") == (0, 1, 8, 9)
    assert parse_labels("2-7/9/3") == (2, 3, 4, 5, 6, 7, 9)
    assert Labels(("0/1", "2-7")).fit(2).kept_labels(1) == (2, 3, 4, 5, 6, 7)
    for wrong in ("", "a", "3-1", "1-", "-1"):
        with pytest.raises(InputError, match="must be numbers and ranges"):
            Labels((wrong,)).fit(1)


@pytest.mark.parametrize(
    "scaling",
    [MNIST_SCALING, Cifar10("signed")._scaling(), Cifar10("unit")._scaling()],
    ids=["mnist", "signed", "unit"],
)
def test_bytes_come_back_exactly_and_are_normalised_again_to_the_same_bits(
    scaling: Scaling,
) -> None:
    pixels = torch.arange(256, dtype=torch.float32).view(-1, 1, 1, 1) / 255
    loaded = pixels.clone().sub_(scaling.mean[0]).div_(scaling.deviation[0])
    assert torch.equal(scaling.undo(loaded), pixels)
    assert torch.equal(scaling.apply(pixels), loaded)


def test_the_digits_come_back_exactly() -> None:
    digits = Digits().load(Path())
    raw = digits.scaling.undo(digits.train_x)
    assert torch.equal(raw * 16, (raw * 16).round())
    assert (float(raw.min()), float(raw.max())) == (0.0, 1.0)
    assert torch.equal(digits.scaling.apply(raw), digits.train_x)


def test_every_channel_has_its_own_scale() -> None:
    scaling = Scaling((1.0, 2.0), (2.0, 4.0), precise=True)
    v = torch.tensor([3.0, 10.0]).view(1, 2, 1, 1)
    assert scaling.apply(v).flatten().tolist() == [1.0, 2.0]
    assert torch.equal(scaling.undo(scaling.apply(v)), v)
