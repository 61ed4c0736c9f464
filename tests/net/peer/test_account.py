"""The privacy account of a data set: over restarts and runs, and at its limit."""

import json
import math
import multiprocessing
import re
import warnings
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from support.machines import Machines
from support.networking import run_peers

import peerage as pg
from peerage import DecAvg
from peerage.data.custom import Folder, Npz
from peerage.data.datasets import Digits
from peerage.errors import DiskError, InputError
from peerage.net.peer.account import (
    ACCOUNT,
    Entry,
    EpsilonReached,
    PrivacyAccount,
    account_beside,
    check_bypass,
    read_account,
    released_messages,
)
from peerage.net.peer.network import Timeouts
from peerage.net.peer.progress import State
from peerage.privacy import Noise, composed_epsilon, epsilon
from peerage.testing import toy

NOISE = Noise(sigma=2.0, clip=1.0)
OTHER = Noise(sigma=3.0, clip=0.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.npz.privacy.json"


def opened(path: Path | None, run: str = "spring", noise: Noise = NOISE, **more: Any) -> Any:
    account = PrivacyAccount(path, run, "node-0", noise, **more)
    account.open()
    return account


# Composition


def test_runs_with_different_noise_compose_like_gaussian_mechanisms() -> None:
    released = [(NOISE, 3), (OTHER, 40)]
    value = composed_epsilon(released, 1e-5)
    # One mechanism with 1 / m^2 = 3 / 1^2 + 40 / 3^2.
    m = 1 / math.sqrt(3 + 40 / 9)
    assert value == pytest.approx(epsilon(Noise(sigma=2 * m, clip=1.0), 1), rel=1e-12)
    accountant = rdp.RdpAccountant()
    for noise, count in released:
        event = dp_accounting.GaussianDpEvent(noise.sigma / (2 * noise.clip))
        accountant.compose(event, count)
    with warnings.catch_warnings():  # the orders it tries do not all suit every case
        warnings.simplefilter("ignore")
        loose = accountant.get_epsilon(1e-5)
    assert value <= loose <= 1.2 * value
    assert composed_epsilon([(NOISE, 3)], NOISE.delta) == epsilon(NOISE, 3)
    assert composed_epsilon([], 1e-5) == composed_epsilon([(Noise(1.0), 0)], 1e-5) == 0.0
    assert composed_epsilon([(NOISE, 3), (Noise(1.0), 1)], 1e-5) is None


# The file


def test_the_account_goes_on_over_restarts_and_runs(path: Path) -> None:
    first = opened(path)
    assert list(first.statements(9)) == []
    for count in (1, 2, 2, 1):  # it never falls
        first.record(count)
    assert (first.messages, first.epsilon) == (2, epsilon(NOISE, 2))
    restarted = opened(path)
    assert restarted.messages == 2
    [line] = restarted.statements(9)
    assert line.startswith("this run has already released 2 messages of this peer: epsilon ")
    restarted.record(3)
    second = opened(path, "summer", OTHER)
    second.record(5)
    together = composed_epsilon([(NOISE, 3), (OTHER, 5)], 1e-5)
    assert (second.messages, second.epsilon) == (5, together)
    assert second.epsilon_run == epsilon(OTHER, 5)
    third = opened(path, "autumn")
    [line] = third.statements(4)
    after = composed_epsilon([(NOISE, 3), (OTHER, 5), (NOISE, 4)], 1e-5)
    assert line == (
        f"this data had already spent epsilon {together:.4g} at delta 1e-05 in 2 earlier runs, and "
        f"will have spent {after:.4g} after this one ({path})"
    )
    assert [entry.messages for entry in read_account(path)] == [3, 5, 0]
    assert third.facts()["earlier_runs"] == 2


def test_a_count_of_an_earlier_version_or_a_checkpoint_is_kept(path: Path) -> None:
    account = PrivacyAccount(path, "spring", "node-0", NOISE)
    account.open(known=7)
    assert opened(path).messages == 7


def test_a_deleted_file_does_not_reset_a_running_peer(path: Path) -> None:
    opened(path, "winter").record(2)
    account = opened(path)
    path.unlink()
    account.record(1)
    assert {(entry.run, entry.messages) for entry in read_account(path)} == {
        ("winter", 2),
        ("spring", 1),
    }


def test_noise_that_is_not_active_needs_no_account(path: Path) -> None:
    account = opened(path, noise=Noise())
    account.record(3)
    assert not path.exists()


def test_messages_without_clip_leave_no_bound(path: Path) -> None:
    opened(path, noise=Noise(sigma=1.0)).record(1)
    account = opened(path, "summer")
    account.record(1)
    assert (account.epsilon, account.epsilon_run) == (None, epsilon(NOISE, 1))


def test_it_is_written_before_anything_is_released(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"cannot write .*gone.*; choose a folder"):
        opened(tmp_path / "gone" / ACCOUNT)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "list indices"),
        ("{}", "it lacks 'version'"),
        ('{"version": 2, "entries": []}', "version 2, expected 1"),
        ('{"version": 1, "entries": [3]}', "'int' object"),
        ('{"version": 1, "entries": [{"run": "a"}]}', "requires peer"),
        (
            '{"version": 1, "entries": [{"run": "a", "peer": "b", "sigma": 1, "clip": 1, '
            '"messages": -2}]}',
            "messages must be at least 0, got -2",
        ),
    ],
)
def test_a_damaged_file_is_an_error_with_a_remedy(path: Path, text: str, reason: str) -> None:
    path.write_text(text)
    for use in (opened, read_account, lambda path: check_bypass(path, Noise())):
        with pytest.raises(InputError) as found:
            use(path)
        message = str(found.value)
        assert message.startswith(f"the privacy account {path} is damaged (")
        assert reason in message
        assert message.endswith("restore the file, or delete it if you give up the earlier account")
        assert "\n" not in message
    assert path.read_text() == text


def spend(path: Path, peer: str, count: int) -> None:
    account = PrivacyAccount(path, "run", peer, NOISE)
    account.open()
    for messages in range(1, count + 1):
        account.record(messages)


@pytest.mark.slow
def test_two_processes_share_one_account(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    pair = [context.Process(target=spend, args=(path, f"node-{i}", 20)) for i in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join()
    found = sorted(read_account(path), key=lambda entry: entry.peer)
    assert found == [Entry("run", name, 2.0, 1.0, 20) for name in ("node-0", "node-1")]


# Where it is


def test_the_account_is_beside_the_data(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    link = tmp_path / "link.npz"
    link.symlink_to(tmp_path / "mine.npz")
    found = [Npz(path=str(link)), Folder(path=f"{tmp_path}/pictures/"), Digits()]
    assert [account_beside(data) for data in found] == [
        tmp_path / "mine.npz.privacy.json",
        tmp_path / "pictures.privacy.json",
        None,
    ]


def test_data_with_an_account_is_not_used_without_privacy(path: Path) -> None:
    for noise in (Noise(), Noise(sigma=1.0), Noise(clip=1.0)):
        check_bypass(path, noise)
        check_bypass(None, noise)
    opened(path).record(1)
    check_bypass(path, OTHER)
    for noise in (Noise(), Noise(sigma=1.0), Noise(clip=1.0)):
        with pytest.raises(InputError, match=r"mine\.npz.* set --noise and --clip, or delete the"):
            check_bypass(path, noise)


# The limit


def test_a_message_above_the_limit_is_not_recorded(path: Path) -> None:
    limit = epsilon(NOISE, 3)
    account = opened(path, limit=limit)
    account.record(3)  # exactly the limit
    text = path.read_text()
    with pytest.raises(EpsilonReached) as found:
        account.record(4)
    assert str(found.value) == (
        f"epsilon {limit:.4g} at delta 1e-05, and the next message would exceed "
        f"--stop-at-epsilon {limit:g}"
    )
    assert path.read_text() == text
    assert account.messages == 3
    other = opened(path, "summer", limit=limit)  # the limit is one of the data, not of the run
    with pytest.raises(EpsilonReached):
        other.record(1)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.inf, math.nan])
def test_limits_that_mean_nothing(limit: float) -> None:
    with pytest.raises(InputError, match="--stop-at-epsilon must be a number above 0, got"):
        PrivacyAccount(None, "run", "node-0", NOISE, limit)


def test_a_limit_requires_privacy() -> None:
    with pytest.raises(InputError, match="requires differential privacy; set --noise and --clip"):
        PrivacyAccount(None, "run", "node-0", Noise(1.0), 2.0)


@pytest.mark.slow
def test_a_peer_at_its_limit_stops_and_the_others_go_on(tmp_path: Path) -> None:
    experiment = toy(
        DecAvg(), rounds=5, noise={"sigma": 2.0, "clip": 1.0}, nodes=3, topology="complete",
        partition="iid",
    )  # fmt: skip

    def account(me: int) -> PrivacyAccount:
        limit = epsilon(NOISE, 2) if me == 1 else None
        folder = tmp_path / str(me)
        return PrivacyAccount(folder / ACCOUNT, "test", f"node-{me}", NOISE, limit)

    peers = run_peers(experiment, tmp_path, accounts=account)
    assert [peer.finished for peer in peers] == [5, 2, 5]
    assert [peer.state for peer in peers if peer.me != 1] == [State.FINISHED] * 2
    assert peers[1].state.startswith(f"stopped: epsilon {epsilon(NOISE, 2):.4g} at ")
    assert [released_messages(tmp_path / str(me)) for me in range(3)] == [5, 2, 5]
    assert peers[1].shard.released() == {1: 2}
    # Nobody waited for it: in the rounds after its last, nothing was missing.
    assert [row["heard"] for row in peers[0].rows[1:]] == [[2, 2]] * 2 + [[1, 1]] * 3
    spent = [row["epsilon"] for row in peers[1].rows]
    assert spent == [0.0, epsilon(NOISE, 1), epsilon(NOISE, 2)]
    # If it is started again, it stops again; its model is that of its last round.
    again = run_peers(experiment, tmp_path, accounts=account)
    assert again[1].finished == 2
    assert released_messages(tmp_path / "1") == 2


@pytest.mark.slow
def test_all_peers_may_reach_their_limit() -> None:
    """Peers that have stopped must not keep each other alive."""
    experiment = toy(DecAvg(), rounds=5, noise={"sigma": 2.0, "clip": 1.0})

    def account(me: int) -> PrivacyAccount:
        return PrivacyAccount(None, "test", f"node-{me}", NOISE, epsilon(NOISE, 3))

    assert {peer.finished for peer in run_peers(experiment, accounts=account)} == {3}


# With real processes


def digits(tmp_path: Path, me: int) -> Path:
    rng = np.random.default_rng(me)
    file = tmp_path / f"data-{me}.npz"
    x, y = rng.random((40, 6), dtype=np.float32), np.arange(40) % 3
    np.savez(file, x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    return file


@pytest.mark.slow
def test_a_network_states_epsilon_and_the_account_goes_on(tmp_path: Path) -> None:
    """Before the start, after each round, after a restart, and in a second run on the data."""
    files = [digits(tmp_path, me) for me in range(2)]
    noise = {"sigma": 2.0, "clip": 1.0}
    timeouts = Timeouts(start=600, message=600, idle=5)

    def network(name: str, rounds: int) -> Machines:
        home = tmp_path / name
        home.mkdir()
        settings = pg.Experiment(
            nodes=2, topology="ring", model="logistic", rounds=rounds, partition="iid", noise=noise
        )
        machines = Machines(home, settings, timeouts)
        text = (home / "network.toml").read_text()
        (home / "network.toml").write_text(text.replace('run = "test"', f'run = "{name}"'))
        return machines

    def start(machines: Machines, me: int, *more: str) -> None:
        machines.start(me, more=["--data", f"npz:path={files[me]}", *more])

    with network("first", 3) as first:
        for me in range(2):
            start(first, me)
        assert first.wait() == [0, 0]
        expected = [epsilon(NOISE, count) for count in range(4)]
        for me in range(2):
            before, _, after = first.log(me).partition("round 0 of 3")
            assert f"differential privacy: epsilon {expected[3]:.4g} at delta 1e-05" in before
            found = re.findall(r"round (\d) of 3.*, epsilon (\S+) at delta 1e-05", after)
            assert found == [(str(n), f"{expected[n]:.4g}") for n in (1, 2, 3)]
            assert [row["epsilon"] for row in first.rows(me)] == expected
            summary = json.loads((first.folders[me] / "summary.json").read_text())
            assert summary["privacy"]["epsilon"] == summary["privacy"]["epsilon_run"] == expected[3]
            [entry] = read_account(files[me].with_name(f"{files[me].name}.privacy.json"))
            assert (entry.run, entry.peer, entry.messages) == ("first", f"node-{me}", 3)

    with network("second", 10**6) as second:
        start(second, 0)
        start(second, 1)
        second.until(lambda: second.round(0) >= 2)
        text = f"this data had already spent epsilon {expected[3]:.4g} at delta 1e-05 in 1 earlier"
        assert text in second.log(0)
        assert second.rows(0)[1]["epsilon"] == pytest.approx(epsilon(NOISE, 4), rel=1e-12)
        second.processes[0].kill()
        second.processes.pop(0).wait()
        known = {entry.run: entry.messages for entry in read_account(account_path(files[0]))}
        assert known["first"] == 3
        assert known["second"] >= 2
        # A limit that it has reached already: it says so, and ends; the other one goes on alone.
        start(second, 0, "--stop-at-epsilon", "1.5")
        second.until(lambda: "exceed --stop-at-epsilon 1.5; training has stopped" in second.log(0))
        assert f"this run has already released {known['second']} messages" in second.log(0)
        stopped = second.round(1)
        second.until(lambda: second.round(1) >= stopped + 3)
        assert read_account(account_path(files[0]))[1].messages == known["second"]


def account_path(file: Path) -> Path:
    found = account_beside(Npz(path=str(file)))
    assert found is not None
    return found
