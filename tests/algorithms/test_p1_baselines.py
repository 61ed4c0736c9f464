"""The baselines of P1 by numbers: Dec. FedAvg, Dec. FedProx, Def-KT and Dec. FML."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.participants import COMPLETE, Played, make_node, message, roles, weights

import peerage as pg
from peerage import DecFedAvg, DecFedProx, DecFML, DefKT, LocalSGD
from peerage.algorithms.defkt import draw_pairs
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.testing import simulate, toy


def test_dec_fedavg_averages_by_architecture_and_examples():
    algorithm = DecFedAvg()
    hub, senders, _ = roles(algorithm)
    node = make_node(hub)
    inbox = [
        message(senders[0], weights(5, 8), examples=20),
        message(senders[1], weights(0, 0, 1, architecture="big")),
        message(senders[2], weights(0, 0, 4, architecture="big"), examples=20),
    ]
    played = Played(algorithm, node, inbox)
    assert node.params.tolist() == pytest.approx([4, 6])  # (10 * 2 + 20 * 5) / 30
    found = {to: m.payload["x"].tolist() for to, m in played.sent.items()}
    assert found[senders[0]] == node.params.tolist()
    assert found[senders[1]] == found[senders[2]] == pytest.approx([0, 0, 3])
    assert played.sent[senders[2]].architecture == "big"


def test_a_group_of_one_is_unchanged():
    algorithm = DecFedAvg()
    hub, senders, _ = roles(algorithm)
    node = make_node(hub)
    lone = weights(0.1, 0.2, 0.3, architecture="big")
    played = Played(algorithm, node, [message(senders[0], lone)])
    assert node.params.tolist() == [2, 2]
    assert played.sent[senders[0]].payload["x"] is lone.params


def test_dec_fedprox_pulls_towards_the_model_before_training():
    algorithm = DecFedProx(mu=0.3)
    node = make_node(roles(algorithm)[0])
    assert Played(algorithm, node, []).trained[0].correct == pg.Proximal(0.3)
    with pytest.raises(InputError, match="corrects gradients itself"):
        DecFedProx(LocalSGD(correct=pg.Proximal(0.1)))
    with pytest.raises(InputError, match="mu must be at least 0, got -1"):
        DecFedProx(mu=-1.0)
    still = simulate(toy(DecFedProx(LocalSGD(epochs=1), mu=0.0)))
    plain = simulate(toy(DecFedAvg(LocalSGD(epochs=1))))
    for ours, known in zip(still.end, plain.end, strict=True):
        torch.testing.assert_close(ours, known)


def test_pairs_are_disjoint_neighbours_and_uniform():
    counts: Counter[tuple[int, int]] = Counter()
    for round in range(1000):
        pairs = draw_pairs(COMPLETE, None, make_node(round=round).coin)
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs) == 4
        counts.update(pairs)
    assert len(counts) == 20
    assert all(60 < count < 140 for count in counts.values())  # 2000 / 20 = 100
    path = ((1,), (0, 2), (1, 3), (2,))
    for round in range(30):
        for sender, recipient in draw_pairs(path, 1, make_node(round=round).coin):
            assert sender in path[recipient]
        assert len(draw_pairs(path, 1, make_node(round=round).coin)) == 1
    assert draw_pairs(((), ()), None, make_node().coin) == []
    one_way = ((1,), ())  # node 0 receives from 1
    assert draw_pairs(one_way, None, make_node().coin) in ([], [(1, 0)])


def test_def_kt_keeps_the_incoming_model():
    algorithm = DefKT(epochs_mutual=3, kl_weight=0.5)
    [(sender, recipient), _] = draw_pairs(COMPLETE, None, make_node().coin)
    node = make_node(recipient)
    played = Played(algorithm, node, [message(sender, weights(5, 6))])
    [request] = played.together
    assert set(request.pupils) == {sender, recipient}
    assert request.loss == pg.MutualKL(gamma=1.0, alpha=0.5)
    assert request.work.epochs == 3
    assert played.trained == []
    assert node.params.tolist() == [15, 16]
    kept = make_node(recipient)
    Played(algorithm, kept, [message(sender, weights(5, 6))], diverged=(sender,))
    assert kept.params.tolist() == [11, 11]
    lost = make_node(recipient)
    Played(algorithm, lost, [])
    assert lost.params.tolist() == [1, 1]
    one = make_node(sender)
    played = Played(algorithm, one, [])
    assert played.sent[recipient].payload["x"].tolist() == one.params.tolist() == [2, 2]


def test_def_kt_needs_one_architecture_and_enough_nodes():
    with pytest.raises(InputError, match=r"must have one architecture, got mlp-0, mlp-1"):
        pg.run(toy(DefKT(), model=["mlp:hidden=8", "mlp:hidden=6"]))
    with pytest.raises(InputError, match="pairs=3 need 6 nodes, got 5; use at most 2"):
        pg.run(toy(DefKT(pairs=3)))
    with pytest.raises(InputError, match="kl_weight must be a number of at least 0"):
        DefKT(kl_weight=-1.0)


def test_dec_fml_sends_the_meme_and_never_the_own_model():
    algorithm = DecFML(meme="big", alpha=0.25)
    hub, senders, _ = roles(algorithm)
    node = make_node(hub)
    node.state = weights(2, 2, 2, architecture="big")
    inbox = [
        message(senders[0], weights(0, 3, 6, architecture="big"), examples=30),
        message(senders[1], weights(9, 9)),  # not a meme
    ]
    played = Played(algorithm, node, inbox)
    [request] = played.together
    assert request.pupils[5].architecture == "big"
    assert request.loss == pg.MutualKL(gamma=0.75, alpha=0.25)
    assert node.params.tolist() == [11, 11]
    assert node.state.params.tolist() == pytest.approx([6, 7.5, 9])
    assert set(played.sent) == {senders[0]}
    assert played.sent[senders[0]].payload["x"].tolist() == node.state.params.tolist()
    by_data = make_node(hub)
    by_data.state = weights(2, 2, 2, architecture="big")
    Played(replace(algorithm, weights="data"), by_data, inbox)
    assert by_data.state.params.tolist() == pytest.approx([3, 5.25, 7.5])
    one = make_node(senders[0])
    one.state = weights(2, 2, 2, architecture="big")
    played = Played(algorithm, one, [message(hub, weights(4, 4, 4, architecture="big"))])
    assert played.sent[hub].architecture == "big"
    assert one.state.params.tolist() == [4, 4, 4]
    assert one.params.tolist() == [11, 11]


@pytest.mark.parametrize(
    ("meme", "size"), [(None, 6 * 4 + 6 + 6 * 3 + 3), ("mlp-0", 67), ("mlp:hidden=3", 27)]
)
def test_the_meme_is_an_architecture_of_the_experiment_or_another(meme, size):
    experiment = toy(DecFML(meme=meme), model=["mlp:hidden=8", "mlp:hidden=6"], rounds=1)
    result = pg.run(experiment)
    memes = [models["meme"] for models in result.models]
    assert {m.params.numel() for m in memes} == {size}
    assert [models["own"].params.numel() for models in result.models] == [67, 51, 67, 51, 67]
    assert result.module(0, "meme")(torch.zeros(1, 4)).shape == (1, 3)
    groups = {row["group"] for row in result.rows if row["scope"] == "group"}
    assert groups == {"mlp-0", "mlp-1"}


def test_a_meme_that_does_not_exist():
    with pytest.raises(InputError, match="unknown model 'mpl'"):
        pg.run(toy(DecFML(meme="mpl:hidden=3")))
    with pytest.raises(InputError, match=r"alpha must lie in \[0, 1\], got 2"):
        DecFML(alpha=2.0)


def test_memes_start_equal():
    world = prepare(toy(DecFML()))
    starts = [world.draw_initial(node, "meme", "mlp", private=False) for node in range(3)]
    assert torch.equal(starts[0].params, starts[2].params)
