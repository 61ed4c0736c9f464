"""Fine-tuning: frozen parameters are constants of the architecture; unused layers do not change."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.memory import MemoryNetwork, MemoryTransport
from support.networking import network_of, run_peers
from torch import Tensor, nn

import peerage as pg
from peerage import DecAvg, DecHW, LocalSGD, Proximal, run
from peerage.engine.prepare import prepare
from peerage.errors import CheckpointError, InputError, Interrupted
from peerage.models.start import Architecture, own_architecture
from peerage.net.peer.peer import Peer
from peerage.testing import NODES, blobs, simulate, toy
from peerage.vectors import FlatModel, Layout, trained_parameters
from peerage.work.context import Examples, LocalContext
from peerage.work.curvature import KINDS, Curvature, Gradient
from peerage.work.newton import Derivatives
from peerage.work.persample import squares_by_vmap, sum_squared_gradients
from peerage.work.training import Train

HEAD = 6 * 3 + 3  # parameters
ENGINES = {"serial": {"name": "serial"}, "pool": {"name": "pool", "workers": 2}}


def freeze(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def random_backbone() -> nn.Module:
    """Its frozen values are redrawn whenever it is built."""
    return nn.Sequential(freeze(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))


def pretrained(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
    backbone(2 + torch.randn(50, 4))  # its statistics are no longer the initial ones
    return nn.Sequential(freeze(backbone), nn.Linear(6, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        freeze(nn.Conv2d(2, 4, 3)), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(3, 3)
    )


class Unused(nn.Module):
    """Two layers of four do nothing for the output."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 2)
        self.hidden = nn.Linear(4, 5)
        self.kernel = nn.Conv2d(2, 3, 3)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.hidden(x)))
        return logits


IDLE = {"idle.weight", "idle.bias", "kernel.weight", "kernel.bias"}


def local_data(module: nn.Module, **changes: Any) -> LocalContext:
    data = blobs()
    return LocalContext(
        node=0,
        round=0,
        seed=7,
        data=Examples(data.train_x, data.train_y),
        indices=torch.arange(20),
        architecture="net",
        models={"net": FlatModel(module)},
        persistent_tensors={},
        **changes,
    )


def trained(work: LocalSGD, local: LocalContext, **options: Any) -> Any:
    model = local.models["net"]
    return Train(work, model.params.clone(), model.buffers.clone(), {}, **options).run(local)


# Vectors


def test_a_vector_holds_trained_parameters_only():
    module = convolutional()
    x = torch.randn(5, 2, 4, 4)
    expected = module(x)
    model = FlatModel(module)
    assert [slot.name for slot in model.layout.slots] == [
        "2.weight",
        "2.bias",
        "4.weight",
        "4.bias",
    ]
    assert model.layout.size == len(model.params) == 4 * 3 * 4 + 3 + 3 * 3 + 3
    torch.testing.assert_close(model.module(x), expected)
    model.load(torch.zeros_like(model.params))
    assert module[0].weight.any()
    assert not module[2].weight.any()


# Architectures


@pytest.mark.parametrize("start", [None, 0, 1])
def test_constants_are_the_same_in_every_model_of_an_architecture(start):
    architecture = Architecture("net", random_backbone, seed=3)
    state = torch.get_rng_state()
    params, buffers = architecture.initial(3, start)
    modules = [
        architecture.specimen(),
        architecture.build_flat().module,
        architecture.module(params, buffers),
        Architecture("net", random_backbone, seed=3).specimen(),  # in another process
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert len(params) == HEAD
    for module in modules:
        for name, value in architecture.constants.items():
            assert torch.equal(module.state_dict()[name], value)
    assert architecture.constants.keys() == {"0.weight", "0.bias"}
    other = Architecture("net", random_backbone, seed=4)
    assert not torch.equal(other.constants["0.weight"], architecture.constants["0.weight"])
    assert other.constants_hash != architecture.constants_hash
    assert Architecture("net", lambda: nn.Linear(2, 3)).constants_hash is None


def test_exports_hold_constants_that_are_copies():
    architecture = own_architecture(pretrained(), "net")
    state = architecture.state_dict(*architecture.initial(0, None))
    wanted = {name: v for name, v in pretrained().state_dict().items() if v.is_floating_point()}
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], value) for name, value in wanted.items())
    state["0.0.weight"].zero_()
    module = architecture.module(*architecture.initial(0, None))
    with torch.no_grad():
        module[0][0].bias.zero_()
    assert architecture.constants["0.0.weight"].any()
    assert architecture.constants["0.0.bias"].any()


@pytest.mark.parametrize("scheme", ["torch", "he", "he-normal"])
@pytest.mark.parametrize("bias", [None, "zero", "scaled"])
def test_starts_and_gains_leave_constants_alone(scheme, bias):
    architecture = own_architecture(pretrained(), "net", scheme, bias)
    starts = [
        architecture.initial(0, start, gain) for start, gain in ((0, 1.0), (1, 1.0), (0, 3.0))
    ]
    for params, buffers in starts:
        module = architecture.module(params, buffers)
        for found, wanted in zip(module[0].parameters(), pretrained()[0].parameters(), strict=True):
            assert torch.equal(found, wanted)
        # A frozen layer is not redrawn, and keeps its running statistics.
        assert torch.equal(module[0][1].running_mean, pretrained()[0][1].running_mean)
    assert not torch.equal(starts[0][0], starts[1][0])
    torch.testing.assert_close(starts[2][0][:18], 3 * starts[0][0][:18])


def test_of_a_layer_one_parameter_may_be_frozen():
    module = nn.Linear(4, 3)
    module.weight.requires_grad_(False)
    architecture = own_architecture(module, "net")
    params, buffers = architecture.initial(0, 5)
    assert len(params) == 3
    assert not torch.equal(params, module.bias)
    assert torch.equal(architecture.module(params, buffers).weight, module.weight)


# Training and curvature, against the obvious


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"optimizer": "adamw"}])
@pytest.mark.parametrize("correct", [None, Proximal(mu=0.1)])
def test_training_a_head_is_training_on_features(options, correct):
    def build() -> nn.Module:
        torch.manual_seed(4)
        return random_backbone()

    work = LocalSGD(epochs=3, batch_size=6, lr=0.05, correct=correct, **options)
    module = build()
    local = local_data(module)
    with torch.no_grad():
        features = module[:2](local.data.x)
    models = {"net": FlatModel(build()[2])}
    head = replace(local_data(build()), data=Examples(features, local.data.y), models=models)
    found, wanted = trained(work, local), trained(work, head)
    torch.testing.assert_close(found.params, wanted.params)
    assert found.stats.loss == pytest.approx(wanted.stats.loss, rel=1e-5)
    assert torch.equal(module[0].weight, build()[0].weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [random_backbone, pretrained])
def test_curvature_of_a_head_is_that_on_features(kind, build):
    module = build()
    local = local_data(module)
    model = local.models["net"]
    params, buffers = model.params.clone(), model.buffers.clone()
    module.eval()
    with torch.no_grad():
        features = module[:-1](local.data.x)
    models = {"net": FlatModel(nn.Linear(6, 3))}
    head = replace(local, data=Examples(features, local.data.y), models=models)
    nothing = torch.empty(0)
    wanted = Curvature(params, nothing, kind, 5).run(head)
    assert len(wanted) == HEAD
    assert wanted.count_nonzero() > 0
    torch.testing.assert_close(Curvature(params, buffers, kind, 5).run(local), wanted)
    gradients = Gradient(params, buffers).run(local), Gradient(params, nothing).run(head)
    torch.testing.assert_close(*gradients)


def test_squared_gradients_of_a_head_have_a_closed_form():
    module = random_backbone().double().eval()
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 3
    squares = sum_squared_gradients(module, F.cross_entropy, x, y)
    direct = squares_by_vmap(module, F.cross_entropy, x, y)
    assert squares.keys() == direct.keys() == {"2.weight", "2.bias"}
    for name, value in squares.items():
        torch.testing.assert_close(value, direct[name])


WORKS = {
    "sgd": LocalSGD(epochs=2, lr=0.1),
    "momentum": LocalSGD(epochs=2, lr=0.1, momentum=0.9, loss_clamp=10.0),
    "adamw": LocalSGD(epochs=2, lr=0.1, optimizer="adamw"),
    "corrected": LocalSGD(epochs=2, lr=0.1, correct=Proximal(mu=0.5)),
}


@pytest.mark.parametrize("name", WORKS)
def test_layers_that_are_not_used_stand_still(name):
    local = local_data(Unused())
    model = local.models["net"]
    start = model.params.clone()
    answer = trained(WORKS[name], local, squares=True)
    for slot in model.layout.slots:
        same = torch.equal(slot.view(start), slot.view(answer.params))
        assert same == (slot.name in IDLE)
        assert slot.view(answer.stats.squares).any() == (slot.name not in IDLE)


@pytest.mark.parametrize("kind", [*KINDS, "gradient"])
def test_layers_that_are_not_used_have_no_curvature(kind):
    local = local_data(Unused())
    model = local.models["net"]
    order = Curvature(model.params.clone(), model.buffers, kind, 5)
    if kind == "gradient":
        order = Gradient(model.params.clone(), model.buffers)
    h = order.run(local)
    assert {slot.name for slot in model.layout.slots if not slot.view(h).any()} == IDLE


# Runs


def fine_tuning(algorithm: Any, model: Any = random_backbone, **changes: Any) -> pg.Experiment:
    return toy(algorithm, model=model, **changes)


ALGORITHMS = {
    "decavg": DecAvg(LocalSGD(epochs=2, lr=0.1)),
    "dechw": DecHW(LocalSGD(epochs=2, lr=0.1)),
    "dechw sample": DecHW(LocalSGD(epochs=2, lr=0.1), curvature="sample"),
    "fedavg": pg.FedAvg(LocalSGD(epochs=2, lr=0.1)),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("model", [random_backbone, pretrained()], ids=["function", "module"])
@pytest.mark.slow
def test_a_backbone_stays_as_it_was_in_every_engine(name, model):
    init = {"scheme": "he", "gain": "manual:g=2"}
    results = [
        run(fine_tuning(ALGORITHMS[name], model, engine=engine, init=init))
        for engine in ENGINES.values()
    ]
    assert results[0].digest == results[1].digest
    for result in results:
        constants = result.architectures[0].constants
        assert {len(params) for params in result.parameters} == {HEAD}
        starts = [result.architectures[0].initial(0, node, 2.0)[0] for node in range(NODES)]
        assert not any(torch.equal(*pair) for pair in zip(starts, result.parameters, strict=False))
        for node in range(NODES):
            exported = result.state_dict(node)
            module = result.module(node)
            assert exported.keys() <= module.state_dict().keys()
            for key, value in constants.items():
                assert torch.equal(exported[key], value)
                assert torch.equal(module.state_dict()[key], value)
            # The exported model is the one that was evaluated.
            data = blobs()
            with torch.no_grad():
                loss = F.cross_entropy(module(data.test_x), data.test_y)
            last = [r for r in result.rows if r.get("node") == node][-1:]
            if last:
                assert float(loss) == pytest.approx(last[0]["loss"], rel=1e-4)


def test_only_trained_parameters_are_sent_and_counted():
    world = prepare(fine_tuning(DecAvg()))
    assert world.setup["parameters"] == [HEAD] * NODES
    assert len(world.setup["constants"]["random_backbone"]) == 64
    assert "constants" not in prepare(toy(DecAvg())).setup
    row = run(fine_tuning(DecAvg(), rounds=1)).rows
    sent = next(r for r in row if r["scope"] == "network" and r["round"] == 1)["bytes"]
    assert sent == 4 * HEAD * 2 * NODES  # to both neighbours on a ring


def test_an_unused_layer_in_a_run_is_averaged_and_no_more():
    experiment = toy(DecAvg(LocalSGD(epochs=1)), model=Unused, topology="complete", rounds=1)
    ended = simulate(experiment)
    layout = Layout.of(trained_parameters(Unused()))
    sizes = torch.tensor([float(len(part)) for part in prepare(experiment).parts])
    mean = (sizes / sizes.sum()) @ torch.stack(ended.start)
    for end in ended.end:
        torch.testing.assert_close(
            layout.view(end, "idle.weight"), layout.view(mean, "idle.weight")
        )


def test_running_statistics_of_a_frozen_layer_follow_the_data():
    """As in plain PyTorch: they are buffers, not parameters."""
    result = run(fine_tuning(DecAvg(LocalSGD(epochs=1, batch_size=4)), pretrained()))
    for node in range(NODES):
        norm = result.module(node)[0][1]
        assert torch.equal(norm.weight, pretrained()[0][1].weight)
        assert not torch.equal(norm.running_mean, pretrained()[0][1].running_mean)


def test_logistic_regression_on_frozen_features_is_logistic_regression():
    module = random_backbone()
    local = local_data(module)
    params = local.models["net"].params.clone()
    with torch.no_grad():
        features = module[:2](local.data.x)
    models = {"net": FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(6, 3)))}
    head = replace(local, data=Examples(features, local.data.y), models=models)
    nothing = torch.empty(0)
    found, wanted = (Derivatives(params, nothing, 0.1).run(one) for one in (local, head))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    turned = nn.Sequential(nn.Linear(4, 3), freeze(nn.Linear(3, 3)))
    local = local_data(turned)
    with pytest.raises(InputError, match="the last linear layer of this model is frozen; freeze"):
        Derivatives(local.models["net"].params.clone(), nothing, 0.1).run(local)


# Checkpoints


@pytest.mark.parametrize("name", ["decavg", "dechw"])
def test_a_run_goes_on_with_the_same_constants(name, tmp_path):
    experiment = fine_tuning(ALGORITHMS[name])
    whole = run(experiment)
    interrupt(experiment, tmp_path / "run")
    resumed = pg.resume(tmp_path / "run", experiment=experiment)
    assert resumed.digest == whole.digest


def test_a_run_does_not_go_on_with_other_constants(tmp_path):
    interrupt(fine_tuning(DecAvg(), pretrained(1)), tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=r"began with other frozen parameters .*; use the same"
    ):
        pg.resume(tmp_path / "run", experiment=fine_tuning(DecAvg(), pretrained(2)))


def interrupt(experiment: pg.Experiment, folder: Any) -> None:
    """Stop after the second of three rounds."""

    def watch(row: dict[str, Any]) -> None:
        if row["scope"] == "network" and row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run(experiment, folder, checkpoint_every=1, watch=watch)


# Real peers


@pytest.mark.parametrize("name", ["decavg", "dechw"])
def test_peers_end_with_the_bits_of_the_simulator(name):
    experiment = fine_tuning(ALGORITHMS[name], rounds=2)
    peers = run_peers(experiment)
    for peer, wanted in zip(peers, simulate(experiment).end, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)
        found = peer.shard.models["random_backbone"].module[0].weight
        assert torch.equal(found, peers[0].shard.models["random_backbone"].module[0].weight)


def test_peers_with_other_constants_reject_each_other():
    def builder(seed: int) -> Any:
        def backbone() -> nn.Module:
            return pretrained(seed)

        return backbone

    async def together() -> list[Any]:
        post = MemoryNetwork()
        with ThreadPoolExecutor(1) as executor:
            runs = []
            for me in range(2):
                experiment = fine_tuning(DecAvg(), builder(me), nodes=2, partition="iid")
                transport = MemoryTransport(post, me)
                network = network_of(experiment)
                peer = Peer(network, me, prepare(experiment), transport, executor=executor)
                runs.append(peer.run())
            return await asyncio.gather(*runs, return_exceptions=True)

    texts = [str(error) for error in asyncio.run(together()) if isinstance(error, InputError)]
    assert texts
    assert "runs another experiment: constants is {" in texts[0]


# Bad input


def test_a_model_that_is_frozen_all_over_is_rejected():
    with pytest.raises(InputError) as caught:
        prepare(fine_tuning(DecAvg(), freeze(nn.Linear(4, 3))))
    assert str(caught.value) == (
        "all parameters of model 'Linear' are frozen (requires_grad=False); "
        "leave at least one layer to train"
    )


def test_a_model_that_uses_no_trained_layer_is_rejected():
    class Bypass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = freeze(nn.Linear(4, 3)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.used(x)
            return logits

    with pytest.raises(InputError, match="loss does not depend on any parameter that is trained"):
        run(fine_tuning(DecAvg(), Bypass))


def test_a_model_that_changes_its_constants_is_rejected():
    class Drifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean.lerp_(x.mean(0), 0.1)
            logits: Tensor = self.head(x - self.mean)
            return logits

    with pytest.raises(InputError, match=r"changes a frozen parameter when it trains.*as a buffer"):
        run(fine_tuning(DecAvg(), Drifting))
