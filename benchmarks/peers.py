"""The share of messages that 32 real peers on one machine receive in time.

Run `python benchmarks/peers.py [--peers N] [--rounds N]`: the CNN of P0 on MNIST. Every peer is a
process with 4 neighbours, encrypted connections and the default timeouts. A message that arrives
too late is missing from the recipient's round. Requires MNIST: `peerage data get mnist`.
"""

import argparse
import json
import tempfile
from pathlib import Path

from peerage import Experiment
from peerage.net.deploy.up import LocalNetwork

PEERS, ROUNDS, DEGREE = 32, 20, 4
IN_TIME_BOUND = 1.0


def experiment(peers: int, rounds: int) -> Experiment:
    return Experiment(
        nodes=peers,
        topology=f"regular:k={DEGREE}",
        rounds=rounds,
        dataset="mnist",
        model="mnist-cnn",
        partition="dirichlet:alpha=0.2",
        local={"epochs": 1, "batch_size": 100},
        evaluation={"every": rounds, "samples": 1000},
    )


def messages_in_time(repeats: int, peers: int = PEERS, rounds: int = ROUNDS) -> dict[str, float]:
    """The share of messages that were received in time, in one run, as it takes long."""
    with tempfile.TemporaryDirectory() as temporary:
        up = LocalNetwork(experiment(peers, rounds), Path(temporary) / "up")
        summary = up.run()
        rows = [row for peer in up.watched for row in peer.rows if row["round"] > 0]
    received = sum(row["heard"][0] for row in rows)
    return {
        # Of all messages: a peer that skipped rounds has no rows for them.
        "ratio": received / (peers * rounds * DEGREE),
        "missing": peers * rounds * DEGREE - received,
        "troubles": sum("troubles" in row for row in rows),
        "peers": peers,
        "rounds": summary["rounds"],
        "seconds": summary["seconds"],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    print(json.dumps(messages_in_time(1, arguments.peers, arguments.rounds), indent=2))
