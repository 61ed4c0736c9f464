"""The files of one peer: rows, checkpoints, and the state that must survive a restart."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from peerage.engine.shard import NodeReport, Shard, ShardReport
from peerage.errors import CheckpointError, InputError, TooManyOpenFiles
from peerage.files import read_json, write_json
from peerage.net.peer.account import PrivacyAccount
from peerage.net.peer.revisions import extend_state
from peerage.net.wire.header import REASONS
from peerage.net.wire.transport import Transport
from peerage.privacy import RELEASE_COUNT
from peerage.records import checkpoint
from peerage.records.rows import (
    OWNER,
    MetricWriter,
    Row,
    is_until,
    read_metrics,
    replace_last_row,
    truncate_after,
)
from peerage.runs.kept_models import Keep, ModelKeeper, remove_models_after
from peerage.runs.summary import node_row, tests_table

FILE = "part-0.safetensors"
PAUSED = "paused.json"  # in the folder of a peer that waits for others
REMEDY = "start the peer again"
HEADER_BYTES = 1 << 15  # an estimate of what a file needs besides its tensors

log = logging.getLogger("peerage.peer")


class PeerRecorder:
    """Keeps the rows of one peer; writes them and its checkpoints if it has a folder."""

    def __init__(
        self,
        folder: Path | None,
        me: int,
        shard: Shard,
        transport: Transport,
        counters: Counter[str],
        account: PrivacyAccount,
        keep: Keep = Keep(),
    ) -> None:
        self.folder, self.me, self.shard, self.account = folder, me, shard, account
        self.transport, self.counters, self.keep = transport, counters, keep
        self.models: ModelKeeper | None = None  # if it has a folder
        self._most_bytes = 0  # that checkpoints and model files need, as it was logged
        self.watch: Callable[[Row], None] | None = None  # called with every row
        self.rows: list[Row] = []
        self.finished = 0  # rounds
        self.final = False  # whether the step after the last round is done
        self.bytes_total = 0
        self.skipped = 0  # rounds that were skipped while the peer ran, over all restarts
        self._recorded_skips = 0  # those that are in the rows already
        self._paused = 0.0  # seconds since the last row in which the peer paused
        self._paused_since: float | None = None  # in seconds of perf_counter
        self._writer: MetricWriter | None = None
        self._recorded: Counter[str] = Counter()  # errors and bytes that are in the rows already

    def resume(self, owner: Mapping[str, Any]) -> None:
        """Resume from the last checkpoint in the folder, if there is one."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._claim(self.folder / OWNER, owner)
        self.show_pause(None)
        saved = self._newest_checkpoint(self.folder)
        if saved is not None:
            fresh = self.shard.members[self.me].node.state
            arguments = (saved.trees, saved.parts, saved.round, saved.final)
            self.shard.restore(str(saved.folder), *arguments)
            extend_state(self.shard, self.me, fresh)
            # If a revision of the network file has more rounds, its last step is still to come.
            more = saved.round < self.shard.world.rounds
            self.finished, self.final = saved.round, saved.final and not more
        # The account includes messages of an unfinished round, which no checkpoint has.
        self.account.open(max(self.shard.released().get(self.me, 0), _old_count(self.folder)))
        self.restore_release_count()
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():
            truncate_after(metrics, saved.round if saved else -1, self.final)
            self.skipped = sum(row.get("skipped", 0) for row in read_metrics(metrics))
            self._recorded_skips = self.skipped
        self._writer = MetricWriter(metrics, REMEDY)
        origin = _origin(owner)
        self.models = ModelKeeper(self.folder, self.shard, self.me, self.keep, origin, REMEDY)
        self.models.open()
        self._log_size(self.shard.saved_bytes + HEADER_BYTES)

    def renew(self, shard: Shard, owner: Mapping[str, Any]) -> None:
        """Continue with the shard of a higher revision of the network file."""
        self.shard = shard
        if self.folder is not None and self.models is not None:
            self._claim(self.folder / OWNER, owner)
            self.models.shard, self.models.origin = shard, _origin(owner)
            self.models.open()

    def _newest_checkpoint(self, folder: Path) -> checkpoint.Checkpoint | None:
        """The newest checkpoint that is whole; newer ones are logged and removed."""
        saved, damaged = checkpoint.load_whole(folder)
        for broken, reason in damaged.items():
            log.warning("%s; continuing from %s", reason, saved.folder.name if saved else "")
            checkpoint.remove(broken)
        return saved

    def _log_size(self, checkpoint_size: int) -> None:
        """Log how much the disk needs, if it is more than was logged before."""
        assert self.models is not None
        rounds, size = self.shard.world.rounds, self.models.size + HEADER_BYTES
        most = self.keep.most_bytes(rounds, checkpoint_size, size)
        if most > self._most_bytes:
            self._most_bytes = most
            megabytes = math.ceil(most / 1e5) / 10
            log.info("checkpoints need at most %.1f MB, model files included", megabytes)

    def _claim(self, file: Path, owner: Mapping[str, Any]) -> None:
        """Mark the folder as this peer's; raise InputError if it belongs to another one.

        A peer of the same run continues with a higher revision of the network file.
        """
        known = read_json(file) if file.exists() else owner
        before, now = (int(each.get("revision", 1)) for each in (known, owner))
        same_peer = all(known.get(key) == owner.get(key) for key in ("run", "node"))
        if same_peer and before > now:
            raise InputError(
                f"{file.parent} is that of revision {before} of the network file, and this is "
                f"revision {now}; copy the newer network file, experiment and signature"
            )
        if same_peer and before < now:
            log.info("continuing with revision %d of the network file", now)
        elif known != owner:
            raise InputError(
                f"{file.parent} belongs to a peer of another run or experiment; "
                "choose another --out, or remove it"
            )
        write_json(file, owner, REMEDY)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    # Rows

    @property
    def steps(self) -> int:
        """The number of finished rounds, including the step after the last."""
        return self.finished + self.final

    def record(
        self,
        round: int,
        report: ShardReport,
        sent: int,
        received: tuple[int, int],
        seconds: float,
        final: bool = False,
        senders: Sequence[int] = (),
        missing: Sequence[int] = (),
        out_of_contact: Sequence[int] = (),
    ) -> None:
        """Write the row of a round or of the final step: its seconds, and the bytes it sent.

        `senders` are the peers whose messages were used, and `missing` those that were not heard.
        `out_of_contact` are the members that were not in contact when the quorum was checked.
        """
        [node_report] = report.nodes or [NodeReport(self.me)]
        self.bytes_total += sent
        self.finished, self.final = round, final
        row = node_row(round, node_report, final)
        row |= {**tests_table(node_report), "bytes": sent, "heard": list(received)}
        row |= {"seconds": _rounded(report.seconds, seconds), **self._new_counts()}
        row |= {"senders": list(senders)} if senders else {}
        row |= {"missing": list(missing)} if missing else {}
        row |= self._pause()
        row |= {"epsilon": self.account.epsilon} if self.account.noise.private else {}
        if out_of_contact:
            row["out_of_contact"] = list(out_of_contact)
        if self.skipped > self._recorded_skips:
            row["skipped"] = self.skipped - self._recorded_skips
            self._recorded_skips = self.skipped
        self.rows.append(row)
        if self._writer is not None:
            self._writer.append(row)
        if self.watch is not None:
            self.watch(row)

    def _new_counts(self) -> dict[str, Any]:
        """Bytes on the wire and errors since the last row."""
        now = Counter({**self.error_counts(), "wire": self.transport.counters["bytes_sent"]})
        new = now - self._recorded
        self._recorded = now
        wire = new.pop("wire", 0)
        return {"wire_bytes": wire} | ({"troubles": dict(sorted(new.items()))} if new else {})

    def add_late_counts(self, sent: int = 0) -> None:
        """Add the bytes and errors since the last row was written to that row.

        `sent` is negative if messages that the rows count were not delivered.
        """
        new = self._new_counts()
        if not self.rows or not (sent or any(new.values())):
            return
        last = self.rows[-1]
        sent = max(sent, -last["bytes"])
        last["bytes"] += sent
        self.bytes_total += sent
        last["wire_bytes"] += new["wire_bytes"]
        errors = Counter(last.get("troubles", {})) + Counter(new.get("troubles", {}))
        last |= {"troubles": dict(sorted(errors.items()))} if errors else {}
        if self._writer is not None:
            replace_last_row(self._writer.path, last, REMEDY)

    def rewind(self, round: int) -> int:
        """Remove the rows and models after a round; return the payload bytes of these rows.

        Bytes on the wire, errors and skipped rounds of these rows go into the next one.
        """
        kept = [row for row in self.rows if is_until(row, round, False)]
        removed = self.rows[len(kept) :]
        if self._writer is not None and self.folder is not None and self.models is not None:
            self._writer.close()  # the file is replaced
            path = self._writer.path
            removed = [row for row in read_metrics(path) if not is_until(row, round, False)]
            truncate_after(path, round)
            self._writer = MetricWriter(path, REMEDY)
            remove_models_after(self.folder, round)
            self.models.best = -math.inf
            self.models.open()
        self.rows = kept
        self.finished = min(self.finished, max(round, 0))
        for row in removed:
            self._recorded.subtract({"wire": row["wire_bytes"], **row.get("troubles", {})})
            self._recorded_skips -= row.get("skipped", 0)
        sent: int = sum(row["bytes"] for row in removed)
        self.bytes_total -= sent
        return sent

    def older_checkpoint(self) -> checkpoint.Checkpoint | None:
        """The newest whole checkpoint before that of the last finished round."""
        if self.folder is None:
            return None
        for folder in reversed(checkpoint.finished(self.folder)):
            with suppress(CheckpointError):
                if checkpoint.round_of(folder) < self.finished:
                    return checkpoint.read(folder)
        return None

    def remove_checkpoints(self, after: int, before: int) -> None:
        """Remove the checkpoints between two rounds."""
        for folder in checkpoint.finished(self.folder) if self.folder is not None else ():
            if after < checkpoint.round_of(folder) < before:
                checkpoint.remove(folder)

    def error_counts(self) -> dict[str, int]:
        """Errors by reason, including calls that the transport refused."""
        refused = {key: n for key, n in dict(self.transport.refused).items() if key not in REASONS}
        return {key: n for key, n in {**dict(self.counters), **refused}.items() if n}

    @property
    def accuracy(self) -> float | None:
        """The accuracy at the last evaluation."""
        return self.latest("accuracy")

    def latest(self, metric: str) -> float | None:
        """The value of a metric at the last evaluation."""
        return next((row[metric] for row in reversed(self.rows) if metric in row), None)

    # What survives a restart

    def save_checkpoint(self, round: int, final: bool = False, evaluated: bool = True) -> None:
        """Write the state and the models after a round; `evaluated` if it evaluates models."""
        if self.folder is not None:
            every = self.keep.every
            checkpoint.save(self, self.folder, round, REMEDY, final=final, keep_every=every)
            # The state of an algorithm may grow in the first rounds.
            self._log_size(checkpoint.latest_size(self.folder))
        self.save_models(round, final, evaluated)

    def save_models(self, round: int, final: bool = False, evaluated: bool = True) -> None:
        if self.models is not None:
            self.models.save(round, final, evaluated)

    def save(self, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """Save the state of the node for `checkpoint.save`, as an engine does."""
        trees = self.shard.save(str(folder / FILE))
        return trees, dict.fromkeys(trees, FILE)

    def remember_releases(self) -> None:
        """Write new releases to the account before the messages are sent.

        Raises EpsilonReached if they would exceed its limit; then nothing may be sent.
        """
        self.account.record(self.shard.released().get(self.me, 0))

    def restore_release_count(self) -> None:
        """Count the releases of the account, and no message that was prepared but never sent."""
        if self.account.messages:
            tensors = self.shard.members[self.me].persistent_tensors
            tensors[RELEASE_COUNT] = torch.tensor(self.account.messages)

    def _pause(self) -> Row:
        """The seconds since the last row in which the peer paused; empty if it did not."""
        seconds, self._paused = self._paused, 0.0
        return {"paused": round_seconds(seconds)} if seconds else {}

    def show_pause(self, state: str | None) -> None:
        """Tell `peerage up` that this peer waits, or with None that it runs again."""
        if state is None and self._paused_since is not None:
            self._paused += perf_counter() - self._paused_since
            self._paused_since = None
        elif state is not None and self._paused_since is None:
            self._paused_since = perf_counter()
        if self.folder is None:
            return
        if state is None:
            (self.folder / PAUSED).unlink(missing_ok=True)
            return
        with suppress(TooManyOpenFiles):  # it is only shown; the log says the same
            write_json(self.folder / PAUSED, {"state": state}, REMEDY)


def _origin(owner: Mapping[str, Any]) -> dict[str, str]:
    """What the metadata of model files say about their network."""
    return {"run": str(owner.get("run")), "experiment": str(owner.get("seal"))}


def _old_count(folder: Path) -> int:
    """The number of released messages as earlier versions stored it."""
    file = folder / "released.json"
    return int(read_json(file)["messages"]) if file.exists() else 0


def _rounded(phases: dict[str, float], total: float) -> dict[str, float]:
    """Seconds per phase, rounded to microseconds and without zeros, to keep rows short."""
    rounded = {phase: round_seconds(seconds) for phase, seconds in phases.items() if seconds}
    return {**rounded, "total": round_seconds(total)}


def round_seconds(seconds: float) -> float:
    return round(seconds, 6)
