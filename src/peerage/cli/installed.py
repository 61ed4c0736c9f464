"""Whether the packages for real peers are installed."""

from importlib.util import find_spec

from peerage.errors import InputError

PACKAGES = ("cryptography", "grpc", "grpc_health", "prometheus_client", "zstandard")


def check_installed() -> None:
    for name in PACKAGES:
        if find_spec(name) is None:
            raise InputError(f'real peers need {name}; pip install "peerage[net]"')
