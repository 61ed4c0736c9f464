"""Names and titles of the papers' data sets."""

MNIST, FASHION, CIFAR = IMAGES = ("mnist", "fashion-mnist", "cifar10")
FEMNIST, IMAGENETTE, FLICKR = "femnist", "imagenette", "flickr-mammals"
CIFAR100, CALTECH, PETS, CARS = "cifar100", "caltech101", "oxford-pets", "stanford-cars"
TITLES = {
    MNIST: "MNIST",
    FASHION: "Fashion-MNIST",
    CIFAR: "CIFAR-10",
    FEMNIST: "FEMNIST",
    IMAGENETTE: "Imagenette",
    FLICKR: "Flickr-Mammals",
    CIFAR100: "CIFAR-100",
    CALTECH: "Caltech101",
    PETS: "Oxford Pets",
    CARS: "Stanford Cars",
}
