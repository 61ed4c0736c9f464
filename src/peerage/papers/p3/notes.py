"""What the notes below P3's tables say: what is smaller, other or guessed."""

from peerage.papers.datasets import CIFAR, FLICKR, IMAGENETTE, TITLES
from peerage.papers.p3.settings import (
    DAC,
    DEPRL,
    FACADE,
    ONE_RATE,
    ROTATED,
    SIZES,
    TABLE_1,
    Setting,
)
from peerage.papers.study import Results, Training
from peerage.report.head_choice import settlement

REALLY = "The paper prints 16:8, but its means over all nodes are those of 18:6, which is run here."
NO_FINAL_MEAN = (
    "DAC has no final mean over all nodes: the authors' code has none, although the text says that "
    "all methods have."
)
GUESSED = "No script of the authors has clusters by label or colour. Guessed:"
SAME_STEPS = (
    "DePRL has 10 steps for the head and 10 for the core in a round; the authors' code has an "
    "epoch of each, with batches of 100 (see p3-deprl)."
)
CODE = (
    "As the authors' code: nodes start from different models; FACADE tries each head on other "
    "samples, and its scores are those of the head with the lowest test loss; DePRL has a new "
    "graph in each round and, on CIFAR-10, an epoch for the head and one for the core."
)
AS_THE_TEXT = "These runs follow the text of the paper; --fidelity code changes nothing here."
PAIRS = "With more than two clusters, gaps are the largest over all pairs of clusters."


def notes_of(results: Results, *more: str) -> tuple[str, ...]:
    """Notes on data, tests and methods, `more`, and the number of seeds."""
    places = settings_of(results)
    methods = {place.method for place in places}
    notes = [*more, *tests(results)]
    if any((place.dataset, place.clusters) == (IMAGENETTE, "16:8") for place in places):
        notes.append(REALLY)
    if results.plan.scale != "smoke" and any(place.shift != ROTATED for place in places):
        notes.append(f"{GUESSED} {rates(results)}, and the warm-up of rotated CIFAR-10.")
    if DAC in methods:
        notes.append(NO_FINAL_MEAN)
    notes += unsettled(results)
    fewer_steps = any((p.dataset, p.method, p.setting) == (CIFAR, DEPRL, "") for p in places)
    if fewer_steps and results.plan.fidelity == "paper" and results.plan.scale != "smoke":
        notes.append(SAME_STEPS)
    starts = {job.experiment.init.start for job in results.jobs if isinstance(job, Training)}
    code = CODE if starts == {"independent"} else AS_THE_TEXT
    return results.notes(smaller(results), *notes, code=code)


def settings_of(results: Results, case: tuple[str, str, str] | None = None) -> list[Setting]:
    """All coordinates in the order of the jobs, or those with this data set, sizes and shift."""
    found = dict.fromkeys(job.place for job in results.jobs)
    places = [place for place in found if isinstance(place, Setting)]
    return [place for place in places if case in (None, place[:3])]


def rates(results: Results) -> str:
    """The learning rate of every method."""
    jobs = [job for job in results.jobs if isinstance(job, Training)]
    found = dict.fromkeys((job.place.method, job.experiment.work.lr) for job in jobs)
    return f"learning rates of {', '.join(f'{lr:g} ({method})' for method, lr in found)}"


def unsettled(results: Results) -> list[str]:
    """How many runs of FACADE did not settle; they are part of every mean."""
    records = [record for series in results.of(method=FACADE) for record in series.records]
    found = [one for one in map(settlement, records) if one is not None]
    missing = sum(one.settled is None for one in found)
    if not found:
        return []
    if not missing:
        return [f"All runs of FACADE had settled in the end ({len(found)} of {len(found)})."]
    return [
        f"{missing} of {len(found)} runs of FACADE had not settled in the end: some cluster lacked "
        "one head of its own. They are part of every mean."
    ]


def smaller(results: Results) -> list[str]:
    """What scale small has instead of the paper's settings; nothing for a study of one size."""
    jobs = [job for job in results.jobs if isinstance(job, Training)]
    size, found = SIZES["small"], []
    for dataset in (CIFAR, IMAGENETTE, FLICKR):
        recipe, paper = size.recipes[dataset], TABLE_1[dataset]
        here = [job for job in jobs if _is(job, dataset, rotated=True)]
        if {job.dataset for job in here} == {recipe.dataset}:
            text = f"{TITLES[recipe.dataset]} instead of {TITLES[dataset]}"
            if {job.experiment.rounds for job in here} == {recipe.rounds}:
                text += f", with {recipe.rounds} rounds instead of {paper.rounds}"
            found.append(text)
    others = {job.experiment.rounds for job in jobs if _is(job, CIFAR, rotated=False)}
    if others == {size.other.rounds}:
        found.append(f"{size.other.rounds} rounds instead of {TABLE_1[CIFAR].rounds}")
    if not found:
        return []
    rate = f"one learning rate of {ONE_RATE[FACADE]:g} for all methods"
    text = f"Scale small: {'; '.join(found)}; {rate}. Only the order of methods can be compared."
    return [text]


def _is(job: Training, dataset: str, *, rotated: bool) -> bool:
    place = job.place
    assert isinstance(place, Setting)
    return place.dataset == dataset and (place.shift == ROTATED) == rotated


def tests(results: Results) -> list[str]:
    """How many images models are tested on, and what is held out."""
    jobs = [job for job in results.jobs if isinstance(job, Training)]
    samples = {job.experiment.evaluation.samples for job in jobs} - {None}
    held_out = {job.experiment.evaluation.validation for job in jobs}
    found = []
    if samples:
        counts = " or ".join(str(count) for count in sorted(samples, key=lambda n: n or 0))
        found.append(
            f"Models are tested on {counts} images, drawn once; the paper has the whole test set."
        )
    if held_out == {0.1}:
        found.append("A tenth of each node's images is held out, as in the paper, and not used.")
    return found


def sizes_of(results: Results, clusters: str) -> str:
    """The printed sizes of clusters, and ours where they differ."""
    ours = {
        ":".join(map(str, job.experiment.clusters.sizes))
        for job in results.jobs
        if isinstance(job, Training) and job.experiment.clusters is not None
        if isinstance(job.place, Setting) and job.place.clusters == clusters
    }
    here = " or ".join(sorted(ours - {clusters}))
    return f"{clusters} (here {here})" if here else clusters
