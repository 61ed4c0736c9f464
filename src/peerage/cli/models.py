"""The command that writes a trained model to a file: model.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

import json
from pathlib import Path
from typing import Annotated

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
    network: Annotated[
        Path | None,
        Option(help="Network file of a peer (default: in its folder or the one above)."),
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write the model of a node at the last checkpoint to a file."""
    from peerage.runs.model_files import check_target, write_model
    from peerage.runs.saved import open_run

    check_target(out, format, force)
    chosen = open_run(folder, network=network).choose(node, model_name)
    written = write_model(chosen, out, format, force=force)
    facts = chosen.facts
    if as_json:
        print(json.dumps({"model": str(out), "format": written, **facts}))
        return
    named = f" ({model_name})" if model_name else ""
    whose = f"mean of {len(facts['nodes'])} nodes" if "nodes" in facts else f"node {facts['node']}"
    print(
        f"{out}: {facts['architecture']}{named} of {whose} after round {facts['round']} of "
        f"{facts['rounds_planned']}, {facts['parameters']:,} parameters"
    )
