"""Random streams are named, independent of each other, and the same on every machine."""

import random
from hashlib import blake2b

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerage.randomness import numpy_stream, stream_seed, torch_stream

NAMES = st.tuples(
    st.integers(0, 2**40),
    st.sampled_from(["batches", "init", "graph", "coin"]),
    st.lists(st.integers(-1, 2000), max_size=3).map(tuple),
)


@given(st.lists(NAMES, min_size=2, max_size=20, unique=True))
@settings(deadline=None, max_examples=50)
def test_different_names_are_different_streams(names):
    seeds = {stream_seed(seed, purpose, *index) for seed, purpose, index in names}
    assert len(seeds) == len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_the_hash_of_its_name():
    digest = blake2b(b"7/batches/3/1", digest_size=8).digest()
    assert stream_seed(7, "batches", 3, 1) == int.from_bytes(digest, "little") // 2


def test_neighbouring_nodes_do_not_share_a_name():
    assert stream_seed(0, "batches", 1, 23) != stream_seed(0, "batches", 12, 3)
    assert stream_seed(1, "batches", 1) != stream_seed(11, "batches")


def test_streams_repeat_and_do_not_touch_global_generators():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    draws = [
        (numpy_stream(0, "x", 1).random(4).tolist(), torch.rand(4, generator=torch_stream(0, "x")))
        for _ in range(2)
    ]
    assert draws[0][0] == draws[1][0]
    assert torch.equal(draws[0][1], draws[1][1])
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert torch.get_rng_state().tolist() == states[2]


def test_many_streams_together_look_uniform():
    first = np.array([numpy_stream(0, "node", node).random() for node in range(2000)])
    assert abs(first.mean() - 0.5) < 0.03
    assert abs(first.std() - 12**-0.5) < 0.02
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.08
