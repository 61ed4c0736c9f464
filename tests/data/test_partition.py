import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerage.data.partition import (
    PARTITIONS,
    BalancedIid,
    ByGroup,
    Dirichlet,
    Iid,
    Sample,
    Shards,
    Zipf,
    hold_out,
    label_counts,
    stratified,
    zipf_quota,
)
from peerage.errors import InputError
from peerage.randomness import numpy_stream
from peerage.specs import parse, text

COVERING = [Iid(), Dirichlet(alpha=1.0, min_size=1), Shards(per_node=2)]
MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # images of each digit
ALL = [*COVERING, Dirichlet(alpha=1.0, cap_at_mean=False, min_size=1), BalancedIid(), Zipf(a=2.5)]


def balanced(classes, each):
    return np.repeat(np.arange(classes), each)


def rng(seed=0):
    return numpy_stream(seed, "partition")


@pytest.mark.parametrize("partition", ALL, ids=repr)
@given(
    classes=st.integers(2, 6),
    each=st.integers(30, 60),
    nodes=st.integers(1, 8),
    seed=st.integers(0),
)
@settings(deadline=None, max_examples=25)
def test_parts_are_sorted_disjoint_and_repeatable(partition, classes, each, nodes, seed):
    labels = rng(seed).permutation(balanced(classes, each))
    parts = partition.split(labels, nodes, classes, rng(seed))
    assert len(parts) == nodes
    assert all(part.dtype == np.int64 and len(part) > 0 for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    assert together.min() >= 0
    assert together.max() < len(labels)
    if partition in COVERING:
        assert len(together) == len(labels)
    again = partition.split(labels, nodes, classes, rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("partition", ALL, ids=repr)
def test_another_seed_gives_another_split(partition):
    labels = balanced(4, 50)
    one, two = (partition.split(labels, 5, 4, rng(seed)) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("partition", ALL, ids=repr)
def test_more_nodes_than_samples_names_both(partition):
    with pytest.raises(InputError, match="7 nodes cannot share 6 samples"):
        partition.split(balanced(2, 3), 7, 2, rng())
    with pytest.raises(InputError, match="nodes must be at least 1, got 0"):
        partition.split(balanced(2, 3), 0, 2, rng())
    with pytest.raises(InputError, match="labels must lie in 0 to 1, got 0 to 2"):
        partition.split(balanced(3, 3), 2, 2, rng())


def test_every_partition_has_a_name_that_round_trips():
    for spec in [
        "iid",
        "balanced-iid:items=512",
        "dirichlet:alpha=0.5,cap_at_mean=True,min_size=10",
        "by-group",
        "sample:size=64",
        "shards:per_node=3",
        "zipf:a=1.6",
    ]:
        assert text(parse(spec, "partition", PARTITIONS), "partition", PARTITIONS) == spec
    assert parse("dirichlet", "partition", PARTITIONS) == Dirichlet(0.2, False, 1)
    assert parse("balanced-iid", "partition", PARTITIONS).items is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dirichlet:alpha=0", "alpha must be a positive number, got 0.0"),
        ("dirichlet:alpha=nan", "alpha must be a positive number, got nan"),
        ("dirichlet:min_size=0", "min_size must be at least 1, got 0"),
        ("shards:per_node=0", "per_node must be at least 1, got 0"),
        ("zipf:a=1", "a must be a number above 1, got 1.0"),
        ("sample:size=0", "size must be at least 1, got 0"),
        ("balanced-iid:items=0", "items must be at least 1, got 0"),
    ],
)
def test_bad_options_name_the_value(spec, message):
    with pytest.raises(InputError, match=message):
        parse(spec, "partition", PARTITIONS)


def test_iid_sizes_differ_by_at_most_one():
    parts = Iid().split(balanced(2, 5), 3, 2, rng())
    assert sorted(len(part) for part in parts) == [3, 3, 4]


def test_a_sample_may_have_more_nodes_than_examples_and_repeat_them():
    labels = balanced(2, 3)
    parts = Sample(size=20).split(labels, 50, 2, rng())
    assert len(parts) == 50
    assert all(part.dtype == np.int64 and len(part) == 20 for part in parts)
    assert all((np.diff(part) >= 0).all() for part in parts)
    assert not np.array_equal(parts[0], parts[1])
    drawn = np.bincount(np.concatenate(parts), minlength=6)  # 1000 draws of 6 examples
    assert abs(drawn - 1000 / 6).max() < 6 * np.sqrt(1000 / 6)
    again = Sample(size=20).split(labels, 50, 2, rng())
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    with pytest.raises(InputError, match="nodes must be at least 1, got 0"):
        Sample().split(labels, 0, 2, rng())
    with pytest.raises(InputError, match="labels must lie in 0 to 1, got 0 to 2"):
        Sample().split(balanced(3, 3), 2, 2, rng())


def test_balanced_iid_rounds_items_down_to_whole_classes():
    labels = balanced(10, 110)
    parts = BalancedIid(items=52).split(labels, 20, 10, rng())  # floor(52 / 10) = 5 of each class
    assert (label_counts(labels, parts, 10) == 5).all()
    parts = BalancedIid().split(labels, 20, 10, rng())  # floor(110 / 20) = 5
    assert (label_counts(labels, parts, 10) == 5).all()


def test_balanced_iid_says_which_class_is_too_small():
    labels = np.array([0] * 9 + [1] * 4)
    with pytest.raises(InputError, match="class 1 has 4 samples, too few for 3 on each of 2 nodes"):
        BalancedIid(items=6).split(labels, 2, 2, rng())
    with pytest.raises(InputError, match="class 1 has 4 samples, too few for 1 on each of 5 nodes"):
        BalancedIid().split(labels, 5, 2, rng())
    with pytest.raises(InputError, match="items must be at least one per class, 2, got 1"):
        BalancedIid(items=1).split(labels, 2, 2, rng())


@given(alpha=st.sampled_from([0.05, 0.2, 1.0, 10.0]), nodes=st.integers(2, 12), seed=st.integers(0))
@settings(deadline=None, max_examples=40)
def test_a_capped_node_stops_after_the_class_that_filled_it(alpha, nodes, seed):
    labels = balanced(10, 60)
    parts = Dirichlet(alpha=alpha, cap_at_mean=True).split(labels, nodes, 10, rng(seed))
    counts = label_counts(labels, parts, 10)
    before = counts.cumsum(1) - counts  # what a node held when a class was assigned
    assert (counts[before >= len(labels) / nodes] == 0).all()
    assert sum(map(len, parts)) == len(labels)


def test_without_the_cap_a_node_may_go_on():
    labels = balanced(10, 60)
    parts = Dirichlet(alpha=0.2, cap_at_mean=False, min_size=1).split(labels, 6, 10, rng())
    counts = label_counts(labels, parts, 10)
    before = counts.cumsum(1) - counts
    assert (counts[before >= 100] > 0).any()


def test_dirichlet_cuts_each_class_at_the_drawn_proportions():
    """A second, plain implementation of one draw, fed with the same stream."""
    partition = Dirichlet(alpha=0.7, cap_at_mean=True)
    drawn = partition._sizes(np.array([40, 40, 40]), 4, rng(5))
    stream, held = rng(5), [0] * 4
    for label in range(3):
        p = stream.dirichlet([0.7] * 4)
        p = [0.0 if held[node] >= 30 else p[node] for node in range(4)]
        edges = [0] + [int(sum(p[: node + 1]) / sum(p) * 40 + 1e-9) for node in range(4)]
        sizes = [edges[node + 1] - edges[node] for node in range(4)]
        assert drawn[label].tolist() == sizes
        held = [h + s for h, s in zip(held, sizes, strict=True)]


def test_dirichlet_concentration_follows_alpha():
    labels = balanced(10, 500)
    largest_share = {}
    for alpha in (0.05, 100.0):
        parts = Dirichlet(alpha=alpha, cap_at_mean=False, min_size=1).split(labels, 5, 10, rng())
        counts = label_counts(labels, parts, 10)
        largest_share[alpha] = (counts / 500).max(0).mean()  # of a class, on one node
    assert largest_share[100.0] < 0.3  # 1/5 is even
    assert largest_share[0.05] > 0.7


def test_dirichlet_keeps_drawing_until_the_smallest_node_is_large_enough():
    labels = balanced(10, 60)
    sizes = [len(p) for p in Dirichlet(alpha=0.2, min_size=25).split(labels, 8, 10, rng(1))]
    assert min(sizes) >= 25
    with pytest.raises(
        InputError, match="13 nodes with min_size=50 need 650 samples but there are"
    ):
        Dirichlet(min_size=50).split(labels, 13, 10, rng())
    with pytest.raises(InputError, match=r"alpha=0.01 left one of 12 nodes with fewer than 50"):
        Dirichlet(alpha=0.01, min_size=50).split(labels, 12, 10, rng())


@pytest.mark.parametrize("seed", range(10))
def test_the_smallest_alpha_of_p2_leaves_no_node_empty(seed):
    """About every third draw gives something to each of ten nodes, so it does not take long."""
    labels = np.repeat(np.arange(10), MNIST)
    parts = Dirichlet(alpha=0.01).split(labels, 10, 10, rng(seed))
    assert min(map(len, parts)) >= 1
    assert sum(map(len, parts)) == 60_000
    counts = label_counts(labels, parts, 10)
    assert (counts.max(0) / counts.sum(0)).mean() > 0.8  # most of a class is on one node


@pytest.mark.parametrize("cap", [True, False])
def test_a_vanishing_alpha_gives_whole_classes(cap):
    labels = balanced(10, 30)
    parts = Dirichlet(alpha=1e-12, cap_at_mean=cap, min_size=1).split(labels, 3, 10, rng())
    counts = label_counts(labels, parts, 10)
    assert ((counts == 30).sum(0) == 1).all()
    assert counts.sum() == 300


@given(nodes=st.sampled_from([5, 10, 50, 200]), seed=st.integers(0))
@settings(deadline=None, max_examples=20)
def test_shards_give_two_classes_to_each_node_on_balanced_data(nodes, seed):
    labels = balanced(10, 4 * nodes)
    parts = Shards().split(labels, nodes, 10, rng(seed))
    counts = label_counts(labels, parts, 10)
    assert ((counts > 0).sum(1) == 2).all()
    assert (counts.sum(1) == 40).all()
    assert (counts[counts > 0] == 20).all()  # 2 n shards of 20


@given(
    nodes=st.integers(2, 9),
    per_node=st.integers(2, 5),
    extra=st.integers(0, 40),
    seed=st.integers(0),
)
@settings(deadline=None, max_examples=40)
def test_shards_differ_in_class_in_the_tightest_case(nodes, per_node, extra, seed):
    """One class for each slot of a hand: every node must hold every class exactly once."""
    labels = balanced(per_node, nodes * (1 + extra // nodes))
    parts = Shards(per_node).split(labels, nodes, per_node, rng(seed))
    assert (label_counts(labels, parts, per_node) == 1 + extra // nodes).all()


def test_the_samples_of_a_class_are_shuffled_before_they_are_cut():
    parts = Shards(per_node=1).split(balanced(2, 20), 4, 2, rng())
    assert all((np.diff(part) > 1).any() for part in parts)  # no run of neighbouring positions


def test_shards_of_unequal_classes_straddle_and_nothing_is_lost():
    sizes = [592, 674, 596, 613, 584, 542, 592, 626, 585, 595]  # MNIST's proportions
    labels = np.repeat(np.arange(10), sizes)
    parts = Shards().split(labels, 10, 10, rng())
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(5999))
    assert {len(part) for part in parts} <= {599, 600}
    assert ((label_counts(labels, parts, 10) > 0).sum(1) >= 2).all()


@pytest.mark.parametrize("seed", range(20))
def test_the_two_shards_of_p2_are_of_different_classes(seed):
    """Twenty shards of 3000; no shard lies within the class of its partner."""
    labels = np.repeat(np.arange(10), MNIST)
    counts = label_counts(labels, Shards().split(labels, 10, 10, rng(seed)), 10)
    assert (counts.sum(1) == 6000).all()
    assert (counts.sum(0) == MNIST).all()
    assert ((counts > 0).sum(1) >= 2).all()
    assert (counts.max(1) < 6000).all()


@given(
    per_node=st.integers(1, 4), each=st.integers(1, 40), more=st.integers(0, 3), seed=st.integers(0)
)
@settings(deadline=None, max_examples=60)
def test_shards_never_reject_classes_of_at_most_their_share(per_node, each, more, seed):
    """No class exceeds 1/per_node of the samples, whatever the numbers are that do not divide."""
    classes = per_node + more
    labels = balanced(classes, each)
    for nodes in range(1, len(labels) // per_node + 1, 3):
        parts = Shards(per_node).split(labels, nodes, classes, rng(seed))
        sizes = [len(part) for part in parts]
        assert sum(sizes) == len(labels)
        assert max(sizes) - min(sizes) <= per_node
        if per_node > 1:
            assert ((label_counts(labels, parts, classes) > 0).sum(1) >= 2).all()


def test_shards_reject_only_what_the_labels_make_impossible():
    labels = np.array([0] * 15 + [1] * 5)  # ten shards of two, seven of class 0 alone
    with pytest.raises(InputError, match="class 0 fills 7 of 10 shards"):
        Shards(2).split(labels, 5, 2, rng())
    assert len(Shards(1).split(labels, 5, 2, rng())) == 5
    with pytest.raises(InputError, match="need 21 shards but there are 20 samples"):
        Shards(3).split(labels, 7, 2, rng())


@given(
    groups=st.lists(st.sampled_from([-4, 0, 3, 8, 1000]), min_size=1, max_size=60),
    data=st.data(),
    seed=st.integers(0),
)
@settings(deadline=None, max_examples=60)
def test_every_node_gets_one_whole_group(groups, data, seed):
    known = sorted(set(groups))
    nodes = data.draw(st.integers(1, len(known)))
    parts = ByGroup().split_groups(np.array(groups), nodes, rng(seed))
    chosen = [groups[part[0]] for part in parts]
    assert len(parts) == nodes
    assert chosen == sorted(set(chosen))
    for part, group in zip(parts, chosen, strict=True):
        assert part.dtype == np.int64
        assert part.tolist() == [place for place, own in enumerate(groups) if own == group]
    again = ByGroup().split_groups(np.array(groups), nodes, rng(seed))
    assert [part.tolist() for part in again] == [part.tolist() for part in parts]


def test_which_groups_are_left_out_depends_on_the_seed():
    groups = np.repeat(np.arange(20), 3)
    chosen = [
        tuple(int(part[0]) // 3 for part in ByGroup().split_groups(groups, 10, rng(seed)))
        for seed in range(5)
    ]
    assert len(set(chosen)) == 5


def test_by_group_needs_groups_and_enough_of_them():
    groups = np.array([4, 4, 9])
    for nodes in (0, 3):
        message = f"each of {nodes} nodes, but the data set has 2; use 1 to 2 nodes"
        with pytest.raises(InputError, match=message):
            ByGroup().split_groups(groups, nodes, rng())
    with pytest.raises(InputError, match="by-group requires a group for every example"):
        ByGroup().split(np.array([0, 1]), 2, 2, rng())


def test_zipf_quota_by_hand():
    z = np.array([1, 4, 2])  # sum 7
    quota = zipf_quota(z, np.array([7, 14, 20]))
    assert quota.tolist() == [
        [1, 4, 2],  # 7 z / 7
        [4, 2, 8],  # rolled by one: 14 * (2, 1, 4) / 7
        [11, 5, 2],  # rolled by two: 20 * (4, 2, 1) / 7, rounded down
    ]


@given(nodes=st.integers(1, 10), seed=st.integers(0))
@settings(deadline=None, max_examples=25)
def test_zipf_shares_roll_with_the_class(nodes, seed):
    labels = balanced(4, 200)
    parts = Zipf().split(labels, nodes, 4, rng(seed))
    counts = label_counts(labels, parts, 4)
    assert (counts >= 1).all()
    for label in range(4):
        assert np.array_equal(counts[:, label], np.roll(counts[:, 0], label))


def test_zipf_needs_a_sample_of_the_smallest_class_for_everyone():
    with pytest.raises(InputError, match="smallest class has 3 samples, fewer than one for each"):
        Zipf().split(np.array([0] * 9 + [1] * 3), 4, 2, rng())
    with pytest.raises(InputError, match=r"a=1.01 never gave 20 numbers with a sum of at most 20"):
        Zipf(a=1.01).split(balanced(2, 20), 20, 2, rng())


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    fraction=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0),
)
@settings(deadline=None, max_examples=60)
def test_hold_out_keeps_the_classes_in_proportion(sizes, fraction, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    indices = np.sort(rng(seed).permutation(len(labels))[: max(1, len(labels) // 2)])
    train, validation = hold_out(indices, labels, fraction, rng(seed))
    assert np.array_equal(np.sort(np.concatenate([train, validation])), indices)
    assert len(train) >= 1
    assert len(validation) == min(int(fraction * len(indices) + 0.5), len(indices) - 1)
    share = len(validation) / len(indices)
    held, all_of_it = (
        np.bincount(labels[part], minlength=len(sizes)) for part in (validation, indices)
    )
    assert (abs(held - share * all_of_it) < 1).all()


def test_hold_out_edges():
    labels = np.zeros(10, dtype=np.int64)
    train, validation = hold_out(np.array([4]), labels, 0.9, rng())
    assert (train.tolist(), validation.tolist()) == ([4], [])
    train, validation = hold_out(np.array([], dtype=np.int64), labels, 0.5, rng())
    assert (len(train), len(validation)) == (0, 0)
    with pytest.raises(InputError, match=r"fraction must lie in \[0, 1\), got 1.0"):
        hold_out(np.array([4]), labels, 1.0, rng())


def test_stratified_spreads_what_is_left_over_the_largest_fractions():
    labels = np.repeat([0, 1, 2], [10, 6, 4])
    chosen = stratified(labels, 9, rng())  # shares 4.5, 2.7, 1.8
    assert np.bincount(labels[chosen]).tolist() == [4, 3, 2]
    assert (np.diff(chosen) > 0).all()


def test_label_counts_by_hand():
    parts = [np.array([0, 3]), np.array([1, 2, 4])]
    assert label_counts(np.array([2, 0, 0, 2, 1]), parts, 4).tolist() == [
        [0, 0, 2, 0],
        [2, 1, 0, 0],
    ]
