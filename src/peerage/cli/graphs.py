"""The commands that examine a network without training: topology, diffuse, plan.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

import json
from functools import partial
from math import prod
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Argument, Option

from peerage.cli.flags import FLAGS, DialsOut, Json, Quiet, Wire, option, read_changes
from peerage.cli.names import beginning_with
from peerage.errors import check_choice

if TYPE_CHECKING:
    from peerage.graphs.graph import Graph

# What the numbers of `topology` and `diffuse` mean.
MEANINGS = {
    "nodes": "nodes of the graph",
    "edges": "links between nodes",
    "dynamic": "new links in every round; numbers of the first",
    "directed": "a link may lead in one direction only",
    "weighted": "links have weights of their own",
    "connected": "every node can be reached, ignoring directions",
    "strongly_connected": "every node can be reached along the directions",
    "components": "parts without a link between them",
    "attempt": "graphs drawn before one met the conditions",
    "degree_min": "fewest neighbours of a node",
    "degree_mean": "mean number of neighbours",
    "degree_max": "most neighbours of a node",
    "degree_histogram": "how many nodes have how many neighbours",
    "spectral_gap": "speed of averaging, 0 (never) to 1 (at once)",
    "relaxation_time": "rounds until differences fall to about a third",
    "mixing_time": "rounds until all nodes are close to the consensus",
    "mixing_time_exact": "no: the mixing time is an upper bound",
    "gain": "factor on initial weights, as --gain graph uses",
    "component_gains": "the gain of each component",
    "diameter": "links between the two nodes farthest apart",
    "parameters": "parameters of each node",
    "rounds": "rounds of averaging",
    "init": "standard deviation of the initial parameters",
    "noise": "standard deviation of the noise per round",
    "start": "distribution of the initial parameters",
    "seed": "random seed",
    "plateau": "sigma an over the last rounds",
    "stabilisation": "first round with sigma an near its plateau",
    "limit_ap": "sigma ap that theory predicts for the end",
    "limit_an": "sigma an that theory predicts for the end",
    "limit_an_exact": "no: the true limit an is higher",
    "sigma_ap start": "deviation across a node's parameters, at first",
    "sigma_ap end": "the same at the end: averaging shrinks the weights",
    "sigma_an start": "deviation across nodes of a parameter, at first",
    "sigma_an end": "the same at the end: 0 if all nodes agree",
}
SHORT = 12  # characters of a value that shares its line with its meaning
Plot = Annotated[Path | None, Option(help="Picture to write (.png or .svg).")]
Nodes = Annotated[int, option("nodes")]
Seed = Annotated[int, option("seed")]
Assortativity = Annotated[float | None, option("assortativity")]
Topology = Annotated[str, option("topology")]
Rounds = Annotated[int, option("rounds")]


def topology(
    spec: Annotated[
        str,
        Argument(
            help="Graph, e.g. er:p=0.2; see `peerage list topologies`.",
            autocompletion=beginning_with("topologies"),
        ),
    ],
    nodes: Nodes = FLAGS["nodes"].default,
    seed: Seed = FLAGS["seed"].default,
    assortativity: Assortativity = None,
    plot: Plot = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Show degrees, spectral gap, mixing time and gain of a graph."""
    from peerage.display import stages
    from peerage.graphs.mixing import describe
    from peerage.report.graphs import plot as draw

    with stages(("building the graph", "spectrum", "picture"), quiet=quiet) as begin:
        begin()
        graph = _build_graph(spec, nodes, seed, assortativity)
        begin()
        facts = describe(graph).as_dict()
        begin()
        if plot is not None:
            draw(graph, plot)
    if as_json:
        print(json.dumps({"topology": spec, "seed": seed, **facts}))
    else:
        _print_facts(facts)


def diffuse(
    topology: Topology = "regular:k=8",
    nodes: Nodes = 1000,
    parameters: Annotated[int, Option(help="Number of parameters of each node.")] = 32,
    rounds: Rounds = 50,
    init: Annotated[float, Option(help="Standard deviation of the initial parameters.")] = 1.0,
    noise: Annotated[
        float, Option(help="Standard deviation of the noise that training adds per round.")
    ] = 1e-3,
    start: Annotated[
        str, Option(help="Distribution of the initial parameters: normal or uniform.")
    ] = "normal",
    seed: Seed = FLAGS["seed"].default,
    assortativity: Assortativity = None,
    plot: Plot = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Simulate averaging without training, for up to a million nodes.

    This is the numerical model of P4. It gives the standard deviations of the parameters over time.
    """
    from peerage.display import stages
    from peerage.graphs.diffusion import diffuse as run_model
    from peerage.graphs.mixing import describe
    from peerage.report.diffusion import deviation_curves
    from peerage.report.figures import save
    from peerage.report.terminal import RunProgress

    with stages(("building the graph",), quiet=quiet) as begin:
        begin()
        graph = _build_graph(topology, nodes, seed, assortativity)
    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal
    with RunProgress(Console(quiet=True) if hidden else console) as bar:
        bar.start(f"diffusion on {topology}", rounds)
        found = run_model(
            graph,
            parameters=parameters,
            rounds=rounds,
            init=init,
            noise=noise,
            start=start,  # type: ignore[arg-type]  # checked there
            seed=seed,
            watch=lambda round, ap, an: bar.advance(round),
        )
        bar.finish()
    if plot is not None:
        save(deviation_curves(found), plot)
    with stages(("spectrum of the graph",), quiet=quiet) as begin:
        begin()
        about = describe(graph).as_dict()
    network = {key: about[key] for key in ("gain", "spectral_gap", "mixing_time", "connected")}
    facts = {**found.as_dict(), **network}
    if as_json:
        print(json.dumps({"topology": topology, **facts}))
        return
    curves = {name: facts.pop(name) for name in ("sigma_ap", "sigma_an")}
    ends = {
        f"{name} {when}": curve[position]
        for name, curve in curves.items()
        for when, position in (("start", 0), ("end", -1))
    }
    _print_facts({**facts, **ends})


def plan(
    topology: Topology = FLAGS["topology"].default,
    nodes: Nodes = FLAGS["nodes"].default,
    dataset: Annotated[str, option("dataset")] = "mnist",
    model: Annotated[
        str | None,
        Option(
            help="Model, e.g. mnist-cnn or my_file.py:MyModel, or a mix, e.g. h2-cnn (default: by "
            "data set).",
            autocompletion=beginning_with("models", "mixes"),
        ),
    ] = None,
    algorithm: Annotated[str, option("algorithm")] = FLAGS["algorithm"].default,
    wire: Wire = "fp32",
    rounds: Rounds = 100,
    optimizer: Annotated[str, option("optimizer")] = FLAGS["optimizer"].default,
    batch_size: Annotated[int, option("batch-size")] = FLAGS["batch-size"].default,
    seed: Seed = FLAGS["seed"].default,
    assortativity: Assortativity = None,
    clusters: Annotated[str | None, option("clusters")] = None,
    shuffle_clusters: Annotated[bool | None, option("shuffle-clusters")] = None,
    dials_out: DialsOut = "",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Estimate mixing, gain, traffic and memory of a network."""
    import torch

    from peerage import specs
    from peerage.algorithm import Dimensions
    from peerage.data import cache_folder
    from peerage.data.datasets import DATASETS, dataset_info
    from peerage.display import stages
    from peerage.experiment import Experiment
    from peerage.experiment.readers import read_models
    from peerage.models import default_model
    from peerage.models.start import weights
    from peerage.net.wire.header import WIRES, written_bytes
    from peerage.net.wire.quantise import BLOCK
    from peerage.runs.node_memory import FLOAT, activation_bytes
    from peerage.runs.plan import page, typical_cost
    from peerage.runs.plan import plan as plan_network
    from peerage.runs.simulation_memory import SimulationMemory, machine_bytes

    floats = {"sgd": 1, "adamw": 2}
    check_choice("optimizer", optimizer, floats)
    check_choice("wire", wire, WIRES)
    data = specs.parse(dataset, "dataset", DATASETS)
    name = dataset.partition(":")[0]
    if known := dataset_info(data):
        shape, classes, examples = known.shape, known.classes, known.train + known.test
    else:
        loaded = data.load(cache_folder())
        shape, classes = loaded.shape, len(loaded.classes)
        examples = len(loaded.train_y) + len(loaded.test_y)
    model = model or default_model(name, shape)
    with torch.device("meta"):  # sizes without values
        modules = [
            one.build(shape, classes) if hasattr(one, "build") else one()
            for one in read_models(model)
        ]
    dimensions = [Dimensions.of(module, nodes, classes, shape) for module in modules]
    # An algorithm states its cost for all models or for none.
    costs = [cost for sizes in dimensions if (cost := typical_cost(algorithm, sizes)) is not None]
    found_bytes = [activation_bytes(module, shape, batch_size) for module in modules]
    activations = [count for count in found_bytes if count is not None]
    changes = {"clusters": clusters, "shuffle-clusters": shuffle_clusters}
    found_clusters = Experiment(nodes=nodes, **read_changes(changes)).clusters
    with stages(("building the graph",), quiet=quiet) as begin:
        begin()
        graph = _build_graph(topology, nodes, seed, assortativity)
    if dials_out:
        from peerage.experiment.readers import read_algorithm
        from peerage.net.peer.dialling import check_partners, parse_numbers

        names = [f"node-{number}" for number in range(nodes)]
        check_partners(read_algorithm(algorithm), graph, parse_numbers(dials_out, nodes), names)
    parameters = [sum(p.numel() for p in module.parameters()) for module in modules]
    simulation = SimulationMemory.of(
        FLOAT * sum(parameters) / len(parameters),
        costs[0] if costs else None,
        FLOAT * examples * prod(shape),
    )
    describe = partial(
        plan_network,
        topology,
        graph,
        model=model,
        parameters=parameters,
        layers=max(len(weights(module)) for module in modules),
        algorithm=algorithm,
        payload=[cost.vectors for cost in costs] or None,
        rounds=rounds,
        optimizer_floats=floats[optimizer],
        held_models=costs[0].held_models if costs else None,
        together=bool(costs) and costs[0].together,
        activations=activations if len(activations) == len(modules) else (),
        batch_size=batch_size,
        clusters=() if found_clusters is None else found_clusters.assign(seed),
        number_bytes=written_bytes(torch.float32, BLOCK, wire) / BLOCK,
        simulation=simulation,
    )
    with stages(("spectrum of the graph",), quiet=quiet) as begin:
        begin()
        found = describe()
    print(json.dumps(found.as_dict()) if as_json else page(found))
    if not costs or costs[0].held_models is None:  # few nodes of others send in a round
        simulation.check(nodes, machine_bytes())


def _build_graph(spec: str, nodes: int, seed: int, assortativity: float | None) -> "Graph":
    from peerage import specs
    from peerage.graphs.rewiring import with_assortativity
    from peerage.graphs.topology import TOPOLOGIES

    graph: Graph = specs.parse(spec, "topology", TOPOLOGIES).build(nodes, seed)
    return with_assortativity(graph, assortativity, seed)


def _print_facts(facts: dict[str, Any]) -> None:
    """Print each value with its meaning, on one line if the terminal is wide enough."""
    texts = {key: (key.replace("_", " "), _readable(value)) for key, value in facts.items()}
    short = [len(text) for _, text in texts.values() if len(text) <= SHORT]
    column = max(short, default=0)
    width = get_terminal_size().columns
    for key, (name, text) in texts.items():
        meaning = MEANINGS[key]
        line = f"{name:18} {text:{column}}  {meaning}"
        if len(line) > width or len(text) > column:
            line = f"{name:18} {text}\n" + fill(
                meaning, width, initial_indent=" " * 4, subsequent_indent=" " * 4
            )
        print(line)


def _readable(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} x {key}" for key, count in value.items())
    if isinstance(value, list):
        return ", ".join(_readable(item) for item in value[:10]) + (", ..." * (len(value) > 10))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
