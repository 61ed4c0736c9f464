"""DFML by numbers: alpha, peak models, whole rounds by hand, and mutual learning of neighbours."""

from dataclasses import replace
from math import cos, pi
from typing import Any

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from support.command_line import TINY, error_line, peerage
from support.participants import Played, make_node, message, roles, weights
from torch import Tensor

import peerage as pg
from peerage import DFML, DecFedAvg, DecFML, DefKT, DFMLNeighbours, LocalSGD, Weights
from peerage.algorithm import Dimensions
from peerage.algorithms.mutual_learning import CyclicAlpha, Peak
from peerage.engine.prepare import prepare
from peerage.errors import InputError, PeerageError
from peerage.experiment.catalogue import recipes
from peerage.testing import NODES, simulate, toy
from peerage.vectors import Layout

# alpha


def test_half_cycles_by_hand():
    alpha = CyclicAlpha(0.0, 1.0, "half", period=3, increment=1)
    quarter, three = (1 - cos(pi / 3)) / 2, (1 - cos(2 * pi / 3)) / 2
    expected = [0, 0.5, 1, 0, quarter, three, 1, 0]
    assert [alpha.at(round) for round in range(8)] == pytest.approx(expected)
    scaled = CyclicAlpha(0.2, 0.8, "half", period=3, increment=0)
    assert [scaled.at(round) for round in range(4)] == pytest.approx([0.2, 0.5, 0.8, 0.2])


def test_full_cycles_by_hand():
    alpha = CyclicAlpha(0.0, 1.0, "full", period=4, increment=1)
    odd = [0, 0.5, 1, (1 + cos(pi / 3)) / 2, (1 + cos(2 * pi / 3)) / 2]  # the period of five rounds
    assert [alpha.at(round) for round in range(9)] == pytest.approx([0, 0.5, 1, 0.5, *odd])


@pytest.mark.parametrize("cycle", ["half", "full"])
@pytest.mark.parametrize("maximum", [0.8, 0.9, 1.0])
def test_every_period_reaches_the_maximum_exactly_and_once(cycle, maximum):
    for period in range(1, 31):
        alpha = CyclicAlpha(0.1, maximum, cycle, period, 0)
        values = [alpha.at(round) for round in range(period, 2 * period)]
        assert values.count(maximum) == 1
        assert max(values) == maximum
        assert min(values) >= 0.1
        assert values[0] == (0.1 if period > 1 else maximum)


def test_maxima_of_growing_half_cycles():
    alpha = DFML().cyclic_alpha
    maxima = [round + 1 for round in range(60) if alpha.at(round) == 0.9]
    assert maxima == [10, 21, 33, 46, 60]


def test_the_weights_of_eq_10():
    for schedule, gamma, delta in [
        ("both_opposite", 0.75, 0.25),
        ("ce_only", 0.75, 1.0),
        ("kl_only", 1.0, 0.25),
        ("common", 0.25, 0.25),
    ]:
        loss: Any = DFML(schedule=schedule, kl_weights="uniform", reduction="sum").loss(0.25)
        assert (loss.gamma, loss.alpha) == (gamma, delta)
        assert (loss.weights, loss.reduction) == ("uniform", "sum")


def test_anl_kd_falls_and_wsl_has_no_alpha():
    assert DFML(balance="anl-kd").alpha(make_node(round=25)) == 0.75
    wsl = DFML(balance="wsl", kl_weights="uniform")
    node = make_node(roles(wsl)[0])
    assert Played(wsl, node).together[0].loss == pg.WeightedSoftLabels(weights="uniform")
    assert node.notes == {}
    assert node.state.model.params.tolist() == node.params.tolist()


# Peak models


def updated(algorithm: DFML, round: int, known: float) -> tuple[bool, float]:
    """Whether the peak model follows in a round, and its alpha after that."""
    node = make_node(round=round)
    node.state = Peak(weights(0, 0), known)
    algorithm.update(node, weights(round, round))
    assert node.params.tolist() == [round, round]
    return node.state.model.params.tolist() == [round, round], node.state.alpha


def test_peak_models_follow_until_the_first_maximum_and_then_at_maxima():
    dfml, known, followed = DFML(), 0.0, []
    for round in range(40):
        follows, known = updated(dfml, round, known)
        if follows:
            followed.append(round + 1)
    assert followed == [*range(1, 11), 21, 33]
    assert known == 0.9


def test_with_few_senders_peak_models_also_follow_near_the_maximum():
    dfml = DFML(senders=1)  # of five nodes: ceil(5 / 2) = 3 values
    assert dfml.peak_values(5) == 3
    followed = [round + 1 for round in range(10, 33) if updated(dfml, round, 0.9)[0]]
    assert followed == [19, 20, 21, 31, 32, 33]
    assert updated(dfml, 18, 0.9)[1] == 0.9  # alpha stays the largest so far
    once = DFML(senders=1, peaks=1)
    assert [round + 1 for round in range(10, 33) if updated(once, round, 0.9)[0]] == [21, 33]
    full = DFML(senders=1, cycle="full", period=10, period_increment=0)
    assert [round for round in range(10, 20) if updated(full, round, 0.9)[0]] == [*range(13, 18)]


def test_how_many_values_count_in_p1():
    assert [DFML(senders=share).peak_values(50) for share in (0.5, 0.2, 0.1)] == [1, 3, 5]
    assert DFML(peaks=4).peak_values(50) == 4


def test_a_fixed_alpha_makes_peak_models_the_regular_ones():
    dfml = DFML(alpha_min=0.5, alpha_max=0.5)
    assert all(updated(dfml, round, 0.5) == (True, 0.5) for round in range(30))


# Rounds of DFML with scripted answers


def test_an_aggregator_trains_all_models_and_returns_them():
    dfml = DFML(LocalSGD(epochs=1, steps=None, momentum=0.9), epochs_mutual=4, alpha_min=0.25)
    hub, senders, _ = roles(dfml)
    node = make_node(hub)
    inbox = [
        message(senders[0], weights(5, 5)),
        message(senders[1], weights(7, 7, 7, architecture="big")),
    ]
    played = Played(dfml, node, inbox)  # the third message was lost
    [request] = played.together
    assert (request.work.epochs, request.work.momentum) == (4, 0.9)
    assert {key: m.params.tolist() for key, m in request.pupils.items()} == {
        hub: [2, 2],
        senders[0]: [5, 5],
        senders[1]: [7, 7, 7],
    }
    assert request.loss == pg.MutualKL(gamma=0.75, alpha=0.25)
    assert node.params.tolist() == [12, 12]
    assert node.state.model.params.tolist() == [12, 12]
    assert {to: m.payload["x"].tolist() for to, m in played.sent.items()} == {
        senders[0]: [15, 15],
        senders[1]: [17, 17, 17],
    }
    assert played.sent[senders[1]].architecture == "big"
    assert node.notes == {"alpha": 0.25}


def test_a_model_that_diverged_at_the_aggregator_is_not_returned():
    dfml = DFML()
    hub, senders, _ = roles(dfml)
    node = make_node(hub)
    inbox = [message(sender, weights(5, 5)) for sender in senders]
    played = Played(dfml, node, inbox, diverged=(hub, senders[0]))
    assert sorted(played.sent) == sorted(senders[1:])
    assert node.params.tolist() == [2, 2]  # trained on its own data only
    assert node.state.model.params.tolist() == [1, 1]


def test_a_sender_adopts_what_comes_back():
    dfml = DFML()
    hub, senders, _ = roles(dfml)
    node = make_node(senders[0])
    played = Played(dfml, node, [message(hub, weights(9, 9))])
    assert played.sent[hub].payload["x"].tolist() == [2, 2]
    assert node.params.tolist() == [9, 9]
    assert node.state.model.params.tolist() == [9, 9]


@pytest.mark.parametrize("reply", [[], [message(0, weights(9, 9, 9, architecture="big"))]])
def test_a_sender_without_a_fitting_reply_keeps_its_model_and_its_peak(reply):
    dfml = DFML()
    _hub, senders, _ = roles(dfml)
    node = make_node(senders[0])
    Played(dfml, node, reply)
    assert node.params.tolist() == [2, 2]
    assert node.state.model.params.tolist() == [1, 1]


def test_others_do_nothing_but_wait_for_the_end():
    dfml = DFML()
    hub, _, other = roles(dfml)
    node = make_node(other)
    played = Played(dfml, node, [])
    assert (played.trained, played.together, played.sent) == ([], [], {})
    assert played.received == [(hub,)]
    assert node.params.tolist() == [1, 1]


def test_vanilla_distillation_updates_the_aggregator_only():
    dfml = DFML(teacher="vanilla")
    hub, senders, _ = roles(dfml)
    node = make_node(hub)
    played = Played(dfml, node, [message(sender, weights(5, 5)) for sender in senders])
    [request] = played.together
    assert set(request.pupils) == {hub}
    assert set(request.teachers) == set(senders)
    assert played.sent == {}
    assert node.params.tolist() == [12, 12]
    sender = make_node(senders[0])
    Played(dfml, sender, [])
    assert sender.params.tolist() == sender.state.model.params.tolist() == [2, 2]


# A whole round against a plain loop


def plain_dfml(experiment: pg.Experiment, dfml: DFML, alpha: float) -> dict[int, Tensor]:
    """One round of DFML with one batch per epoch, in plain torch."""
    world = prepare(experiment)
    hub, senders = dfml.participants(make_node())
    modules, sizes = {}, {}
    lr = experiment.local.lr

    def supervised(z: Tensor, y: Tensor, node: int) -> Tensor:
        b = world.label_proportions(node)
        return (torch.logsumexp(z + b.log().clamp(min=-1e9), 1) - z[torch.arange(len(y)), y]).mean()

    def step(module: Any, loss: Tensor) -> None:
        for parameter, g in zip(
            module.parameters(), torch.autograd.grad(loss, [*module.parameters()]), strict=True
        ):
            parameter.data -= lr * g

    for node in (hub, *senders):
        kind = world.architecture(node)
        module = modules[node] = kind.module(*kind.initial(world.seed, None)).train()
        sizes[node] = sum(parameter.numel() for parameter in module.parameters())
        x, y = world.train.take(world.parts[node])
        step(module, supervised(module(x), y, node))
    x, y = world.train.take(world.parts[hub])
    for _ in range(dfml.epochs_mutual):
        z = {node: module(x) for node, module in modules.items()}
        p = {node: F.softmax(logits.detach(), 1) for node, logits in z.items()}
        for node, module in modules.items():
            total = sum(size for other, size in sizes.items() if other != node)
            kl = sum(
                sizes[q] / total * (p[q] * (p[q].log() - F.log_softmax(z[node], 1))).sum(1).mean()
                for q in modules
                if q != node
            )
            step(module, (1 - alpha) * supervised(z[node], y, hub) + alpha * kl)
    return {
        node: torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        for node, module in modules.items()
    }


def test_a_round_is_that_of_a_plain_loop():
    work = LocalSGD(epochs=1, batch_size=60, lr=0.1, loss=pg.WSM())
    dfml = DFML(work, epochs_mutual=3, alpha_min=0.4, senders=3)
    experiment = toy(
        dfml, topology="complete", rounds=1, model=["mlp:hidden=8", "mlp:hidden=5", "logistic"]
    )
    ended = simulate(experiment)
    expected = plain_dfml(experiment, dfml, alpha=0.4)
    assert len(expected) == 4
    for node in range(NODES):
        wanted = expected.get(node, ended.start[node])
        torch.testing.assert_close(ended.end[node], wanted, rtol=1e-5, atol=1e-5)
        assert (node in expected) != torch.equal(ended.end[node], ended.start[node])


# Neighbours without a hub


def test_neighbours_return_models_and_average_the_versions_of_their_own():
    path = ((1,), (0, 2), (1,))
    node = make_node(1, path)
    first = [message(0, weights(5, 5)), message(2, weights(7, 7, 7, architecture="big"))]
    back = [message(0, weights(6, 0), examples=30)]  # node 2 lost the model
    played = Played(DFMLNeighbours(), node, first, back)
    [request] = played.together
    assert set(request.pupils) == {0, 1, 2}
    assert {to: m.payload["x"].tolist() for to, m in played.sent.items()} == {
        0: [15, 15],
        2: [17, 17, 17],
    }
    assert node.params.tolist() == pytest.approx([(12 + 3 * 6) / 4, 3])
    assert node.state.model.params.tolist() == node.params.tolist()


def test_neighbours_as_teachers_that_do_not_change():
    node = make_node(1, ((1,), (0, 2), (1,)))
    played = Played(DFMLNeighbours(keep="own"), node, [message(0, weights(5, 5))])
    [request] = played.together
    assert (set(request.pupils), set(request.teachers)) == ({1}, {0})
    assert node.params.tolist() == [12, 12]


def test_two_neighbours_that_lose_each_others_models_continue():
    lossy = pg.run(toy(DFMLNeighbours(LocalSGD(epochs=1), epochs_mutual=1), faults={"loss": 0.6}))
    assert all(torch.isfinite(x).all() for x in lossy.parameters)


# Networks


def test_lost_messages_leave_local_models():
    work = LocalSGD(epochs=1, lr=0.1)
    dfml = DFML(work, epochs_mutual=2)
    experiment = toy(dfml, topology="complete", rounds=1, faults={"loss": 1.0 - 1e-12})
    ended = simulate(experiment)
    trained = simulate(toy(pg.Local(work), rounds=1, init={"start": "shared"}))
    _, senders, other = roles(dfml)
    for sender in senders:
        assert torch.equal(ended.end[sender], trained.end[sender])
    assert torch.equal(ended.end[other], ended.start[other])


def test_peak_and_regular_models_are_evaluated_and_alpha_is_recorded(tmp_path):
    dfml = DFML(LocalSGD(epochs=1), epochs_mutual=1, period=3, alpha_max=1.0)
    result = pg.run(toy(dfml, rounds=5, evaluation={"validation": 0.2}), tmp_path / "run")
    assert set(result.models[0]) == {"peak", "regular"}
    last = result.rows[-1]
    assert "validation_accuracy" in last
    assert "regular" in last["models"]
    alphas = pg.RunRecord.load(tmp_path / "run").notes("alpha")
    for _, values in alphas.values():
        assert values == pytest.approx([0, 0.5, 1, 0, 0.25])
    assert result.experiment.init.start == "shared"


def test_bytes_are_those_of_the_models_that_travel():
    dfml = DFML(LocalSGD(epochs=1), epochs_mutual=1)
    ended = simulate(toy(dfml, topology="complete", rounds=2))
    assert ended.bytes == [2 * 3 * 4 * 67] * 2
    one_way = simulate(toy(replace(dfml, teacher="vanilla"), topology="complete", rounds=2))
    assert one_way.bytes == [3 * 4 * 67] * 2


def test_costs():
    dimensions = Dimensions(Layout.of([("w", torch.zeros(8))]), Layout(()), 10, 3, (4,))
    dfml = DFML().cost(0, dimensions, examples=5)
    assert (dfml.vectors, dfml.passes, dfml.forward, dfml.state) == (10 / 90, 10.0, 0.0, 1.0)
    assert DFML().participation(10) == 0.6
    assert DefKT(pairs=2).participation(10) == 0.4
    vanilla = DFML(teacher="vanilla").cost(0, dimensions, examples=5)
    assert vanilla.vectors == 5 / 90
    assert (vanilla.passes, vanilla.forward) == pytest.approx((10 / 6, 50 / 6))
    assert DecFedAvg().cost(0, dimensions, examples=5).vectors == 10 / 90
    kt = DefKT().cost(0, dimensions, examples=5)
    assert (kt.vectors, kt.passes) == (5 / 90, 10.0)
    fml = DecFML().cost(0, dimensions, examples=5)
    assert (fml.vectors, fml.passes) == (10 / 90, 1.0)
    mean = DFMLNeighbours().cost(0, dimensions, examples=5)
    assert (mean.vectors, mean.passes) == (2.0, 100)
    own = DFMLNeighbours(keep="own").cost(0, dimensions, examples=5)
    assert (own.vectors, own.passes, own.forward) == (1.0, 10, 90)


@pytest.mark.slow
def test_dfml_leads_dec_fedavg_in_its_recipe():
    text = recipes()["dfml-quick"].read_text()
    found = {
        name: pg.run(pg.Experiment.from_toml(text, algorithm=name, rounds=10)).rows[-1]["accuracy"]
        for name in ("dfml", "dec-fedavg")
    }
    assert found["dfml"] > found["dec-fedavg"] + 0.15
    recipe = pg.Experiment.from_toml(text)
    dfml: Any = recipe.algorithm
    assert dfml.cyclic_alpha.at(recipe.rounds - 1) == dfml.alpha_max  # it ends at a maximum


def test_nodes_join_and_leave_a_walk():
    """A node that joins late knows whose turn it is."""
    dfml = DFML(LocalSGD(epochs=1), epochs_mutual=1, aggregator="walk")
    changes = {"topology": "complete", "rounds": 6, "faults": {"join": "2@4", "leave": "0@3"}}
    ended = simulate(toy(dfml, **changes))
    assert ended.bytes[2] == 2 * 2 * 4 * 67  # three nodes, two of them senders
    assert not torch.equal(ended.end[2], ended.start[2])


# Errors


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"period": 0}, "period must be at least 1, got 0"),
        ({"period_increment": -1}, "period_increment must be at least 0 rounds, got -1"),
        ({"epochs_mutual": 0}, "epochs_mutual must be at least 1, got 0"),
        ({"peaks": 0}, "peaks must be at least 1, got 0"),
        ({"alpha_min": -0.1}, r"alpha_min must lie in \[0, 1\], got -0.1"),
        ({"alpha_max": 1.5}, r"alpha_max must lie in \[0, 1\], got 1.5"),
        ({"alpha_min": 0.5, "alpha_max": 0.4}, "alpha_min=0.5 is above alpha_max=0.4"),
        ({"alpha_max": float("nan")}, r"alpha_max must lie in \[0, 1\], got nan"),
        ({"balance": "wsl", "period": 5}, "period=5 has no effect with balance=wsl"),
        ({"balance": "wsl", "reduction": "sum"}, "reduction=sum has no effect"),
        ({"balance": "anl-kd", "peaks": 2}, "peaks=2 has no effect with balance=anl-kd"),
        ({"cycle": "whole"}, "cycle must be one of half, full"),
        ({"senders": 0}, "senders must be a number above 0, got 0"),
        ({"senders": 2.5}, "senders must be a share below 1 or a whole number, got 2.5"),
        ({"local": LocalSGD(keep_optimizer=True)}, "leave out keep_optimizer"),
    ],
)
def test_dfml_rejects_bad_options(options, text):
    with pytest.raises(InputError, match=text):
        DFML(**options)


def test_dfml_rejects_networks_that_do_not_fit():
    with pytest.raises(
        InputError, match=r"senders=5 are more than the 4 nodes besides .* use at most 4"
    ):
        pg.run(toy(DFML(senders=5)))
    cycle = nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)])
    for algorithm in (DFML(), DecFedAvg(), DecFML(), DFMLNeighbours()):
        with pytest.raises(InputError, match="use an undirected graph"):
            pg.run(toy(algorithm, topology=cycle))
    one_way = simulate(toy(DFMLNeighbours(LocalSGD(epochs=1), keep="own"), topology=cycle))
    assert all(torch.isfinite(x).all() for x in one_way.end)


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        ("dfml:period=0", "period must be at least 1, got 0"),
        ("dfml:alpha_max=2", "alpha_max must lie in [0, 1], got 2.0"),
        ("dfml:senders=99", "are more than the"),
        ("def-kt:pairs=99", "pairs=99 need 198 nodes"),
        ("dec-fml:meme=mpl", "unknown model 'mpl'; did you mean 'mlp'?"),
    ],
)
def test_errors_on_the_command_line(algorithm, text, tmp_path):
    line = error_line(peerage(f"run {TINY} --algorithm {algorithm} --out", tmp_path / "run"))
    assert text in line


def test_a_payload_of_an_unknown_architecture_is_rejected():
    class Wrong(DFML):
        def shared(self, node: Any) -> Weights:
            return Weights(node.params, node.buffers, "vgg99")

    with pytest.raises(PeerageError, match="architecture 'vgg99', which no node has"):
        pg.run(toy(Wrong(LocalSGD(epochs=1))))


def test_compare_needs_one_start(tmp_path):
    line = f"compare {TINY} --algorithms decavg,dec-fedavg --out"
    line = error_line(peerage(line, tmp_path / "both"))
    assert "decavg independent and dec-fedavg shared" in line
    assert "--init shared" in line
