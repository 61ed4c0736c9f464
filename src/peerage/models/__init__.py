"""Reference networks, one small file per family; `MODELS` maps names to them, `MIXES` to several.

Options are a frozen dataclass, and `build(shape, classes)` creates the network. Input channels,
image size and classes come from the data. A network raises an error if it cannot take the data.
"""

from peerage import specs
from peerage.models import cnn, dfml_cnn, efficientnet, mlp, resnet, vit
from peerage.models.base import Model
from peerage.models.mixes import MIXES

__all__ = ["MIXES", "MODELS", "Model", "default_model"]

MODELS: dict[str, type[Model]] = {
    "cifar-cnn": cnn.CifarCNN,
    "dfml-cnn": dfml_cnn.DfmlCNN,
    "digits-cnn": cnn.DigitsCNN,
    "digits-mlp": mlp.DigitsMLP,
    "efficientnet": efficientnet.EfficientNet,
    "fashion-cnn": cnn.FashionCNN,
    "gain-cnn": cnn.GainCNN,
    "gain-mlp": mlp.GainMLP,
    "gn-lenet": cnn.GnLeNet,
    "hwa-mlp": mlp.HwaMLP,
    "leaf-cnn": cnn.LeafCNN,
    "logistic": mlp.Logistic,
    "mlp": mlp.MLP,
    "mnist-cnn": cnn.MnistCNN,
    "preact-resnet": resnet.PreActResNet,
    "resnet8": resnet.ResNet8,
    "vgg16": cnn.VGG16,
    "vit": vit.ViT,
}

_DEFAULTS = {
    "caltech101": "preact-resnet",
    "cifar10": "cifar-cnn",
    "cifar100": "cifar-cnn",
    "digits": "digits-mlp",
    "fashion-mnist": "fashion-cnn",
    "femnist": "leaf-cnn",
    "flickr-mammals": "resnet8",
    "imagenette": "gn-lenet",
    "mnist": "mnist-cnn",
    "oxford-pets": "preact-resnet",
    "so2sat": "gain-cnn",
    "stanford-cars": "preact-resnet",
}


def default_model(dataset: str, shape: tuple[int, ...] = ()) -> str:
    """The default network of a data set; for custom data it depends on the shape."""
    if dataset in _DEFAULTS:
        return _DEFAULTS[dataset]
    is_large_image = len(shape) == 3 and min(shape[1:]) >= 16
    return "cifar-cnn" if is_large_image else "mlp"


def __getattr__(name: str) -> type[Model]:
    """The class of a model, as in `pg.models.MLP(hidden=64)`."""
    return specs.class_named(name, "model", MODELS)


def __dir__() -> list[str]:
    return sorted({*__all__, *specs.class_names(MODELS)})
