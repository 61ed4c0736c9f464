"""The commands for saved models: model writes one to a file, rewind goes back to an earlier one.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from peerage.cli.flags import Json


def model(
    folder: Annotated[Path, Argument(help="Folder of a run, of a network, or of one real peer.")],
    out: Annotated[Path, Option(help="File to write: .safetensors, .pt or .onnx.")],
    node: Annotated[
        str | None,
        Option(
            help="Node whose model to write: a number, best (by last recorded accuracy) or mean; "
            "not needed if there is one model."
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        Option(help="Name of the model, if the algorithm evaluates several (default: first)."),
    ] = None,
    format: Annotated[
        str | None,
        Option(help="Format: safetensors, pt or onnx (default: by the ending of --out)."),
    ] = None,
    best: Annotated[
        bool, Option("--best", help="Write the best model that the peer evaluated.")
    ] = False,
    last: Annotated[
        bool, Option("--last", help="Write the model after the last round (the default).")
    ] = False,
    network: Annotated[
        Path | None,
        Option(help="Network file of a peer of an earlier version (default: in or above FOLDER)."),
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write the last or the best model of a node to a file."""
    from peerage.errors import InputError
    from peerage.runs.model_files import check_target, write_model
    from peerage.runs.saved import open_run

    if best and last:
        raise InputError("--best and --last exclude each other; give one of them")
    check_target(out, format, force)
    version = "best" if best else "last" if last else None
    chosen = open_run(folder, network=network).choose(node, model_name, version)
    written = write_model(chosen, out, format, force=force)
    facts = chosen.facts
    if as_json:
        print(json.dumps({"model": str(out), "format": written, **facts}))
        return
    named = f" ({facts['model_name']})" if "model_name" in facts else ""
    whose = f"mean of {len(facts['nodes'])} nodes" if "nodes" in facts else f"node {facts['node']}"
    early = facts.get("evaluated") == "after-training"
    print(
        f"{out}: {facts['architecture']}{named} of {whose} {'within' if early else 'after'} round "
        f"{facts['round']} of {facts['rounds_planned']}{' (after training)' if early else ''}, "
        f"{facts['parameters']:,} parameters{_accuracy(facts)}"
    )


def _accuracy(facts: Mapping[str, Any]) -> str:
    """The accuracy of a model, as text; empty if it is unknown."""
    sets = {"validation_accuracy": "held-out examples", "accuracy": "the test set"}
    key = next((key for key in sets if key in facts), None)
    return "" if key is None else f", accuracy {100 * facts[key]:.1f} % on {sets[key]}"


def rewind(
    folder: Annotated[Path, Argument(help="Folder of one real peer, which must not run.")],
    round: Annotated[int, Option(help="Round to go back to, of which a checkpoint is kept.")],
    as_json: Json = False,
) -> None:
    """Let a peer go back to an earlier round when it is started again."""
    from peerage.runs.rewind import rewind

    removed = rewind(folder, round)
    if as_json:
        print(json.dumps({"folder": str(folder), "round": round, "removed": removed}))
        return
    print(
        f"{folder} is back at round {round}, {len(removed)} later checkpoints removed; rewind all "
        "peers to the same round before you start them"
    )
