"""Names and titles of the papers' data sets."""

MNIST, FASHION, CIFAR = IMAGES = ("mnist", "fashion-mnist", "cifar10")
FEMNIST, IMAGENETTE, FLICKR = "femnist", "imagenette", "flickr-mammals"
TITLES = {
    MNIST: "MNIST",
    FASHION: "Fashion-MNIST",
    CIFAR: "CIFAR-10",
    FEMNIST: "FEMNIST",
    IMAGENETTE: "Imagenette",
    FLICKR: "Flickr-Mammals",
}
