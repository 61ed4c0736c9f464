"""What the notes below P1's tables say: what is smaller, other or guessed."""

from peerage.papers.datasets import TITLES
from peerage.papers.p1.settings import (
    DEFKT,
    DFML,
    FEDPROX,
    H1_RESNET,
    H1_VIT,
    H2_EFFICIENTNET,
    LEARNING_RATE,
    MAX_ALPHA,
    MAX_ALPHA_NOISY,
    NON_IID,
    OBJECTS,
    ROUNDS,
    Setting,
)
from peerage.papers.study import Results, Training

GUESSED = (
    f"Not stated in the paper, so guessed: a learning rate of {LEARNING_RATE:g} (it was one of "
    "0.1, 0.01 and 0.001), no augmentation, new optimisers in each round, and equal starts of "
    "clients with one architecture."
)
GUESSED_ALPHA = (
    f"Also guessed for DFML: alpha up to {MAX_ALPHA:g}, but {MAX_ALPHA_NOISY:g} with cross-entropy "
    "and non-IID data (the paper chose among 0.8, 0.9 and 1.0); half cycles, whose period grows by "
    "1 from 10 on."
)
LAST_MAXIMUM = f"Guessed: {ROUNDS} rounds; the last maximum of alpha before is in round 483."
UNNAMED = (
    "The caption names neither data set nor models; here they are CIFAR-10 and the CNNs of mode H2."
)
NO_DATA = "The caption does not name the data set; here it is CIFAR-10."
SAME = (
    "Dec. FedRolex is Dec. HeteroFL: the global model is made anew from the participants of each "
    "round, so a shift of all indices changes nothing. One run serves both rows."
)
FURTHER = {
    FEDPROX: "Guessed for Dec. FedProx: mu = 0.01.",
    DEFKT: "Guessed for Def-KT: ten epochs of mutual learning, both losses with weight 1.",
}
ARCHITECTURES = {
    H1_RESNET: "Guessed for ResNets: batch norm, whose statistics are averaged like parameters.",
    H1_VIT: "Guessed for ViTs: a head per 64 channels, and hidden layers as wide as the model.",
    H2_EFFICIENTNET: (
        "EfficientNets start without pretrained weights. The paper does not mention any, but its "
        "accuracies suggest them."
    ),
}
NO_CODE = "There is no public code of DFML; --fidelity code changes nothing here."
SIDES = "Guessed: images of 64 x 64 pixels for ResNets and of 224 x 224 for EfficientNets."


def notes_of(results: Results, *more: str) -> tuple[str, ...]:
    """`more`, what is smaller and guessed, and the number of seeds."""
    places, notes = settings_of(results), [*more]
    methods, models = ({getattr(p, name) for p in places} for name in ("method", "models"))
    if jobs_of(results) and results.plan.scale != "smoke":
        notes += [GUESSED, *([GUESSED_ALPHA] if DFML in methods else [])]
        notes += [text for method, text in FURTHER.items() if method in methods]
        notes += [text for name, text in ARCHITECTURES.items() if name in models]
        if any(place.dataset in OBJECTS for place in places):
            notes.append(SIDES)
        if any(job.experiment.rounds == ROUNDS for job in jobs_of(results)):
            notes.append(LAST_MAXIMUM)
    return results.notes(smaller(results), *notes, code=NO_CODE)


def jobs_of(results: Results) -> list[Training]:
    return [job for job in results.jobs if isinstance(job, Training)]


def settings_of(results: Results) -> list[Setting]:
    """All coordinates in the order of the jobs."""
    found = dict.fromkeys(job.place for job in results.jobs)
    return [place for place in found if isinstance(place, Setting)]


def smaller(results: Results) -> list[str]:
    """What scale small has less of: images, clients, test images, rounds and splits."""
    kinds: dict[str, dict[str, None]] = {}  # amounts -> the models that have them
    for job in jobs_of(results):
        place, used = job.place, job.experiment
        assert isinstance(place, Setting)
        train = getattr(used.dataset, "train", None) or "all"
        clients = f"{used.nodes} clients"
        if used.nodes != place.clients:
            clients += f" instead of {place.clients}"
        tests = used.evaluation.samples or "all"
        text = f"{train} training images of {TITLES[place.dataset]}, {clients}, {tests} test images"
        kinds.setdefault(text, {})[place.models] = None
    if not kinds:
        return []
    texts = [f"{text} ({', '.join(models)})" for text, models in kinds.items()]
    rounds = {job.experiment.rounds for job in jobs_of(results)}
    counts = " to ".join(str(count) for count in sorted({min(rounds), max(rounds)}))
    alone = "; non-IID data alone" if results.values("split") == [NON_IID] else ""
    return [f"Scale small: {'; '.join(texts)}; {counts} rounds{alone}."]
