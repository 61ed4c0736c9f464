"""Whole numbers that a model looks up reach it unchanged; what it cannot look up is rejected."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.networking import run_peers
from torch import Tensor, nn

import peerage as pg
from peerage.data import Dataset
from peerage.data.datasets import Idx, Npz
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.net.peer.private_data import prepare_own
from peerage.testing import Parts
from peerage.vectors import FlatModel
from peerage.work.curvature import batch_curvature, sample_curvature

WORDS, LENGTH = 12, 5


class Tokens(nn.Module):
    """Words and their places, so that not all that is looked up comes from the data."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(words, 6), nn.Embedding(LENGTH, 6)
        self.head = nn.Linear(6 * LENGTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.word(x) + self.place(torch.arange(LENGTH))).flatten(1))


class Converting(Tokens):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.long())


class Transposed(Tokens):
    """Steps first, as recurrent networks have it."""

    def forward(self, x: Tensor) -> Tensor:
        words = self.word(x.long().t()).transpose(0, 1)
        return self.head(words.flatten(1))


class Table(nn.Module):
    """Looks up without a layer for it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(WORDS, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[x].sum(1)


def sentences(dtype: Any = np.int64) -> tuple[Any, Any]:
    """The first word of a sentence determines its class."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 120)
    x = rng.integers(0, WORDS, (120, LENGTH))
    x[:, 0] = 4 * y
    return x.astype(dtype), y


def experiment(dataset: Dataset, model: Any, **changes: Any) -> pg.Experiment:
    settings: dict[str, Any] = {
        "algorithm": "decavg",
        "nodes": 3,
        "topology": "complete",
        "partition": "iid",
        "rounds": 3,
        "local": {"epochs": 3, "lr": 0.3},
        "engine": {"name": "serial"},
    }
    return pg.Experiment(dataset=dataset, model=model, **settings | changes)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint16])
def test_integers_reach_an_embedding_as_they_are(dtype: Any) -> None:
    x, y = sentences(dtype)
    world = prepare(experiment(pg.in_memory(x, y, x, y), Tokens))
    assert world.train.x.dtype == world.test.x.dtype == torch.int64
    assert world.train.x.tolist() == world.test.x.tolist() == x.tolist()


def test_integers_reach_other_models_as_floats() -> None:
    x, y = sentences()
    world = prepare(experiment(pg.in_memory(x, y, x, y), "logistic"))
    assert world.train.x.dtype == torch.float32
    assert world.train.x.tolist() == x.tolist()


@pytest.mark.parametrize("algorithm", ["decavg", "dechw", "dechw:curvature=sample", "cfa"])
@pytest.mark.slow
def test_a_model_of_tokens_learns_in_every_engine(algorithm: str) -> None:
    dataset = pg.in_memory(*sentences())
    ran = [
        pg.run(experiment(dataset, Tokens, algorithm=algorithm, engine=engine))
        for engine in ({"name": "serial"}, {"name": "pool", "workers": 2})
    ]
    assert ran[0].accuracy > 0.9
    assert ran[0].digest == ran[1].digest
    inside = pg.run(experiment(dataset, Converting, algorithm=algorithm))
    assert inside.digest == ran[0].digest


def test_a_model_of_tokens_is_validated_and_handed_out() -> None:
    evaluation = {"validation": 0.2, "samples": 10}
    result = pg.run(experiment(pg.in_memory(*sentences()), Tokens, evaluation=evaluation))
    assert all("validation_loss" in row for row in result.rows if "node" in row)
    module = Tokens()
    module.load_state_dict(result.state_dict(node=0))
    x, y = sentences()
    assert (module(torch.from_numpy(x)).argmax(1).numpy() == y).mean() > 0.9


def test_real_peers_with_tokens_end_as_the_simulation() -> None:
    x, y = sentences()
    whole = pg.in_memory(x, y, x[:30], y[:30], classes=3)
    parts = (tuple(range(50)), tuple(range(50, 120)))
    one = experiment(whole, Tokens, nodes=2, partition=Parts(parts), rounds=2)
    own = [pg.in_memory(x[list(part)], y[list(part)], x[:30], y[:30]) for part in parts]
    peers = run_peers(one, worlds=lambda me: prepare_own(one, me, own[me], 3))
    rows = [row for row in pg.run(one).rows if "node" in row and row["round"] == 2]
    assert [peer.rows[-1]["loss"] for peer in peers] == [row["loss"] for row in rows]


@pytest.mark.slow
def test_curvature_of_an_embedding_is_that_of_single_examples() -> None:
    torch.manual_seed(0)
    model = FlatModel(Tokens().eval())
    x, y = (torch.from_numpy(part[:8]) for part in sentences())
    alone = batch_curvature(model, iter([(x[b : b + 1], y[b : b + 1]) for b in range(8)]))
    torch.testing.assert_close(sample_curvature(model, iter([(x, y)])), alone)
    words = model.layout.view(alone, "word.weight")
    assert words[:, 0].nonzero().flatten().tolist() == sorted(set(x.flatten().tolist()))


BYTES = "nn.Embedding, but they are not integers; give integers, or use scale=false if they are byt"


@pytest.mark.parametrize("model", [Tokens, Converting, Transposed])
def test_bytes_for_an_embedding_are_not_divided_by_255(
    model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    x, y = sentences(np.uint8)
    np.savez(tmp_path / "own.npz", x=x, y=y)
    (tmp_path / "idx").mkdir()
    for name, values in (("images-idx3", x), ("labels-idx1", y)):
        header = bytes([0, 0, 8, values.ndim])
        axes = b"".join(size.to_bytes(4, "big") for size in values.shape)
        file = tmp_path / "idx" / f"train-{name}-ubyte"
        file.write_bytes(header + axes + values.astype(np.uint8).tobytes())
    sources: list[Callable[[bool], Dataset]] = [
        lambda scale: pg.in_memory(x, y, scale=scale),
        lambda scale: Npz(str(tmp_path / "own.npz"), scale=scale).load(tmp_path),
        lambda scale: Idx(str(tmp_path / "idx"), scale=scale).load(tmp_path),
    ]
    for source in sources:
        with pytest.raises(InputError, match=BYTES) as error:
            prepare(experiment(source(True), model))
        assert "\n" not in str(error.value)
        with pytest.raises(InputError, match=BYTES):
            prepare_own(experiment(source(True), model), 0, source(True), 3)
        world = prepare(experiment(source(False), model))
        assert world.train.x.dtype == torch.int64
        assert set(world.train.x.flatten().tolist()) == set(range(WORDS))


def test_fractions_cannot_be_looked_up() -> None:
    x, y = sentences()
    with pytest.raises(InputError, match="they are not integers"):
        prepare(experiment(pg.in_memory(x + 0.5, y), Converting))


@pytest.mark.parametrize("where", ["training set", "test set"])
@pytest.mark.parametrize(
    ("word", "message"),
    [
        (WORDS, "no embedding for some examples of tensors, whose numbers go from 0 to 12; number"),
        (-1, "no embedding for some examples of tensors, whose numbers go from -1 to 11; number"),
    ],
)
def test_a_token_without_an_embedding_is_found_before_the_run(
    where: str, word: int, message: str
) -> None:
    (x, y), (test_x, test_y) = sentences(), sentences()
    (x if where == "training set" else test_x)[77, 3] = word
    for model in (Tokens, Converting):
        with pytest.raises(InputError, match=message):
            prepare(experiment(pg.in_memory(x, y, test_x, test_y), model))
    large = experiment(pg.in_memory(abs(x), y, abs(test_x), test_y), lambda: Tokens(WORDS + 1))
    assert prepare(large).train.x.dtype == torch.int64


def test_a_table_without_a_layer_takes_integers_too() -> None:
    x, y = sentences()
    assert prepare(experiment(pg.in_memory(x, y), Table)).train.x.dtype == torch.int64


def test_models_must_agree_on_what_they_take() -> None:
    dataset = pg.in_memory(*sentences())
    both = prepare(experiment(dataset, (Tokens, Converting)))
    assert both.train.x.dtype == torch.int64
    message = "model 'Tokens-0' takes only integers and model 'logistic-1' takes none; convert the "
    with pytest.raises(InputError, match=message):
        prepare(experiment(dataset, (Tokens, "logistic")))


def test_images_work_with_a_model_that_embeds_positions() -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.head = nn.Embedding(16, 1), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.flatten(1) + self.place(torch.arange(16)).flatten())

    x = np.random.default_rng(0).integers(0, 256, (30, 4, 4), dtype=np.uint8)
    world = prepare(experiment(pg.in_memory(x, np.arange(30) % 3), Places))
    assert world.train.x.dtype == torch.float32
    assert float(world.train.x.max()) <= 1


def test_tokens_have_no_synthetic_examples() -> None:
    desa = experiment(pg.in_memory(*sentences()), Tokens, algorithm="desa", rounds=1)
    with pytest.raises(InputError, match=r"require floating-point data, .* another algorithm"):
        pg.run(desa)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


@pytest.mark.parametrize("algorithm", ["decavg", "desa:ipc=2,iterations=2"])
@pytest.mark.slow
def test_sequences_keep_their_shape(algorithm: str) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(80) % 2
    x = rng.normal(size=(80, 7, 4)) + 2.0 * y[:, None, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = pg.in_memory(x, y, layout="sequence")
    assert dataset.shape == (7, 4)
    ran = [
        pg.run(experiment(dataset, Recurrent, algorithm=algorithm, engine=engine))
        for engine in ({"name": "serial"}, {"name": "pool", "workers": 2})
    ]
    assert ran[0].accuracy > 0.9
    assert ran[0].digest == ran[1].digest
    assert pg.run(experiment(dataset, "mlp", rounds=1)).accuracy > 0.5
    with pytest.raises(InputError, match="needs images"):
        prepare(experiment(dataset, "digits-cnn"))
