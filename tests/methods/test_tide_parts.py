"""The equations of TIDE one by one: what each of them claims, on draws where the truth is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.core.tide import (
    LARGEST,
    Assigned,
    Compared,
    Occupancy,
    Predicted,
    agreement_by_class,
    agreements,
    anchor_rows,
    anchor_weight,
    anchors,
    bias_weight,
    calibration,
    confidences,
    corroboration,
    cosine_to_means,
    evened,
    excess,
    expected_right,
    log_ratios,
    mean_agreement,
    metric,
    occupancy_of,
    outlasting,
    presence,
    reliability,
    text_bias,
    trust,
)
from moontide.methods.tide import TIDE
from moontide.simulate import simulate

SEEDS = st.integers(0, 10**6)


def unit(x: Any) -> Any:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def corroborated_excess(y: Any, near: Any, most: Any, m: int) -> Occupancy:
    own = (y * y).sum(1)
    agree = agreements(y, y.sum(0), own, len(y))
    even, even_own = evened(y, y.sum(0))
    numbers = agree.sum(), (agree**2).sum(), own.sum(), y.max(1).sum(), even_own.sum()
    return occupancy_of(Compared(*numbers, near, most, even, 0.0, np.zeros((0, 1))), *y.shape, m)


def left_of(y: Any) -> tuple[float, float]:
    total, own = evened(y, y.sum(0))
    return float((total @ total - own.sum()) / (len(y) * (len(y) - 1))), float(own.mean())


def anchors_of(f: Any, text: Any, y: Any) -> Any:
    slope, offset = anchors(text, y.mean(0), Predicted.of(f, y, y.argmax(1), y.max(1)))
    return anchor_rows(text, slope, offset, np.ones(f.shape[1]))


def grouped(f: Any, labels: Any, k: int) -> tuple[Any, Any, int]:
    one = np.eye(k)[labels]
    return one.T @ f, one.sum(0), len(f)


def metric_of(f: Any, labels: Any, k: int) -> Any:
    return metric((f * f).mean(0), *grouped(f, labels, k))


@pytest.mark.parametrize(("k", "a"), [(5, 0.2), (20, 0.05), (20, 1.0)])
def test_the_excess_is_that_of_the_class_shares_on_average(k: int, a: float) -> None:
    rng, found = np.random.default_rng(0), []
    for _ in range(3000):
        shares = rng.dirichlet(np.full(k, a))
        y = np.eye(k)[rng.choice(k, 25, p=shares)]
        pairs = y @ y.T
        u = (pairs.sum() - np.trace(pairs)) / (25 * 24)
        found.append((k * u - 1) / 1.0)  # as `excess`, without its floor, which is no mean's
        assert excess(u, 1.0, k) == pytest.approx(max(found[-1], 1 / LARGEST))
    wanted = (k - 1) / (k * a + 1)  # E[K sum_k share_k^2] - 1
    assert np.mean(found) == pytest.approx(wanted, abs=4 * np.std(found) / 3000**0.5)


@pytest.mark.parametrize("a", [0.1, 0.3, 1.0, 3.0])
def test_the_pseudo_count_is_that_of_the_dirichlet_the_shares_come_from(a: float) -> None:
    rng, k, n = np.random.default_rng(1), 100, 4000
    counts = []
    for _ in range(30):
        y = np.eye(k)[rng.choice(k, n, p=rng.dirichlet(np.full(k, a)))]
        near, most = agreement_by_class(y, 0.5 * y, np.full((n, 1), 0.5))  # neighbours that agree with a sample
        counts.append(corroborated_excess(y, near, most, 3).pseudo_count)
    assert np.exp(np.mean(np.log(counts))) == pytest.approx(a, rel=0.3)


@given(seed=SEEDS)
def test_evened_predictions_are_those_with_equally_frequent_classes(seed: int) -> None:
    y = np.random.default_rng(seed).dirichlet(np.full(5, 0.4), size=12)
    e = y / (y.sum(0) + 1)
    e /= e.sum(1, keepdims=True)
    total, own = evened(y, y.sum(0))
    np.testing.assert_allclose(total, e.sum(0), atol=1e-12)
    np.testing.assert_allclose(own, (e * e).sum(1), atol=1e-12)


def test_an_excess_that_the_texts_make_does_not_last_and_one_of_shares_does() -> None:
    rng, k, n = np.random.default_rng(0), 20, 1000

    def excesses(labels: Any, sure: float, bias: Any) -> tuple[float, float]:
        y = np.exp(sure * np.eye(k)[labels] + rng.normal(size=(n, k)) + bias)
        y /= y.sum(1, keepdims=True)
        own = (y * y).sum(1)
        return excess(agreements(y, y.sum(0), own, n).mean(), own.mean(), k), excess(*left_of(y), k)

    every, three = rng.integers(k, size=n), rng.integers(3, size=n)
    for sure in (3.0, 4.0, 5.0):
        v, left = excesses(every, sure, rng.normal(size=k))
        assert outlasting(v, left) < 0.75 * v
    for sure in (7.0, 9.0):
        v, left = excesses(three, sure, 0.0)
        assert outlasting(v, left) > 0.75 * v


@given(v=st.floats(1e-3, 1e3), left=st.floats(1e-3, 1e3), more=st.floats(0, 10))
def test_what_lasts_of_an_excess_is_a_quarter_to_all_of_it(v: float, left: float, more: float) -> None:
    assert v / 4 <= outlasting(v, left) <= outlasting(v, left + more) <= v
    assert outlasting(v, v / 3) == pytest.approx(v)


@given(rho=st.floats(0.02, 1), company=st.floats(0, 100), m=st.integers(1, 9), more=st.floats(0, 1))
def test_corroboration_rises_with_agreement_and_falls_with_company(
    rho: float, company: float, m: int, more: float
) -> None:
    chi = corroboration(rho, company, m)
    assert 0 < chi <= 1
    assert corroboration(min(rho + more, 1.0), company, m) >= chi
    assert corroboration(rho, company + more, m) <= chi
    assert corroboration(1.0, company, m) == 1


@given(v=st.floats(1e-3, 1e3), rho=st.floats(0.02, 1), chi=st.floats(0.02, 1), false=st.floats(0, 1e3))
def test_density_lies_between_0_and_1_and_falls_with_the_excess(v: float, rho: float, chi: float, false: float) -> None:
    occupancy = Occupancy.of(v, rho, chi, false)
    assert 0 < occupancy.density < 1
    assert 1 / LARGEST <= occupancy.pseudo_count <= LARGEST
    assert occupancy.smoothing >= occupancy.pseudo_count
    assert Occupancy.of(2 * v, rho, chi, false).density <= occupancy.density
    assert Occupancy.of(v, rho, chi / 2, false).density >= occupancy.density


@given(k=st.integers(2, 50), there=st.integers(1, 50))
def test_the_density_of_equal_shares_is_that_of_their_number(k: int, there: int) -> None:
    there = min(there, k)
    shares = np.zeros(k)
    shares[:there] = 1 / there
    v = max(k / there - 1, 1 / LARGEST)  # K / K_eff - 1
    assert Occupancy.of_shares(shares).density == pytest.approx(1 / (1 + v), rel=1e-6)


@given(seed=SEEDS, slope=st.floats(0.05, 0.95))
def test_anchors_follow_the_text_by_the_slope_of_least_squares(seed: int, slope: float) -> None:
    rng = np.random.default_rng(seed)
    text, y = unit(rng.normal(size=(6, 12))), rng.dirichlet(np.full(6, 0.3), size=40)
    sure, mean_text = y.max(1, keepdims=True), y.mean(0) @ text
    expected = sure * text[y.argmax(1)] + (1 - sure) * mean_text
    f = rng.normal(size=12) + slope * expected + 0.02 * rng.normal(size=(40, 12))
    x = (expected - expected.mean(0)).ravel()
    least = float(np.linalg.lstsq(x[:, None], (f - f.mean(0)).ravel(), rcond=None)[0][0])
    assert least == pytest.approx(slope, abs=0.1)
    wanted = unit(f.mean(0) + np.clip(least, 0, 1) * (text - mean_text))
    np.testing.assert_allclose(anchors_of(f, text, y), wanted, atol=1e-9)


@pytest.mark.parametrize(("slope", "held"), [(-0.5, 0.0), (1.5, 1.0)])
def test_the_slope_is_held_between_0_and_1(slope: float, held: float) -> None:
    rng = np.random.default_rng(0)
    text, y = unit(rng.normal(size=(6, 12))), np.eye(6)[rng.integers(6, size=60)]
    f, p = 3 + slope * y @ text, y.mean(0)
    wanted = unit(f.mean(0) + held * (text - p @ text))
    np.testing.assert_allclose(anchors_of(f, text, y), wanted, atol=1e-9)


@given(seed=SEEDS)
def test_the_bias_of_the_text_counts_the_other_samples_only(seed: int) -> None:
    y = np.random.default_rng(seed).dirichlet(np.full(4, 0.3), size=9)
    bias = text_bias(y, y.sum(0), 8 / 4, np.ones(4))
    for i in range(9):
        np.testing.assert_allclose(bias[i], np.log((np.delete(y, i, axis=0).sum(0) + 1) / 3), atol=1e-12)
    as_expected = text_bias(np.full((9, 4), 0.25), np.full(4, 2.25), 2.0, np.ones(4))
    np.testing.assert_allclose(as_expected, 0, atol=1e-12)


def test_a_class_that_no_neighbours_agree_on_is_not_helped() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 20)  # of four classes, in groups of neighbours
    y = 0.9 * np.eye(4)[labels] + 0.02
    y[rng.choice(60, 6, replace=False), 3] += 0.5  # the fourth is absent, and predicted here and there
    y /= y.sum(1, keepdims=True)
    graph = (labels[:, None] == labels) * (1 - np.eye(60)) / 19
    near, most = agreement_by_class(y, graph @ y, np.ones((60, 1)))
    there = presence(near, most, y.sum(0), mean_agreement(near.sum(), most.sum()))
    np.testing.assert_allclose(there[:3], 1)
    assert there[3] < 0.5
    plain, held = (text_bias(y, y.sum(0), 59 / 4, pi) for pi in (np.ones(4), there))
    np.testing.assert_array_equal(held[:, :3], plain[:, :3])  # predicted more often than expected
    np.testing.assert_allclose(held[:, 3], there[3] ** 2 * plain[:, 3])
    assert (plain[:, 3] < 0).all()


@given(a=st.floats(1e-3, 1e3))
def test_the_bias_counts_the_more_the_denser_the_classes_are(a: float) -> None:
    assert 0 < bias_weight(a) < 1
    assert bias_weight(2 * a) > bias_weight(a) > a / (1 + a)


@given(seed=SEEDS, factor=st.floats(0.01, 100))
def test_metric_and_anchor_weight_do_not_depend_on_the_scale(seed: int, factor: float) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=30)
    f = rng.normal(size=(4, 8))[labels] + rng.normal(size=(30, 8)) * np.linspace(0.5, 2, 8)
    scale = metric_of(f, labels, 4)
    np.testing.assert_allclose(metric_of(factor * f, labels, 4), scale, rtol=1e-9)
    assert (scale**2).mean() == pytest.approx(1)
    turn = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    x, anchor = unit(f), unit(rng.normal(size=(4, 8)))
    assert anchor_weight(anchor @ turn, *grouped(x @ turn, labels, 4)) == pytest.approx(
        anchor_weight(anchor, *grouped(x, labels, 4))
    )


def test_the_metric_makes_classes_round() -> None:
    rng, sizes = np.random.default_rng(0), np.asarray([0.1, 0.2, 0.4, 0.8])
    labels = rng.integers(5, size=20_000)
    f = 3 * rng.normal(size=(5, 4))[labels] + sizes * rng.normal(size=(20_000, 4))
    scale = metric_of(f, labels, 5)
    np.testing.assert_allclose(scale / scale[0], sizes / sizes[0], rtol=0.02)
    few = metric_of(f[:6], labels[:6], 5)
    assert few.max() / few.min() < sizes.max() / sizes.min()  # few samples change little


@pytest.mark.parametrize(("sigma", "tau"), [(0.5, 0.5), (1.0, 0.4), (0.4, 0.6)])
def test_the_anchor_weight_is_the_ratio_of_variances_the_classes_were_drawn_with(sigma: float, tau: float) -> None:
    rng, k, d, each = np.random.default_rng(0), 200, 64, 8
    anchor = unit(rng.normal(size=(k, d)))
    mean = anchor + tau * rng.normal(size=(k, d)) / d**0.5
    labels = np.repeat(np.arange(k), each)
    f = mean[labels] + sigma * rng.normal(size=(k * each, d)) / d**0.5
    length = np.linalg.norm(f, axis=1, keepdims=True).mean()  # unit rows, as near as a scale comes
    found = anchor_weight(anchor / length, *grouped(unit(f), labels, k))
    assert found == pytest.approx(sigma**2 / tau**2, rel=0.15)


@pytest.mark.parametrize("wanted", [0.3, 30.0])
def test_the_anchor_weight_is_held_between_a_third_and_thirty(wanted: float) -> None:
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(5), 20)
    f = unit(rng.normal(size=(5, 16))[labels] + (0.01 if wanted < 1 else 0.3) * rng.normal(size=(100, 16)))
    sums, counts, n = grouped(f, labels, 5)
    mean = sums / counts[:, None]
    assert anchor_weight(mean[::-1] if wanted < 1 else mean, sums, counts, n) == wanted


@given(seed=SEEDS, share=st.floats(0, 1), trusted=st.floats(0.1, 1))
def test_a_class_mean_without_a_sample_is_the_mean_of_the_others(seed: int, share: float, trusted: float) -> None:
    rng, (n, k, d), alpha = np.random.default_rng(seed), (7, 4, 6), 1.7
    f, anchor = unit(rng.normal(size=(n, d))), unit(rng.normal(size=(k, d)))
    z, gamma = rng.dirichlet(np.full(k, 0.5), size=n), rng.random(n)
    weight, label = trusted * gamma[:, None] * z, z.argmax(1)
    hard = trusted * np.bincount(label, minlength=k)
    sums, left = weight.T @ f, hard - share * trusted * np.eye(k)[label]
    classes = Assigned(sums, weight.sum(0), hard, hard, hard, 0.0, n, 0, 0.0)
    along = (sums * anchor).sum(1)
    found = cosine_to_means(f @ sums.T, f @ anchor.T, share * weight, left, classes, along, alpha)
    for i in range(n):
        kept = weight.copy()
        kept[i] *= 1 - share
        count = hard - share * trusted * np.eye(k)[label[i]]
        beta = (count / (count + alpha))[:, None]
        mean = beta * (kept.T @ f) / kept.sum(0)[:, None] + (1 - beta) * anchor
        np.testing.assert_allclose(found[i], unit(mean) @ f[i], atol=1e-6)


@given(right=st.integers(0, 50), wrong=st.integers(0, 50), per_class=st.floats(0.1, 100))
def test_a_label_of_the_model_counts_less_the_more_it_gets_wrong(right: int, wrong: int, per_class: float) -> None:
    found = reliability(right, right + wrong, per_class)
    assert 0 < found <= 1
    assert reliability(right, right + wrong + 1, per_class) < found
    assert reliability(right + 1, right + wrong + 1, per_class) >= found
    assert reliability(right, right + wrong, 2 * per_class) <= found
    assert reliability(right, right, per_class) == 1  # no label speaks against it


def test_texts_that_mislead_lose_weight_and_those_that_do_not_keep_it() -> None:
    rng, own = np.random.default_rng(0), np.arange(40) % 5
    helpful, noise = 3 * np.eye(5)[own], 4 * rng.normal(size=(40, 5))
    nothing = trust(noise[:0], helpful[:0], own[:0], 1.0)
    assert 0.8 < nothing < trust(helpful, helpful, own, 1.0) <= 1
    assert trust(noise, helpful, own, 1.0) < 0.5
    assert nothing - 0.1 < trust(noise[:1], helpful[:1], own[:1], 1.0) < nothing + 0.1  # one label says little


@given(seed=SEEDS)
def test_one_label_more_moves_the_weight_of_the_text_a_little(seed: int) -> None:
    rng, own = np.random.default_rng(seed), np.arange(41) % 5
    text, means = (np.eye(5)[own] + 0.8 * rng.normal(size=(41, 5)) for _ in range(2))
    more, less = (trust(2 * text[:n], 2 * means[:n], own[:n], 1.0) for n in (41, 40))
    assert abs(np.log(more / less)) < 0.3  # the steps of the list are 0.36 apart


def test_texts_that_are_only_too_sure_keep_their_weight() -> None:
    rng, own = np.random.default_rng(0), np.arange(400) % 5
    text, means = (
        np.eye(5)[own] + 0.8 * rng.normal(size=(400, 5)) for _ in range(2)
    )  # two looks, as good as each other
    assert trust(4 * text, 4 * means, own, 1.0) > 0.99
    assert trust(4 * text, means, own, 4.0) > 0.99


@given(seed=SEEDS, n=st.integers(1, 30), k=st.integers(2, 9), w=st.floats(0.01, 0.99), sharp=st.floats(0.3, 6))
def test_calibration_keeps_the_order_and_gives_the_confidence_asked_for(
    seed: int, n: int, k: int, w: float, sharp: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, k)) * 1.5
    y, z = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (logits, sharp * logits + rng.normal(size=(n, k)) / 4))
    log_z, right = log_ratios(z, z.argmax(1)[:, None]), y[np.arange(n), z.argmax(1)].mean()

    def sums_at(power: float) -> tuple[float, float]:
        confidence, slope = confidences(log_z, power)
        return float(confidence.sum()), float(slope.sum())

    p = np.exp(calibration(expected_right(right, w, n), sums_at, n) * log_z)
    p /= p.sum(1, keepdims=True)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-9)
    np.testing.assert_array_equal(p.argsort(1), z.argsort(1))
    q = y[np.arange(n), z.argmax(1)].mean()
    target = 1 - (1 - q) ** (1 + (0.7 - 0.55 * w) * (1 - 1 / n))
    limits = [(z**power / (z**power).sum(1, keepdims=True)).max(1).mean() for power in (0.02, 5.0)]
    assert p.max(1).mean() == pytest.approx(min(max(target, limits[0]), limits[1]), abs=2e-3)


def test_confidence_is_near_the_accuracy() -> None:
    for kind in ({"n_classes": 50, "effective_classes": 5}, {"n_classes": 10}):
        gaps = []
        for seed in range(8):
            data = simulate(100, **kind, seed=seed)
            found = TIDE().fit_predict(data.features, data.text)
            gaps.append(found.confidence.mean() - (found.labels == data.labels).mean())
        assert abs(np.mean(gaps)) < 0.1


def left_out(seed: int) -> tuple[Any, Any]:
    """Return a batch, and which samples are of one of the two classes that the text does not have."""
    data = simulate(80, 30, effective_classes=8, seed=seed)
    there = np.unique(data.labels)
    kept = np.setdiff1d(np.arange(30), there[:2])
    return (data.features, data.text[kept], data.text[there[:2]]), np.isin(data.labels, there[:2])


def auroc(score: Any, positive: Any) -> float:
    return float((np.sign(score[positive][:, None] - score[~positive][None, :]).mean() + 1) / 2)


def test_samples_of_classes_that_are_left_out_score_higher_and_highest_with_their_names() -> None:
    plain, named = [], []
    for seed in range(6):
        (features, text, names), out = left_out(seed)
        plain.append(auroc(TIDE().fit_predict(features, text).unknown, out))
        named.append(auroc(TIDE().fit_predict(features, text, negatives=names).unknown, out))
    assert np.mean(plain) > 0.6
    assert np.mean(named) > max(np.mean(plain), 0.8)
