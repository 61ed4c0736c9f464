"""The classes of a whole network, of which one data set may lack some."""

from dataclasses import replace

import torch

from peerage.data.tensors import Dataset, class_numbers
from peerage.errors import InputError, did_you_mean

Classes = int | tuple[str, ...]  # number or names of the classes in the whole network


def with_classes(data: Dataset, classes: Classes | None, where: str = "--classes") -> Dataset:
    """The data set with the classes of the whole network; `where` says who gave them."""
    if classes is None:
        return data
    if isinstance(classes, int):
        data = _with_class_count(data, classes)
    else:
        data = _with_class_names(data, classes, where)
    return replace(data, inferred_classes=False)


def is_numbered(data: Dataset) -> bool:
    """Whether the class names are only numbers, which say nothing about other data sets."""
    return data.classes == class_numbers(len(data.classes))


def _with_class_count(data: Dataset, count: int) -> Dataset:
    known = len(data.classes)
    if count < known:
        raise InputError(
            f"{data.name} has {known} classes, but --classes is {count}; "
            "give the number of classes in the whole network"
        )
    if is_numbered(data):
        return replace(data, classes=class_numbers(count))
    if count > known:
        raise InputError(
            f"--classes {count} does not name the classes that {data.name} lacks besides "
            f"{', '.join(data.classes)}; name all of them, as in --classes cat,dog,horse"
        )
    return data


def _with_class_names(data: Dataset, names: tuple[str, ...], where: str) -> Dataset:
    """The data set with these class names; numbered classes take the names in order."""
    if is_numbered(data) and not set(data.classes) & set(names):
        if len(names) < len(data.classes):
            raise InputError(
                f"{data.name} has {len(data.classes)} classes, but {where} names {len(names)}; "
                "name all classes of the whole network"
            )
        return replace(data, classes=names)
    used = set(torch.cat([data.train_y, data.test_y]).tolist())
    for number, name in enumerate(data.classes):
        # A number below the highest label is no class if no example has it.
        if name not in names and (number in used or not data.inferred_classes):
            hint = did_you_mean(name, names)
            raise InputError(f"{data.name} has a class {name!r} that {where} lacks; {hint}")
    label = torch.tensor([names.index(name) if name in names else 0 for name in data.classes])
    return replace(data, train_y=label[data.train_y], test_y=label[data.test_y], classes=names)
