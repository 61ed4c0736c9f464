"""Messages that 32 real peers receive in time, on as few cores as there are.

Run `python benchmarks/peers.py [--peers N] [--rounds N]`: the CNN of P0 on MNIST; every peer is a
process with 4 neighbours, encrypted connections and the default deadlines. A message that comes
after its deadline is missing in the recipient's round. It needs MNIST: `peerage data get mnist`.
"""

import argparse
import json
import tempfile
from pathlib import Path

from peerage import Experiment
from peerage.net.deploy.up import LocalNetwork

PEERS, ROUNDS, DEGREE = 32, 20, 4
HEARD_BOUND = 1.0


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


def heard(repeats: int, peers: int = PEERS, rounds: int = ROUNDS) -> dict[str, float]:
    """Share of the messages that were received in time, in one run: it is long, and no ratio."""
    with tempfile.TemporaryDirectory() as temporary:
        up = LocalNetwork(experiment(peers, rounds), Path(temporary) / "up")
        summary = up.run()
        rows = [row for peer in up.watched for row in peer.rows if row["round"] > 0]
    received = sum(row["heard"][0] for row in rows)
    return {
        # A peer that left rounds out has no rows of them: what they should have brought counts.
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
    print(json.dumps(heard(1, arguments.peers, arguments.rounds), indent=2))
