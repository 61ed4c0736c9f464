"""Prometheus metrics of one peer."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from peerage.errors import InputError
from peerage.net.peer.peer import Peer
from peerage.net.wire.header import REASONS


class Collector:
    """Reads the values from the peer at every request."""

    def __init__(self, peer: Peer, transport: Any) -> None:
        self.peer, self.transport = peer, transport

    def collect(self) -> Iterator[Any]:
        peer, recorder = self.peer, self.peer.recorder
        yield GaugeMetricFamily("peerage_round", "Finished rounds.", recorder.finished)
        if recorder.accuracy is not None:
            yield GaugeMetricFamily(
                "peerage_accuracy", "Accuracy on the test set, a fraction.", recorder.accuracy
            )
        yield from self._own()
        if recorder.account.noise.private:
            total = recorder.account.epsilon
            yield GaugeMetricFamily(
                "peerage_epsilon",
                "Epsilon that the data of this peer has spent in all runs.",
                math.inf if total is None else total,
            )
        yield GaugeMetricFamily("peerage_peers_alive", "Reachable peers.", peer.alive)
        sent = CounterMetricFamily(
            "peerage_bytes", "Bytes, as payloads and on the wire.", labels=["what"]
        )
        sent.add_metric(["payload_sent"], recorder.bytes_total)
        for what in ("bytes_sent", "bytes_received"):
            sent.add_metric([what.replace("bytes", "wire")], self.transport.counters[what])
        yield sent
        rejected = CounterMetricFamily(
            "peerage_messages_rejected", "Messages that were rejected or late.", labels=["reason"]
        )
        # Reasons with a count of 0 are included, so that all time series exist from the start.
        for reason, count in (dict.fromkeys(REASONS, 0) | recorder.error_counts()).items():
            rejected.add_metric([reason], count)
        yield rejected
        yield from self._by_peer()
        yield from self._connections()
        expiry = "When the certificate of this peer expires, in seconds since 1970."
        expires = self.transport.expires.timestamp()
        yield GaugeMetricFamily("peerage_certificate_expiry_seconds", expiry, expires)

    def _own(self) -> Iterator[Any]:
        """The user's own metrics, by a label: their names may have any letters, labels too."""
        names = list(self.peer.world.own_metrics)
        if not names:
            return
        family = GaugeMetricFamily(
            "peerage_own_metric", "Your own metrics on the test set.", labels=["name"]
        )
        for name in names:
            value = self.peer.recorder.latest(name)
            if value is not None:
                family.add_metric([name], value)
        yield family

    def _by_peer(self) -> Iterator[Any]:
        """The metrics with a label for each member, and one for all callers that are no members."""
        peer = self.peer
        contact = GaugeMetricFamily(
            "peerage_contact",
            "Whether this peer can reach another one (to), or is reached by it (from).",
            labels=["peer", "direction"],
        )
        missing = CounterMetricFamily(
            "peerage_messages_missing", "Messages that did not arrive.", labels=["peer"]
        )
        for other in peer.tracker.other_peers:
            name = peer.tracker.name(other)
            contact.add_metric([name, "to"], other in peer.contacts)
            contact.add_metric([name, "from"], other not in peer.tracker.out_of_reach)
            missing.add_metric([name], peer.exchanges.missing_by_peer[other])
        refused = CounterMetricFamily(
            "peerage_calls_refused", "Calls that this peer refused.", labels=["peer", "reason"]
        )
        for (name, reason), count in dict(self.transport.refused_by_peer).items():
            refused.add_metric([name, reason], count)
        yield from (contact, missing, refused)

    def _connections(self) -> Iterator[Any]:
        """Open and refused connections; outsiders are counted by the kind of their address."""
        admission = self.transport.admission
        held = GaugeMetricFamily(
            "peerage_connections",
            "Open connections, authenticated or not yet (pending).",
            labels=["state"],
        )
        held.add_metric(["pending"], len(admission.pending))
        authenticated = sum(len(own) for own in list(admission.authenticated.values()))
        held.add_metric(["authenticated"], authenticated)
        refused = CounterMetricFamily(
            "peerage_connections_refused",
            "Connections that were refused, or closed before they authenticated.",
            labels=["reason", "address"],
        )
        for (reason, kind), count in dict(admission.refused).items():
            refused.add_metric([reason, kind], count)
        closed = CounterMetricFamily(
            "peerage_connections_closed",
            "Idle connections of a member that had too many.",
            labels=["peer"],
        )
        for name, count in dict(admission.closed).items():
            closed.add_metric([name], count)
        yield from (held, refused, closed)


@contextmanager
def serve_metrics(peer: Peer, transport: Any, port: int) -> Iterator[None]:
    """Serve metrics over HTTP on this port of 127.0.0.1."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(peer, transport))
    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise InputError(
            f"cannot serve metrics on port {port}: {error.strerror}; choose another --metrics-port"
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
