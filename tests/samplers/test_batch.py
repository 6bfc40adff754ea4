import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from moontide.errors import InputError, OptionError
from moontide.samplers import BatchSampler
from moontide.samplers.common import long_tailed_counts

RUNS = 2000


def rng(seed=0):
    return np.random.default_rng(seed)


def labels_of(*sizes, seed=0):
    """Labels with sizes[k] samples of class k, in random order."""
    return rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


label_arrays = st.lists(st.integers(-3, 8), min_size=1, max_size=60).map(np.array)
seeds = st.integers(0, 2**32)


@given(
    labels=label_arrays,
    batch_size=st.none() | st.integers(1, 80),
    low=st.integers(1, 12),
    span=st.integers(0, 5),
    seed=seeds,
)
def test_a_batch_has_the_right_size_no_duplicates_and_few_classes(labels, batch_size, low, span, seed):
    batch = BatchSampler(batch_size, (low, low + span)).draw(labels, rng(seed))
    assert len(np.unique(batch)) == len(batch)
    seen, counts = np.unique(labels[batch], return_counts=True)
    assert 1 <= len(seen) <= low + span
    sizes = np.array([np.sum(labels == c) for c in seen])
    if batch_size is None or len(batch) < batch_size:  # then it is the whole pool
        np.testing.assert_array_equal(counts, sizes)
        assert len(seen) >= min(low, len(np.unique(labels)))
    else:
        assert len(batch) == batch_size


def test_the_same_generator_gives_the_same_batch_and_the_next_draw_another():
    sampler, labels, one, two = BatchSampler(64, (1, 4)), labels_of(*[50] * 30), rng(1), rng(1)
    first = sampler.draw(labels, one)
    np.testing.assert_array_equal(first, sampler.draw(labels, two))
    assert not np.array_equal(first, sampler.draw(labels, one))


@pytest.mark.parametrize(("low", "high"), [(1, 4), (2, 10), (5, 25)])
def test_the_number_of_classes_is_uniform_on_the_inclusive_range(low, high):
    labels = np.repeat(np.arange(40), 3)
    sampler, source = BatchSampler(None, (low, high)), rng(7)  # the whole pool, so every chosen class is seen
    numbers = [len(np.unique(labels[sampler.draw(labels, source)])) for _ in range(RUNS)]
    counts = np.bincount(numbers, minlength=high + 1)
    assert counts.sum() == counts[low : high + 1].sum()
    assert counts[low] > 0
    assert counts[high] > 0
    assert chisquare(counts[low : high + 1]).pvalue > 1e-3


def test_every_class_is_chosen_equally_often_whatever_its_size():
    labels = labels_of(1, 2, 4, 8, 16, 32)
    sampler, source = BatchSampler(None, 2), rng(3)
    chosen = np.concatenate([np.unique(labels[sampler.draw(labels, source)]) for _ in range(RUNS)])
    assert len(chosen) == 2 * RUNS
    assert chisquare(np.bincount(chosen)).pvalue > 1e-3


def test_samples_are_uniform_over_the_pool_not_over_the_classes():
    labels = labels_of(10, 20, 70)
    sampler, source = BatchSampler(5), rng(5)
    drawn = np.concatenate([sampler.draw(labels, source) for _ in range(RUNS)])
    assert chisquare(np.bincount(drawn, minlength=100)).pvalue > 1e-3  # so the class of 70 comes most


def test_a_whole_pool_comes_shuffled():
    labels = np.zeros(20, dtype=int)
    first = [int(BatchSampler().draw(labels, rng(seed))[0]) for seed in range(RUNS)]
    assert chisquare(np.bincount(first, minlength=20)).pvalue > 1e-3


@pytest.mark.parametrize("effective", [None, 10, 25, (25, 50)])
def test_as_many_classes_as_there_are_or_more_means_all(effective):
    labels = labels_of(*[9] * 10)
    assert sorted(BatchSampler(None, effective).draw(labels, rng())) == list(range(90))


@pytest.mark.parametrize(("size", "k", "got"), [(64, 1, 50), (64, 2, 64), (1000, 5, 250), (1000, 25, 1000)])
def test_a_pool_smaller_than_the_batch_is_the_batch(size, k, got):
    labels = np.repeat(np.arange(100), 50)  # 50 images a class, as ImageNet
    assert len(BatchSampler(size, k).draw(labels, rng())) == got


def test_a_chosen_class_can_get_no_sample():
    labels = labels_of(*[50] * 30)
    sampler, source = BatchSampler(8, 8), rng()
    assert min(len(np.unique(labels[sampler.draw(labels, source)])) for _ in range(50)) < 8


@pytest.mark.parametrize(("size", "top"), [(4, 4), (64, 9), (None, 9)])
def test_random_means_from_one_class_to_all_that_fit(size, top):
    labels = np.repeat(np.arange(9), 100)
    numbers = [len(np.unique(labels[BatchSampler(size, "random").draw(labels, rng(seed))])) for seed in range(300)]
    assert (min(numbers), max(numbers)) == (1, top)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    imbalance=st.floats(1, 200),
    total=st.none() | st.integers(1, 300),
)
def test_long_tailed_counts_decay_and_keep_their_shape(sizes, imbalance, total):
    counts = long_tailed_counts(sizes, imbalance, total)
    shape = imbalance ** -(np.arange(len(sizes)) / max(1, len(sizes) - 1))
    assert np.all(counts <= sizes)
    assert np.all(np.diff(counts) <= 0)
    assert total is None or counts.sum() <= total
    # the scale is the largest allowed, and counts are the exact frequencies rounded down or up
    scale = min(np.min(np.array(sizes) / shape), np.inf if total is None else total / shape.sum())
    assert np.all(np.abs(counts - scale * shape) < 1 + 1e-6)
    assert abs(counts.sum() - scale * shape.sum()) < 1 + 1e-6


@given(labels=label_arrays, k=st.integers(1, 9), imbalance=st.floats(1, 50), size=st.integers(1, 80), seed=seeds)
def test_a_long_tailed_batch_has_no_duplicates_and_at_most_k_classes(labels, k, imbalance, size, seed):
    batch = BatchSampler(size, k, imbalance).draw(labels, rng(seed))
    assert len(np.unique(batch)) == len(batch) <= size
    assert len(np.unique(labels[batch])) <= k


def test_the_most_frequent_class_of_a_long_tail_has_imbalance_times_the_least():
    labels = labels_of(*[1000] * 20)
    batch = BatchSampler(1100, effective_classes=2, imbalance=10).draw(labels, rng())
    assert sorted(np.unique(labels[batch], return_counts=True)[1]) == [100, 1000]
    balanced = BatchSampler(1000, effective_classes=5, imbalance=1).draw(labels, rng())
    assert np.unique(labels[balanced], return_counts=True)[1].tolist() == [200] * 5


def test_every_class_of_equal_size_leads_the_tail_equally_often():
    labels = labels_of(*[30] * 6)
    sampler, source = BatchSampler(40, imbalance=20), rng(4)
    heads = [np.bincount(labels[sampler.draw(labels, source)]).argmax() for _ in range(RUNS)]
    assert chisquare(np.bincount(heads, minlength=6)).pvalue > 1e-3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "'batch_size' must be a whole number of at least 1, or None for all. Got 0"),
        ({"batch_size": 6.5}, "Got 6.5"),
        ({"batch_size": True}, "Got True"),
        ({"effective_classes": 0}, "'effective_classes' must be a whole number of at least 1, a range .* Got 0"),
        ({"effective_classes": (0, 4)}, "'effective_classes' must be .* Got 0"),
        ({"effective_classes": (4, 2)}, r"low <= high. Got \(4, 2\)"),
        ({"effective_classes": (1, 2, 3)}, r"Got \(1, 2, 3\)"),
        ({"effective_classes": "many"}, "'random', or None for all. Got 'many'"),
        ({"imbalance": 0.9}, "'imbalance' must be a number of at least 1, or None. Got 0.9"),
        ({"imbalance": float("nan")}, "Got nan"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(options, words):
    with pytest.raises(OptionError, match=words):
        BatchSampler(**options)


@pytest.mark.parametrize("labels", [[], [[0, 1]], [0.5, 1.0], ["cat"]])
def test_bad_labels_are_refused_in_a_sentence(labels):
    with pytest.raises(InputError, match="'labels' must be a non-empty one-dimensional array of whole numbers"):
        BatchSampler().draw(labels, rng())
