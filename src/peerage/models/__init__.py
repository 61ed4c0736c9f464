"""Reference networks, one small file per family; `MODELS` maps names to them.

Options are a frozen dataclass, and `build(shape, classes)` creates the network. Input channels,
image size and classes come from the data. A network raises an error if it cannot take the data.
"""

from peerage.models.base import Model
from peerage.models.cifar_cnn import CifarCNN
from peerage.models.digits_cnn import DigitsCNN
from peerage.models.fashion_cnn import FashionCNN
from peerage.models.gain_cnn import GainCNN
from peerage.models.gn_lenet import GnLeNet
from peerage.models.leaf_cnn import LeafCNN
from peerage.models.mlp import MLP, DigitsMLP, GainMLP, HwaMLP, Logistic
from peerage.models.mnist_cnn import MnistCNN
from peerage.models.vgg16 import VGG16

__all__ = ["MODELS", "Model", "default_model"]

MODELS: dict[str, type[Model]] = {
    "cifar-cnn": CifarCNN,
    "digits-cnn": DigitsCNN,
    "digits-mlp": DigitsMLP,
    "fashion-cnn": FashionCNN,
    "gain-cnn": GainCNN,
    "gain-mlp": GainMLP,
    "gn-lenet": GnLeNet,
    "hwa-mlp": HwaMLP,
    "leaf-cnn": LeafCNN,
    "logistic": Logistic,
    "mlp": MLP,
    "mnist-cnn": MnistCNN,
    "vgg16": VGG16,
}

_DEFAULTS = {
    "cifar10": "cifar-cnn",
    "digits": "digits-mlp",
    "fashion-mnist": "fashion-cnn",
    "femnist": "leaf-cnn",
    "mnist": "mnist-cnn",
    "so2sat": "gain-cnn",
}


def default_model(dataset: str, shape: tuple[int, ...] = ()) -> str:
    """The default network of a data set; for custom data it depends on the shape."""
    if dataset in _DEFAULTS:
        return _DEFAULTS[dataset]
    is_large_image = len(shape) == 3 and min(shape[1:]) >= 16
    return "cifar-cnn" if is_large_image else "mlp"
