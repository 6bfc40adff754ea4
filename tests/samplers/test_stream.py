import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, chisquare

from moontide.errors import InputError, OptionError
from moontide.samplers import StreamSampler
from moontide.samplers.stream import cut, dirichlet_slots

PUBLISHED_XI = (0.1, 0.01, 0.001)

# S slots and K classes of DTD, Flowers and ImageNet at B = 128: mean number of slots with over 1 % of a class, for
# every published xi, of the shares P themselves and of the images after the cut.
SHARES = {(13, 47): (4.57, 1.52, 1.06), (19, 102): (6.00, 1.76, 1.08), (390, 1000): (29.1, 10.9, 2.59)}
IMAGES = {(13, 47): (4.9, 2.1, 1.2), (19, 102): (5.8, 2.3, 1.3), (390, 1000): (39, 12.5, 3.4)}
SIZES = {(13, 47): 36, (19, 102): 24, (390, 1000): 50}
CASES = [(shape, i) for shape in SHARES for i in range(3)]

streams = st.builds(
    StreamSampler, st.just("dirichlet"), st.integers(1, 30), st.sampled_from([1e-6, 0.001, 0.1, 1.0, 50.0])
) | st.builds(StreamSampler, st.sampled_from(["separate", "iid", "order"]), st.integers(1, 30))
label_arrays = st.lists(st.integers(-3, 8), min_size=1, max_size=80).map(np.array)


def rng(seed=0):
    return np.random.default_rng(seed)


def slots_over_one_percent(size, slots, classes, xi, source):
    """Mean number of slots, per class, that hold over 1 % of its images."""
    slot = dirichlet_slots(np.repeat(np.arange(classes), size), slots, xi, source).reshape(classes, size)
    held = np.stack([np.bincount(row, minlength=slots) for row in slot])
    return np.mean(np.sum(held > 0.01 * size, axis=1))


@given(stream=streams, labels=label_arrays, seed=st.integers(0, 2**32))
def test_a_stream_shows_every_sample_once(stream, labels, seed):
    order = stream.draw(labels, rng(seed))
    np.testing.assert_array_equal(np.sort(order), np.arange(len(labels)))
    np.testing.assert_array_equal(order, stream.draw(labels, rng(seed)))


@given(n=st.integers(1, 90), size=st.integers(1, 40))
def test_batches_are_full_and_the_rest_is_dropped_or_kept(n, size):
    labels = np.arange(n) % 7
    order = StreamSampler("iid", size).draw(labels, rng())
    kept = StreamSampler("iid", size, drop_last=False).batches(labels, rng())
    np.testing.assert_array_equal(np.concatenate(kept), order)
    if n >= size:
        full = StreamSampler("iid", size).batches(labels, rng())
        assert [len(batch) for batch in full] == [size] * (n // size)
        np.testing.assert_array_equal(np.concatenate(full), order[: n // size * size])


def test_dtd_loses_its_last_28_images():
    batches = StreamSampler("dirichlet", 128, xi=0.01).batches(np.repeat(np.arange(47), 36), rng())
    assert len(batches) == 13
    assert len(np.unique(np.concatenate(batches))) == 1692 - 28


def test_separate_shows_each_class_in_one_piece_and_shuffles_classes_and_images():
    labels = rng(1).permutation(np.repeat(np.arange(5), 8))
    orders = [StreamSampler("separate").draw(labels, rng(seed)) for seed in range(1000)]
    assert all(np.count_nonzero(np.diff(labels[order])) == 4 for order in orders)
    assert chisquare(np.bincount([labels[order[0]] for order in orders])).pvalue > 1e-3
    assert chisquare(np.bincount([order[-1] for order in orders], minlength=40)).pvalue > 1e-3


def test_iid_is_a_uniform_shuffle():
    firsts = [StreamSampler("iid").draw(np.arange(20) % 3, rng(seed))[0] for seed in range(2000)]
    assert chisquare(np.bincount(firsts, minlength=20)).pvalue > 1e-3


@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=5), slots=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_the_cut_is_the_published_one(counts, slots, seed):
    y = rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    shares = rng(seed).dirichlet(np.full(slots, 0.3), len(counts))
    slot = cut(y, shares)
    for k, row in enumerate(shares):
        indices = np.flatnonzero(y == k)
        pieces = np.split(indices, np.floor(np.cumsum(row)[:-1] * len(indices)).astype(int))
        for s, piece in enumerate(pieces):
            np.testing.assert_array_equal(indices[slot[indices] == s], piece)


def test_slots_come_in_order_and_are_shuffled_inside():
    labels = np.zeros(1000, dtype=int)  # one class: one slot
    assert not np.array_equal(StreamSampler("dirichlet", 100, xi=0.1).draw(labels, rng()), np.arange(1000))
    labels = np.repeat(np.arange(10), 100)
    # equal shares: slot s is tenth s of every class, but for the image at each cut
    slots = StreamSampler("dirichlet", 100, xi=1e6).draw(labels, rng()).reshape(10, 100)
    assert np.mean(slots % 100 // 10 == np.arange(10)[:, None]) > 0.9
    assert np.all(np.any(np.diff(slots, axis=1) < 0, axis=1))


@pytest.mark.parametrize(("classes", "size", "batch", "slots"), [(5, 40, 10, 5), (40, 5, 50, 4), (3, 2, 50, 1)])
def test_there_are_as_many_slots_as_batches_or_classes(classes, size, batch, slots):
    labels = np.repeat(np.arange(classes), size)
    order = StreamSampler("dirichlet", batch, xi=0.02, drop_last=False).draw(labels, rng(8))
    source = rng(8)
    slot = dirichlet_slots(labels, slots, 0.02, source)
    shuffled = source.permutation(len(labels))
    np.testing.assert_array_equal(order, np.concatenate([shuffled[slot[shuffled] == s] for s in range(slots)]))


@pytest.mark.parametrize(("shape", "i"), CASES)
def test_a_class_is_spread_over_as_many_slots_as_its_shares_say(shape, i):
    slots, classes = shape
    xi = PUBLISHED_XI[i]
    expected = slots * beta.sf(0.01, xi, xi * (slots - 1))
    assert expected == pytest.approx(SHARES[shape][i], abs=0.06)
    source, runs = rng(42), 40 if slots < 100 else 1
    # with very many images a class, images are shares: the one image that truncation moves is far below 1 %
    got = np.mean([slots_over_one_percent(4000, slots, classes, xi, source) for _ in range(runs)])
    assert got == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize(("shape", "i"), CASES)
def test_truncation_leaves_last_images_to_later_slots(shape, i):
    source, runs = rng(43), 60 if shape[0] < 100 else 2
    got = np.mean([slots_over_one_percent(SIZES[shape], *shape, PUBLISHED_XI[i], source) for _ in range(runs)])
    assert got == pytest.approx(IMAGES[shape][i], abs=0.06, rel=0.03)


def test_a_long_tailed_stream_thins_the_classes_first():
    labels = np.repeat(np.arange(3), 100)
    for stream in (StreamSampler("iid", imbalance=100), StreamSampler("separate", imbalance=100)):
        order = stream.draw(labels, rng())
        assert len(np.unique(order)) == len(order)
        assert sorted(np.bincount(labels[order])) == [1, 10, 100]
    tails = [np.bincount(labels[StreamSampler("iid", imbalance=2).draw(labels, rng(s))]).argmax() for s in range(50)]
    assert set(tails) == {0, 1, 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "dirichlet"}, "'xi' must be a number from 1e-6 to 1e6 for a 'dirichlet' stream. Got None"),
        ({"kind": "dirichlet", "xi": 0}, "Got 0 instead"),
        ({"kind": "dirichlet", "xi": float("nan")}, "Got nan"),
        ({"kind": "separate", "xi": 0.1}, "'xi' has no effect on a 'separate' stream: leave it out. Got 0.1"),
        ({"kind": "seperate"}, "There is no stream kind 'seperate'. Did you mean 'separate'?"),
        ({"kind": "iid", "batch_size": 0}, "'batch_size' must be a whole number of at least 1. Got 0"),
        ({"kind": "iid", "imbalance": 0}, "'imbalance' must be"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(options, words):
    with pytest.raises(OptionError, match=words):
        StreamSampler(**options)


def test_a_stream_without_one_full_batch_is_refused_unless_the_rest_is_kept():
    with pytest.raises(InputError, match="'batch_size' is 128 but the stream has 5 samples"):
        StreamSampler("iid").batches([0] * 5, rng())
    assert len(StreamSampler("iid", drop_last=False).batches([0] * 5, rng())[0]) == 5


def test_order_leaves_the_samples_as_they_are():
    labels = [2, 0, 1, 2, 0]
    batches = StreamSampler("order", 2, drop_last=False).batches(labels, rng())
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
