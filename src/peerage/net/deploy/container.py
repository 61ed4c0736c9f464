"""The container file of one peer."""

import json

FOLDER = "/peer"  # where the container sees the exported folder

CONTAINERFILE = """\
# One peer of a network in a container; README.txt says how to run it. This file has been written by
# `peerage export` and has not been built: if it fails on your machine, please report it.
FROM python:3.11-slim
RUN python -m pip install --no-cache-dir "peerage[{extras}]"
RUN useradd --system --no-create-home peerage
USER peerage
# The image holds no file of the network, and no key. At the start, mount the exported folder.
WORKDIR {folder}
VOLUME ["{folder}/run", "{folder}/data"]
ENV PEERAGE_DATA={folder}/data
{expose}STOPSIGNAL SIGTERM
HEALTHCHECK --interval=60s --timeout=30s --start-period=600s CMD {health}
ENTRYPOINT {command}
"""


def container_file(name: str, port: int, extras: str, *, published: bool = True) -> str:
    """A container with the peer of this name, which listens on all its addresses.

    If its port is not published, it listens inside the container, for the health check.
    """
    node = ["python", "-m", "peerage", "node", "--network", "network.toml", "--identity", name]
    host = "0.0.0.0" if published else "127.0.0.1"
    bind = ["--bind", f"{host}:{port}"]  # the address in the network file is that of the machine
    return CONTAINERFILE.format(
        folder=FOLDER,
        extras=extras,
        expose=f"EXPOSE {port}\n" if published else "",
        health=json.dumps([*node, *bind, "--check-health"]),
        command=json.dumps([*node, "--out", "run", *bind]),
    )


def run_command(name: str, port: int, *, published: bool = True) -> str:
    """The lines that build and start the container, in the exported folder."""
    return "\n".join(
        [
            "    mkdir -p run data",
            "    podman build --tag peerage - < Containerfile",
            f"    podman run --detach --init --name {name} --restart on-failure:20 \\",
            '        --userns keep-id --user "$(id -u):$(id -g)" --ulimit nofile=65536 \\',
            f"        {f'--publish {port}:{port} ' * published}--volume .:{FOLDER}:ro \\",
            f"        --volume ./run:{FOLDER}/run --volume ./data:{FOLDER}/data peerage",
        ]
    )
