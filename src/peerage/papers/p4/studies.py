"""The studies of P4: the runs and calculations of each, and how they are shown."""

from functools import partial
from math import sqrt
from typing import Any

from peerage.papers.datasets import MNIST
from peerage.papers.p0 import settings as p0
from peerage.papers.p4 import numeric, output, settings
from peerage.papers.p4.settings import CENTRAL, SIZES, WITH, WITHOUT, Setting, runs
from peerage.papers.study import Calculation, Job, Plan, Study, Training

ONE_EPOCH = {"steps": None, "epochs": 1}


def plateau_jobs(letter: str, plan: Plan) -> list[Job]:
    """Fig. 3: one configuration on networks of several sizes, with and without the gain."""
    size = SIZES[plan.scale].scaling[letter]
    changes: dict[str, Any] = {
        "topology": size.topology,
        "rounds": size.rounds,
        "evaluation": {} if size.samples is None else {"samples": size.samples},
    }
    jobs = []
    for nodes in size.nodes:
        for method in (WITH, WITHOUT):
            place = Setting("", f"{nodes} nodes", method)
            jobs += runs(plan, place, nodes, size.items, letter=letter, **changes)
    return jobs


def activity_jobs(plan: Plan) -> list[Job]:
    """Fig. 4: a complete graph on which few connections, or few nodes, are active in a round."""
    size = SIZES[plan.scale].activity
    changes: dict[str, Any] = {"topology": "complete", "rounds": size.rounds}
    jobs = []
    for panel, part in (("(a) connections", "links"), ("(b) nodes", "nodes")):
        for chance in size.chances:
            faults = {part: chance}
            if plan.fidelity == "code" and part == "links":
                faults["directed"] = True
            for method in (WITH, WITHOUT):
                place = Setting(panel, f"p = {chance:g}", method)
                jobs += runs(plan, place, size.nodes, size.items, faults=faults, **changes)
    return jobs


def start_jobs(plan: Plan) -> list[Job]:
    """Fig. 5: the first rounds of training without the gain, and of the numerical model."""
    size = SIZES[plan.scale].start
    graph = f"regular:k={size.degree}"
    jobs = runs(
        plan,
        Setting("", numeric.TRAINED, WITHOUT),
        size.nodes,
        size.items,
        topology=graph,
        rounds=size.rounds,
        local=ONE_EPOCH,
        evaluation={"growth": None, "spread": True},
    )
    model = numeric.Diffused(
        graph, size.nodes, size.degree, 200, size.rounds + 1, 1e-8, 1.0, "normal"
    )
    seeds = plan.seed_range(size.realisations)
    return [*jobs, Calculation(Setting("", numeric.CALCULATED, WITHOUT), model, seeds)]


def error_jobs(plan: Plan) -> list[Job]:
    """Fig. 7: gains of sqrt((1 + e) n), and of n^((1 + e) / 2)."""
    size = SIZES[plan.scale].erring
    changes: dict[str, Any] = {"topology": "complete", "rounds": size.rounds}
    shares = {f"{100 * error:+g} %": 1 + error for error in size.errors if error}
    panels = {
        "(a) number of nodes": {name: sqrt(k * size.nodes) for name, k in shares.items()},
        "(b) exponent": {name: size.nodes ** (k / 2) for name, k in shares.items()},
    }
    jobs = []
    for panel, wrong in panels.items():
        gains = {name: f"manual:g={gain:.6g}" for name, gain in wrong.items()}
        for name, gain in {"exact": "sqrt", **gains, "no gain": "none"}.items():
            place = Setting(panel, name, WITHOUT if gain == "none" else WITH)
            jobs += runs(plan, place, size.nodes, size.items, gain=gain, **changes)
    return jobs


def compression_jobs(plan: Plan) -> list[Job]:
    """Fig. 8(a, b): the numerical model on graphs of many sizes and kinds."""
    size = SIZES[plan.scale].compression
    return [
        job
        for family, topology in numeric.families(size.degree).items()
        for nodes in size.nodes
        for job in calculations(plan, size, Setting("", f"{nodes} nodes", family), topology, nodes)
    ]


def assortativity_jobs(plan: Plan) -> list[Job]:
    """Fig. 8(c): Erdos-Renyi graphs rewired to other correlations between neighbours' degrees."""
    size = SIZES[plan.scale].rewired
    [nodes] = size.nodes
    jobs = []
    for rho in size.assortativities:
        place = Setting("", f"rho = {rho:g}", "Erdos-Renyi")
        jobs += calculations(plan, size, place, f"er:degree={size.degree}", nodes, rho)
    return jobs


def calculations(
    plan: Plan,
    size: settings.Compression,
    place: Setting,
    topology: str,
    nodes: int,
    assortativity: float | None = None,
) -> list[Job]:
    """The realisations of one graph model, a few per job."""
    model = numeric.Diffused(
        topology,
        nodes,
        size.degree,
        size.parameters,
        size.rounds,
        noise=1e-3,
        assortativity=assortativity,
    )
    seeds, together = plan.seed_range(size.realisations), size.together
    return [
        Calculation(place, model, seeds[first : first + together]) for first in seeds[::together]
    ]


def environment_jobs(varied: str, plan: Plan) -> list[Job]:
    """Fig. 9: regular graphs with the gain and one setting varied; centralised training."""
    size = SIZES[plan.scale].environment
    defaults = {"neighbours": size.degree, "examples": size.items, "nodes": size.nodes, "epochs": 1}
    jobs = []
    for value in SIZES[plan.scale].varied[varied]:
        case = {**defaults, varied: value}
        nodes, items = case["nodes"], case["examples"]
        name = f"{value} {varied if value > 1 else varied.removesuffix('s')}"
        batches = -(-items // settings.BATCH) * case["epochs"]  # per round
        jobs += runs(
            plan,
            Setting("", name, WITH),
            nodes,
            items,
            topology=f"regular:k={case['neighbours']}",
            rounds=max(size.batches // batches, 1),
            local={"steps": None, "epochs": case["epochs"]},
        )
        central = Setting("", name, CENTRAL)
        jobs += runs(plan, central, nodes, items, pooled=True, rounds=size.epochs, local=ONE_EPOCH)
    return jobs


def sharing_jobs(plan: Plan) -> list[Job]:
    """Fig. 10: the same items split among more and more nodes, and on a single node."""
    size = SIZES[plan.scale].sharing
    jobs = []
    rounds = max(size.batches // settings.STEPS, 1)
    for nodes in size.nodes:
        place, items = Setting("", f"{nodes} nodes", WITH), size.items // nodes
        topology = f"regular:k={size.degree}"
        jobs += runs(plan, place, nodes, items, topology=topology, rounds=rounds)
    nodes, place = size.nodes[0], Setting("", "1 node", CENTRAL)
    return jobs + runs(plan, place, nodes, size.items // nodes, pooled=True, rounds=rounds)


def curvature_jobs(plan: Plan) -> list[Job]:
    """P0's MNIST with Dir 0.2: DecAvg and DecHW, with and without the gain, on two graphs."""
    size = p0.SIZES[plan.scale]
    jobs: list[Job] = []
    for graph, topology in (("Erdos-Renyi", size.topology), ("Barabasi-Albert", size.hubs)):
        for name in ("DecAvg", "DecHW"):
            for method, gain in ((WITH, "graph"), (WITHOUT, "none")):
                changes = {"topology": topology, "init": {"gain": gain}}
                for seed in plan.seed_range(size.seeds):
                    experiment = p0.experiment(plan, MNIST, 0.2, name.lower(), seed, **changes)
                    jobs.append(Training(Setting(graph, name, method), experiment))
    return jobs


def _plateaus(letter: str, figure: str, panels: str, what: str, growth: str) -> Study:
    return Study(
        f"p4-fig{figure}",
        f"Fig. {panels}: with and without the gain, {what}",
        f"without the gain, a plateau of the loss grows {growth}; with it there is none",
        partial(plateau_jobs, letter),
        partial(output.show_plateaus, letter),
    )


def _environment(
    panel: str, varied: str, what: str, claim: str, *, wall_clock: bool = False
) -> Study:
    figure = f"Fig. 9({panel})"
    return Study(
        f"p4-fig9{panel}",
        f"{figure}: how many {what}, MNIST",
        claim,
        partial(environment_jobs, varied),
        partial(output.show_losses, figure, "environment", wall_clock=wall_clock),
    )


STUDIES = [
    _plateaus("A", "3a", "3(a, b)", "MNIST on complete graphs", "in proportion to n"),
    _plateaus("B", "3c", "3(c, d)", "So2Sat on Barabasi-Albert graphs", "as n^0.64"),
    _plateaus("C", "3e", "3(e, f)", "VGG16 on CIFAR-10 and 4-regular graphs", "in proportion to n"),
    _plateaus("D", "3g", "3(g, h)", "MNIST with AdamW", "as n^0.4"),
    Study(
        "p4-fig4",
        "Fig. 4: connections or nodes that are rarely active, MNIST",
        "the gain is much better at every probability",
        activity_jobs,
        partial(output.show_losses, "Fig. 4", "activity"),
    ),
    Study(
        "p4-fig5",
        "Fig. 5: the first rounds, in training and in the numerical model",
        "averaging moves the models far more than training does, and across its direction; the "
        "numerical model behaves alike",
        start_jobs,
        numeric.show_start,
    ),
    Study(
        "p4-fig7",
        "Fig. 7: a gain from wrong estimates, MNIST",
        "all are close to the exact gain, and far from none",
        error_jobs,
        partial(output.show_losses, "Fig. 7", "erring"),
    ),
    Study(
        "p4-fig8ab",
        "Fig. 8(a, b): how much averaging compresses, by size and kind of graph",
        "||v|| falls as the root of n on regular and Erdos-Renyi graphs, more slowly on graphs "
        "with hubs",
        compression_jobs,
        numeric.show_compression,
    ),
    Study(
        "p4-fig8c",
        "Fig. 8(c): compression and assortativity",
        "||v|| does not depend on the assortativity",
        assortativity_jobs,
        numeric.show_assortativity,
    ),
    _environment("a", "neighbours", "neighbours", "only very few neighbours are slower"),
    _environment(
        "b",
        "examples",
        "examples per node",
        "the loss approaches that of all data in one place, in the same wall-clock time",
        wall_clock=True,
    ),
    _environment("c", "nodes", "nodes", "the loss approaches that of all data in one place"),
    _environment(
        "d",
        "epochs",
        "epochs between exchanges",
        "the more often nodes exchange, the faster and the better they learn",
        wall_clock=True,
    ),
    Study(
        "p4-fig10",
        "Fig. 10: the same data among more nodes, MNIST",
        "the curves agree in wall-clock time, also with that of a single node: a power law",
        sharing_jobs,
        output.show_sharing,
    ),
    Study(
        "p4-dechw",
        "Not in the paper: the gain and curvature weighting, MNIST",
        "does the gain help DecHW as well, or does weighting by curvature replace it",
        curvature_jobs,
        output.show_with_curvature,
    ),
]
