"""The secret noise of real peers: its distribution, its grid, and that no draw is repeated."""

import hashlib
import math
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from peerage.net.peer.secret_noise import BLOCK, KEY_BYTES, SecretNoise, grid_step
from peerage.privacy import Noise, PrivacyFilter

COUNT = 4 * BLOCK + 3  # several blocks and an odd rest


def fixed(text: str = "a key") -> SecretNoise:
    """Noise with a known key, so that a test gives the same result every time."""
    return SecretNoise(lambda count: hashlib.sha256(text.encode()).digest()[:count])


def drawn(noise: SecretNoise, sigma: float = 1.0, count: int = COUNT) -> torch.Tensor:
    return noise.add_noise(torch.zeros(count, dtype=torch.float64), sigma)


@pytest.mark.parametrize("sigma", [1.0, 0.37, 1e-6, 1e6])
def test_the_noise_is_gaussian(sigma: float) -> None:
    z = (drawn(fixed(), sigma) / sigma).numpy()
    error = 1 / math.sqrt(COUNT)  # five standard errors
    assert abs(z.mean()) < 5 * error
    assert z.var() == pytest.approx(1, abs=5 * math.sqrt(2) * error)
    assert (z**3).mean() == pytest.approx(0, abs=5 * math.sqrt(15) * error)
    assert (z**4).mean() == pytest.approx(3, abs=5 * math.sqrt(96) * error)
    assert kstest(z, "norm").pvalue > 1e-4


def test_numbers_are_independent() -> None:
    """Also the two numbers that Box and Muller make of one radius and one angle."""
    z = drawn(fixed(), count=2 * BLOCK).numpy()
    error = 1 / math.sqrt(BLOCK)
    for lag in (1, BLOCK // 2, BLOCK):  # BLOCK // 2 separates cosines from their sines
        assert abs(np.corrcoef(z[:-lag], z[lag:])[0, 1]) < 5 * error
        assert abs(np.corrcoef(z[:-lag] ** 2, z[lag:] ** 2)[0, 1]) < 5 * error


def test_noise_is_added_to_the_number() -> None:
    x = torch.linspace(-3, 3, COUNT, dtype=torch.float64)
    noise = fixed().add_noise(x, 0.5) - x
    assert float(noise.std()) == pytest.approx(0.5, rel=0.02)
    assert abs(float(noise.mean())) < 0.01
    torch.testing.assert_close(noise, drawn(fixed(), 0.5), rtol=0, atol=grid_step(0.5))


@pytest.mark.parametrize("sigma", [0.3, 1.0, 7.0])
def test_released_numbers_are_multiples_of_one_step_whatever_the_input(sigma: float) -> None:
    """So the last bits of a number do not tell to what the noise was added (Mironov)."""
    step = grid_step(sigma)
    assert sigma * 2.0**-21 < step <= sigma * 2.0**-20
    for x in (torch.zeros(1000), torch.rand(1000, generator=torch.Generator().manual_seed(1))):
        multiples = fixed().add_noise(x.double(), sigma) / step
        assert torch.equal(multiples, multiples.round())


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=5), st.floats(1e-3, 1e3))
@settings(deadline=None, max_examples=50)
def test_rounding_to_the_grid_makes_no_vector_longer(values: list[float], sigma: float) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    noise = drawn(fixed(), sigma, len(values))
    on_grid = fixed().add_noise(x, sigma) - noise  # exact: all are multiples of the step
    assert bool((on_grid.abs() <= x.abs()).all())
    assert bool(((x - on_grid).abs() < grid_step(sigma)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_results_are_new_tensors_of_the_same_kind(dtype: torch.dtype) -> None:
    for x in (torch.ones(5, 8, dtype=dtype).t(), torch.ones((), dtype=dtype)):
        noisy = fixed().add_noise(x, 1.0)
        assert (noisy.dtype, noisy.shape, noisy.stride()) == (x.dtype, x.shape, x.stride())
        assert bool((x == 1).all())
        assert not torch.equal(noisy, x)
    assert torch.equal(fixed().add_noise(torch.ones(3), 0.0), torch.ones(3))


def test_the_key_has_256_bits_of_the_operating_system() -> None:
    asked: list[int] = []

    def entropy(count: int) -> bytes:
        asked.append(count)
        return bytes(range(count))

    first = drawn(SecretNoise(entropy), count=10)
    assert asked == [KEY_BYTES] == [32]
    assert SecretNoise.__init__.__defaults__ == (os.urandom,)
    for byte in range(KEY_BYTES):  # every byte of the key changes the noise

        def other(count: int, byte: int = byte) -> bytes:
            return bytes(value ^ (index == byte) for index, value in enumerate(range(count)))

        assert not torch.equal(drawn(SecretNoise(other), count=10), first)


def test_no_draw_is_repeated() -> None:
    """Neither by a round that runs again in one process, nor after a restart."""
    noise = fixed()
    assert not torch.equal(drawn(noise, count=50), drawn(noise, count=50))
    assert not torch.equal(drawn(SecretNoise(), count=50), drawn(SecretNoise(), count=50))
    filters = [PrivacyFilter(Noise(1.0, 1.0), secret_noise=SecretNoise()) for _ in range(2)]

    def public() -> torch.Generator:
        raise AssertionError("secret noise does not depend on the seed of the run")

    sent = [f.release({"x": torch.zeros(50)}, public)["x"] for f in filters for _ in range(2)]
    assert len({tuple(x.tolist()) for x in sent}) == 4


def test_an_earlier_draw_cannot_be_computed_from_the_present_key() -> None:
    noise = fixed()
    before = noise._key
    drawn(noise, count=10)
    assert noise._key != before


def test_the_key_does_not_leave_the_process() -> None:
    noise = SecretNoise()
    assert repr(noise) == "SecretNoise()"
    with pytest.raises(TypeError, match="stays in its process"):
        pickle.dumps(noise)


@pytest.mark.slow
def test_a_forked_process_takes_its_own_key() -> None:
    noise = SecretNoise()
    drawn(noise, count=2)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, drawn(noise, count=50).numpy().tobytes())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        theirs = np.frombuffer(file.read())
    os.waitpid(child, 0)
    assert len(theirs) == 50
    assert not set(theirs) & set(drawn(noise, count=50).tolist())
