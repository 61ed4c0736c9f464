"""The virtual teacher: its value by hand, and its gradient as that of label smoothing."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peerage import (
    ACE,
    DESA,
    WSM,
    CrossEntropy,
    Experiment,
    LocalSGD,
    VirtualTeacher,
    in_memory,
    run,
)
from peerage.errors import InputError
from peerage.testing import Parts
from peerage.work.losses import with_proportions

# Logits whose softmax is (1/2, 1/4, 1/4) and (1/8, 3/4, 1/8).
LOGITS = torch.tensor([[2.0, 1.0, 1.0], [1.0, 6.0, 1.0]]).log()
LABELS = torch.tensor([0, 2])


def divergence(q: list[float], p: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(q, p, strict=True) if a)


def entropy(b: float, classes: int) -> float:
    """Of a teacher with confidence b."""
    rest = [(1 - b) / (classes - 1)] * (classes - 1)
    return -sum(a * math.log(a) for a in [b, *rest] if a)


def batch(classes: int, size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(classes)
    logits = 3 * torch.randn(size, classes, generator=generator)
    return logits, torch.randint(classes, (size,), generator=generator)


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logits)[0]


# A fixed teacher


def test_three_classes_by_hand():
    # A teacher with confidence 80 % gives 10 % to each of the other two classes.
    first = divergence([0.8, 0.1, 0.1], [1 / 2, 1 / 4, 1 / 4])
    second = divergence([0.1, 0.1, 0.8], [1 / 8, 3 / 4, 1 / 8])
    assert float(VirtualTeacher(0.8)(LOGITS, LABELS)) == pytest.approx((first + second) / 2)
    # Cross-entropy is log 2 and log 8.
    mixed = VirtualTeacher(0.8, share=0.25)(LOGITS, LABELS)
    assert float(mixed) == pytest.approx(0.75 * 2 * math.log(2) + 0.25 * (first + second) / 2)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 12), st.floats(0.01, 0.99))
def test_the_gradient_is_that_of_label_smoothing(classes, epsilon):
    """torch gives 1 - epsilon + epsilon / C to the label, and epsilon / C to every other class."""
    b = 1 - epsilon + epsilon / classes
    logits, labels = batch(classes)
    logits.requires_grad_()
    ours = VirtualTeacher(b)(logits, labels)
    smoothed = F.cross_entropy(logits, labels, label_smoothing=epsilon)
    torch.testing.assert_close(
        gradient(ours, logits), gradient(smoothed, logits), rtol=1e-4, atol=1e-6
    )
    # The divergence lacks the entropy of the teacher, which no logit can change.
    constant = float(smoothed.detach() - ours.detach())
    assert constant == pytest.approx(entropy(b, classes), rel=1e-4, abs=1e-5)


def test_the_loss_of_a_student_that_equals_its_teacher_is_zero():
    q = torch.tensor([[0.05, 0.9, 0.05]])
    logits = q.log().requires_grad_()
    loss = VirtualTeacher(0.9)(logits, torch.tensor([1]))
    assert float(loss.detach()) == pytest.approx(0, abs=1e-6)
    assert gradient(loss, logits).abs().max() < 1e-6


def test_without_a_share_the_teacher_has_no_effect():
    assert torch.equal(
        VirtualTeacher(0.7, share=0.0)(LOGITS, LABELS), F.cross_entropy(LOGITS, LABELS)
    )


def test_half_a_share_is_the_mean_of_both_losses():
    logits, labels = batch(5)
    both = (CrossEntropy()(logits, labels) + VirtualTeacher(0.7)(logits, labels)) / 2
    torch.testing.assert_close(VirtualTeacher(0.7, share=0.5)(logits, labels), both)


@pytest.mark.parametrize("teacher", ["fixed", "random"])
def test_a_teacher_that_is_certain_is_cross_entropy(teacher):
    logits, labels = batch(4)
    sure = VirtualTeacher(1.0, teacher=teacher)(logits, labels)
    torch.testing.assert_close(sure, F.cross_entropy(logits, labels))


# A random teacher: with labels 0 and two classes, the loss shows the confidence of each example


def confidences(loss: VirtualTeacher, count: int) -> list[float]:
    """Of single examples: dz_0 of the loss at equal logits is 1/2 - b."""
    logits = torch.zeros(count, 2, requires_grad=True)
    value = loss(logits, torch.zeros(count, dtype=torch.int64))
    slopes = gradient(value, logits)[:, 0] * count  # the loss is a mean over the examples
    return [0.5 - slope for slope in slopes.tolist()]


def test_a_random_teacher_draws_a_confidence_for_every_example():
    loss = VirtualTeacher(0.6, teacher="random")
    torch.manual_seed(3)
    drawn = confidences(loss, 2000)
    assert min(drawn) >= 0.6 - 1e-6
    assert max(drawn) <= 1 + 1e-6
    assert len({round(b, 4) for b in drawn}) > 1000
    # Uniform on [0.6, 1]: mean 0.8, standard deviation 0.4 / sqrt(12), of the mean 0.0026.
    assert sum(drawn) / 2000 == pytest.approx(0.8, abs=0.01)
    low = sum(b < 0.7 for b in drawn) / 2000
    assert low == pytest.approx(0.25, abs=0.04)
    assert confidences(VirtualTeacher(0.6), 3) == pytest.approx([0.6] * 3)


def test_a_random_teacher_draws_from_the_generator_of_torch():
    loss = VirtualTeacher(0.6, teacher="random")
    values = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        values.append(float(loss(*batch(4))))
    assert values[0] == values[1] != values[2]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    VirtualTeacher(0.6)(*batch(4))
    assert torch.equal(torch.get_rng_state(), before)  # a fixed one draws nothing


def test_the_expected_gradient_of_a_random_teacher_is_that_of_the_mean_confidence():
    logits, labels = batch(3, size=2)
    logits, labels = logits.repeat(4000, 1).requires_grad_(), labels.repeat(4000)
    torch.manual_seed(0)
    random = gradient(VirtualTeacher(0.6, teacher="random")(logits, labels), logits)
    fixed = gradient(VirtualTeacher(0.8)(logits, labels), logits)
    sums = [g.view(4000, 2, 3).sum(0) for g in (random, fixed)]
    torch.testing.assert_close(sums[0], sums[1], rtol=0, atol=0.005)


# Bad values


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"confidence": 0.0}, "confidence must lie in (0, 1], got 0.0"),
        ({"confidence": 1.1}, "confidence must lie in (0, 1], got 1.1"),
        ({"confidence": math.nan}, "confidence must lie in (0, 1], got nan"),
        ({"share": -0.1}, "share must lie in [0, 1], got -0.1"),
        ({"share": 1.5}, "share must lie in [0, 1], got 1.5"),
        ({"share": math.nan}, "share must lie in [0, 1], got nan"),
        ({"teacher": "strict"}, "teacher must be one of fixed, random; got 'strict'"),
    ],
)
def test_bad_values_name_themselves_and_the_remedy(options, message):
    with pytest.raises(InputError) as caught:
        VirtualTeacher(**options)
    assert str(caught.value) == message


# Losses with label proportions


def test_wsm_with_uniform_proportions_is_cross_entropy_up_to_a_constant():
    logits, labels = batch(5)
    logits.requires_grad_()
    ours = WSM()(logits, labels, torch.full((5,), 0.2))
    theirs = F.cross_entropy(logits, labels)
    torch.testing.assert_close(ours, theirs - math.log(5))
    torch.testing.assert_close(gradient(ours, logits), gradient(theirs, logits))


def test_wsm_by_hand():
    # -log(1/2) + log(0.75 / 2 + 0.25 / 4), with the class that the data lacks left out.
    b = torch.tensor([0.75, 0.25, 0.0])
    expected = math.log(2) + math.log(0.75 / 2 + 0.25 / 4)
    assert float(WSM()(LOGITS[:1], LABELS[:1], b)) == pytest.approx(expected)


def test_ace_is_cross_entropy_over_the_classes_that_are_there():
    logits, labels = batch(5)
    labels = torch.tensor([0, 2, 4])[labels % 3]
    logits.requires_grad_()
    b = torch.tensor([0.1, 0.0, 0.4, 0.0, 0.5])
    ours = ACE()(logits, labels, b)
    theirs = F.cross_entropy(logits[:, [0, 2, 4]], labels // 2)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient(ours, logits), gradient(theirs, logits))
    for absent in (1, 3):
        assert not gradient(WSM()(logits, labels, b), logits)[:, absent].any()


def test_losses_get_the_proportions_of_the_nodes_own_data():
    """Each node has two of three classes; the last bias of the absent class does not move."""
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(30) % 3
    parts = [torch.arange(30)[y != absent] for absent in range(3)]
    for loss in ("wsm", "ace", "cross-entropy"):
        experiment = Experiment(
            algorithm="local",
            dataset=in_memory(x, y, x, y),
            model="logistic",
            nodes=3,
            topology="complete",
            partition=Parts(tuple(tuple(part.tolist()) for part in parts)),
            rounds=1,
            local={"loss": loss, "epochs": 2},
            init={"bias": "zero"},
            engine={"name": "serial"},
        )
        for absent, params in enumerate(run(experiment).parameters):
            assert (float(params[-3:][absent]) == 0.0) == (loss != "cross-entropy")
        stored = Experiment(local={"loss": loss})
        assert Experiment.from_toml(stored.to_toml()).local == stored.local


def test_a_loss_with_proportions_needs_them():
    with pytest.raises(InputError, match=r"WSM\(\) needs the label proportions"):
        with_proportions(WSM())
    with pytest.raises(InputError, match="desa takes the loss on the local data"):
        DESA(local=LocalSGD(loss=WSM()))
