"""The cases of `golden.py`: commands that both states of the code accept."""

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from golden_facts import Verdict

ENGINES = {
    "serial": "--engine serial",
    "pool-1": "--engine pool --workers 1",
    "pool-2": "--engine pool --workers 2",
}
LOSSES = {"calm": "", "lossy": "--message-loss 0.3"}
SMALL = "--nodes 4 --topology ring --rounds 2 --checkpoint-every 2"
# Options that make an algorithm fast or fit it to the network, and models for those that cannot
# train the default one.
# The four nodes have three others to fetch models of.
QUICK = {"desa": "desa:ipc=1,iterations=2,width=4", "dac": "dac:peers=3"}
MODELS = {"fednl": "logistic"}
# name -> (flags, algorithms); {files} is a folder with ARCS and KEPT in it. Later flags win.
FEATURES = {
    "closed-links": ("--link-activity 0.5", "decavg,dechw"),
    "one-way-links": ("--link-activity 0.5 --directed-activity", "decavg,dechw"),
    "late-joiner": ("--join 3@2 --leave 1@3 --rounds 3", "decavg,dechw"),
    "noise": ("--noise 0.01 --clip 1", "decavg,dechw"),
    "hub": ("", "fedavg:clients=2,fedcurv:clients=2,hwa:clients=2"),
    "estimated-gain": ("--gain estimated", "decavg,dechw"),
    "two-architectures": ("--model mlp:hidden=32 --model mlp:hidden=64x32", "decavg,dechw"),
    "widths": (
        "--model mlp:hidden=32 --model mlp:hidden=16",
        "dec-heterofl,dec-fedrolex:indices=sorted,dec-fed-dropout",
    ),
    "directed-graph": ("--topology edge-list:path={files}/arcs.txt,directed=true", "decavg,dechw"),
    "validation": ("--validation 0.2 --early-stop rollback --rounds 4", "decavg,dechw"),
    "convolutions": ("--model digits-cnn --nodes 3", "decavg,dechw"),
    "kept-optimizer": ("{files}/kept.toml", "decavg,dechw,fedcurv"),
}
ARCS = "0 1\n1 2\n2 3\n3 0\n0 2\n"
KEPT = '[local]\noptimizer = "adamw"\nlr = 0.01\nepochs = 2\nkeep_optimizer = true\n'
STUDIES = ("p0-fig6", "p2-fig7", "p4-fig5")
NETWORK = "up --nodes 3 --topology ring --rounds 2"


@dataclass(frozen=True)
class Job:
    """A command that creates one or several runs."""

    name: str
    words: tuple[str, ...]
    algorithms: tuple[str, ...] = ()  # for a comparison of several

    def command(self, folder: Path) -> list[str]:
        chosen = ["--algorithms", ",".join(self.algorithms)] if self.algorithms else []
        return [*self.words, *chosen, "--json", "--out", str(folder)]

    def apart(self) -> list["Job"]:
        """One job per algorithm: if one fails, the others can still be compared."""
        if len(self.algorithms) < 2:
            return []
        return [Job(self.name, self.words, (one,)) for one in self.algorithms]


def list_jobs(algorithms: list[str], studies: list[str], files: Path, only: str) -> list[Job]:
    """All jobs whose cases match; `algorithms` and `studies` are those that both states have."""
    (files / "arcs.txt").write_text(ARCS)
    (files / "kept.toml").write_text(KEPT)
    jobs = []
    for loss, flags in LOSSES.items():
        for engine, chosen in ENGINES.items():
            for model in sorted({MODELS.get(name, "digits-mlp") for name in algorithms}):
                name = f"{loss}/{engine}" if model == "digits-mlp" else f"{loss}/{engine}/{model}"
                able = [one for one in algorithms if MODELS.get(one, "digits-mlp") == model]
                specs = [QUICK.get(one, one) for one in able if matches(f"{name}/{one}", only)]
                words = f"compare {SMALL} --model {model} {flags} {chosen}".split()
                jobs.append(Job(name, tuple(words), tuple(specs)))
    for feature, (flags, listed) in FEATURES.items():
        for engine in ("serial", "pool-2"):
            name = f"{feature}/{engine}"
            words = f"compare {SMALL} {flags.format(files=files)} {ENGINES[engine]}".split()
            named = {spec.partition(":")[0]: spec for spec in listed.split(",")}
            specs = [
                spec
                for one, spec in named.items()
                if one in algorithms and matches(f"{name}/{one}", only)
            ]
            jobs.append(Job(name, tuple(words), tuple(specs)))
    jobs = [job for job in jobs if job.algorithms]
    for study in studies:
        jobs.append(Job(f"study/{study}", ("reproduce", study, "--scale", "smoke")))
    jobs.append(Job("network/dechw", (*NETWORK.split(), "--algorithm", "dechw")))
    return [job for job in jobs if job.algorithms or matches(job.name, only)]


def matches(case: str, only: str) -> bool:
    return fnmatch(case, f"*{only}*")


def choose(
    kind: str, before: list[str], now: list[str], only: str
) -> tuple[list[str], list[Verdict]]:
    """The names that both states have, and a verdict for each that only one has."""
    single = [Verdict(f"{kind}/{name}", "gone") for name in before if name not in now]
    single += [Verdict(f"{kind}/{name}", "new") for name in now if name not in before]
    both = [name for name in before if name in now]
    return both, [verdict for verdict in single if matches(verdict.case, only)]
