"""Asks a running peer on this machine whether it is healthy."""

from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from peerage.errors import InputError, PeerageError
from peerage.net.peer.network import Network, number_of
from peerage.net.trust.identity import Identity, server_name
from peerage.net.wire.address import Address
from peerage.net.wire.server import SERVICE, short

TIMEOUT = 10.0  # seconds
LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where a peer on all addresses can be reached


def check_health(network: Path, name: str, certificates: Path, bind: str | None = None) -> None:
    """Raise PeerageError unless the peer of this name answers at its own address.

    The peer serves members only, so the question is asked with its own certificate.
    """
    members = Network.load_members(network)
    member = members[number_of(name, members)]
    identity = Identity.load(certificates, name)
    if bind is None and member.dials_out:
        raise InputError(
            f"{name} dials out and does not listen; give --bind 127.0.0.1:7400, or another free "
            "port of this machine, at its start and here"
        )
    address = Address.parse(bind or member.address)
    address = address._replace(host=LOCAL.get(address.host, address.host))
    credentials = grpc.ssl_channel_credentials(
        identity.authority.read_bytes(),
        identity.key.read_bytes(),
        identity.certificate.read_bytes(),
    )
    options = [("grpc.ssl_target_name_override", server_name(name)), ("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(f"dns:///{address}", credentials, options) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT)
        except grpc.RpcError as error:
            raise PeerageError(
                f"{name} does not answer at {address}: {short(error.details())}"
            ) from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise PeerageError(f"{name} at {address} is not serving")
