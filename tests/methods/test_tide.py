"""TIDE against a literal account of its equations: dense, in float64, every class mean made without the sample."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moontide.core import tide
from moontide.core.arrays import to_numpy
from moontide.methods.tide import TIDE, given_by, remember
from moontide.simulate import simulate
from moontide.types import Result, Task


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def unit(x: Any) -> Any:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def hot(labels: Any, k: int) -> Any:
    return (np.asarray(labels)[:, None] == np.arange(k)).astype(float)


def affinity(f: Any, m: int) -> Any:
    """(W + W') / 2m of the m nearest neighbours by cosine, (N, N)."""
    m, w = min(m, len(f) - 1), np.zeros((len(f), len(f)))
    for i, cosines in enumerate(f @ f.T):
        others = [j for j in np.argsort(-cosines, kind="stable") if j != i][:m]
        w[i, others] = cosines[others]
    return (w + w.T) / (2 * max(m, 1))


class Literal(NamedTuple):
    probs: Any  # (N, K)
    unknown: Any  # (N,)
    beta: Any  # (K,)
    density: float
    steps: int


class Account:
    """The equations as the docstrings have them, numbered as there."""

    def __init__(self, f: Any, text: Any, scale: float, known: Any, shares: Any, past: Any, options: TIDE) -> None:
        self.f, self.text, self.scale = np.asarray(f, float), np.asarray(text, float), scale
        self.n, self.k, self.d = len(f), len(text), np.shape(f)[1]
        self.known = np.full(self.n, -1) if known is None else np.asarray(known)
        self.labelled, self.shares, self.options = self.known >= 0, shares, options
        self.past_sums, self.past_counts = past or (np.zeros((self.k, self.d)), np.zeros(self.k))
        self.y = softmax(scale * self.f @ self.text.T)
        self.w_graph = affinity(self.f, options.neighbours)

    def clamp(self, z: Any) -> Any:
        return np.where(self.labelled[:, None], hot(self.known, self.k), z)

    def occupancy(self) -> tuple[float, float]:
        """Eqs. 1, 2, 3: the density w and the smoothing a*."""
        y, n, k = self.y, self.n, self.k
        chi, v, self.rho = 1.0, 1e-3, 1.0
        if self.shares is not None:
            v = max(k * float((self.shares**2).sum()) - 1, 1e-3)
        elif n > 1 and k > 1:
            pairs = y @ y.T
            sure = float(np.diag(pairs).mean())
            agree = np.asarray([np.delete(pairs[i], i).mean() for i in range(n)])
            u, q = agree.mean(), (sure - 1 / k) / (1 - 1 / k)
            v = max((k * (u - 2 * agree.std() / n**0.5) - 1) / max(q, 1e-6), 1e-3)
            others = y / (y.sum(0) + 1)
            others = others / others.sum(1, keepdims=True)
            pairs_left = others @ others.T
            sure_left = float(np.diag(pairs_left).mean())
            u_left = float(pairs_left[~np.eye(n, dtype=bool)].mean())
            left = max((k * u_left - 1) / max((sure_left - 1 / k) / (1 - 1 / k), 1e-6), 1e-3)
            v *= min(1.0, max(3 * left / v, 0.25))
            among = sum(self.w_graph[i, j] * pairs[i, j] for i in range(n) for j in range(n))
            best = sum(self.w_graph[i, j] * pairs[i, i] for i in range(n) for j in range(n))
            self.rho = min(max(among / best, 0.02), 1.0)
            chi = min(1.0, self.rho / min(1.0, (n - 1) * u / sure / min(self.options.neighbours, n - 1)))
        a = min(1 / max(v * chi, 1e-3), 1e3)
        w = a / (1 + a)
        self.bias_weight = a / (a + 0.5) if self.shares is None else 1.0
        false = (1 - y.max(1).mean()) * n / k if self.shares is None else 0.0
        return w, a * max(1.0, w * false)

    def anchors(self) -> Any:
        """Eq. 4."""
        label, mean_text = self.clamp(self.y).argmax(1), self.y.mean(0) @ self.text
        sure = np.take_along_axis(self.y, label[:, None], axis=1)
        expected = sure * self.text[label] + (1 - sure) * mean_text
        x, images = expected - expected.mean(0), self.f - self.f.mean(0)
        spread = float((x * x).sum())
        slope = min(max(float((x * images).sum()) / spread, 0.0), 1.0) if spread > 1e-6 * self.n else 0.0
        return unit(self.f.mean(0) + slope * (self.text - mean_text))

    def bias(self) -> Any:
        """Eq. 5."""
        expected = (self.n - 1) * (1 / self.k if self.shares is None else self.shares)
        others = np.stack([np.delete(self.y, i, axis=0).sum(0) for i in range(self.n)])
        bias = np.log((others + 1) / (expected + 1))
        return np.where(bias < 0, self.presence() ** 2 * bias, bias)

    def presence(self) -> Any:
        """Eq. 5, its pi_k: 1 where the user knows the shares."""
        there = np.ones(self.k)
        if self.shares is None and self.n > 1:
            for k, y in enumerate(self.y.T):
                agreement = (y @ self.w_graph @ y) / max(float((self.w_graph.sum(1) * y * y).sum()), 1e-12)
                there[k] = min(1.0, (y.sum() * agreement + self.rho) / ((y.sum() + 1) * self.rho))
        return there

    def within(self, f: Any, labels: Any) -> tuple[Any, Any, Any, int]:
        """Deviations from the mean of the class, these means, the counts and N less the number of classes there."""
        one = hot(labels, self.k)
        means = (one.T @ f) / np.maximum(one.sum(0), 1)[:, None]
        return f - means[labels], means, one.sum(0), self.n - len(np.unique(labels))

    def metric(self, labels: Any) -> Any:
        """Eq. 6."""
        deviations, _, _, freedom = self.within(self.f, labels)
        variance = (deviations**2).mean(0)
        return np.sqrt((freedom * variance / max(variance.mean(), 1e-12) + self.d) / (freedom + self.d))

    def anchor_weight(self, f: Any, anchor: Any, labels: Any) -> float:
        """Eq. 7."""
        deviations, means, counts, freedom = self.within(f, labels)
        if freedom < 1:
            return 1.0
        sigma2 = float((deviations**2).sum()) / freedom
        about = float((counts * ((means - anchor) ** 2).sum(1)).sum())
        return min(max(sigma2 / max((about - (counts > 0).sum() * sigma2) / self.n, 1e-3), 0.3), 30.0)

    def cosines(self, z: Any, weight: Any, trusted: Any, left_out: Any) -> Any:
        """Eqs. 8 and 9, (N, K): every sample has class means of its own, from which a share of it is taken away."""
        label, out = z.argmax(1), np.empty((self.n, self.k))
        for i in range(self.n):
            kept, hard = weight.copy(), trusted[:, None] * hot(label, self.k)
            kept[i] *= 1 - left_out[i]
            hard[i] *= 1 - left_out[i]
            counts = hard.sum(0) + self.past_counts
            soft = np.maximum(kept.sum(0) + self.past_counts, 1e-9)
            beta = (counts / (counts + self.alpha))[:, None]
            mean = (kept.T @ self.f + self.past_sums) / soft[:, None]
            out[i] = unit(beta * mean + (1 - beta) * self.anchor) @ self.f[i]
        return out

    def pull(self, z: Any, left_out: Any) -> Any:
        """Eq. 11, its prior."""
        if self.shares is not None:
            return np.zeros_like(z) + np.log(self.shares + 1e-12)
        kept = [np.delete(z, i, axis=0).sum(0) + (1 - left_out[i]) * z[i] for i in range(self.n)]
        return np.log(np.stack(kept) + self.smoothing)

    def trust(self, base: Any, cosine: Any) -> tuple[float, float]:
        """Eqs. 12 and 13."""
        own, rows = self.known[self.labelled], np.arange(self.labelled.sum())
        tried = []
        for text in tide.TRUSTS:
            for temper in tide.TEMPERS:
                likelihood = softmax(temper * (text * base + self.sharp * cosine))[rows, own]
                penalty = np.square(np.log([text, temper])) @ tide.RELUCTANCE
                tried.append((float(np.log(likelihood).sum() - penalty), np.log(text)))
        fits, weights = np.transpose(tried)
        text = float(np.exp(softmax(fits[None])[0] @ weights))
        right = ((text * base + self.sharp * cosine).argmax(1) == own).sum()
        r = (right + 2) / (len(own) + 2)
        return text, 1 / (1 + self.n / self.k * (1 - r) ** 2)

    def solve(self) -> Literal:
        raw = self.f
        w, self.smoothing = self.occupancy()
        log_y = np.log(self.y) - self.bias_weight * self.bias()
        labels = self.clamp(self.y).argmax(1)
        scale = self.metric(labels)
        self.anchor, moved = unit(self.anchors() / scale), self.f / scale
        self.past_sums = self.past_sums / (scale * np.linalg.norm(moved, axis=1).mean())
        self.f = unit(moved)
        self.alpha = self.anchor_weight(self.f, self.anchor, labels)
        self.sharp = self.options.sharpness * (1 + 3 * w * (self.n / self.k) / (self.n / self.k + self.alpha))  # Eq. 10
        left_out = (1 - w * w) * ~self.labelled
        first = np.log(self.y.sum(0) + self.smoothing) if self.shares is None else np.log(self.shares + 1e-12)
        start = log_y + self.sharp * self.f @ self.anchor.T + (2 - w) * self.w_graph @ self.clamp(self.y) + first
        z, steps = self.iterate(self.clamp(softmax(start)), log_y, left_out, w)
        counts = hot(z.argmax(1), self.k).sum(0) + self.past_counts
        probs, unknown = self.clamp(self.calibrated(z, w)), self.unknown(raw)
        return Literal(probs, unknown, counts / (counts + self.alpha), w, steps)

    def iterate(self, z: Any, log_y: Any, left_out: Any, w: float) -> tuple[Any, int]:
        """Eq. 11, with its M-steps."""
        text, reliable, all_out, steps = 1.0, 1.0, np.ones(self.n), 0
        for _ in range(self.options.iterations):
            steps += 1
            safe = np.where(z > 0, z, 1)
            gamma = np.clip(1 + (z * np.log(safe)).sum(1) / np.log(max(self.k, 2)), 0, 1)
            trusted = np.where(self.labelled, 1.0, reliable)
            weight = (np.where(self.labelled, 1.0, gamma) * trusted)[:, None] * z
            base = log_y + (2 - w) * self.w_graph @ z
            if self.labelled.any():
                without = (base + self.pull(z, all_out))[self.labelled]
                cosine = self.cosines(z, weight, trusted, all_out)[self.labelled]
                text, reliable = self.trust(without, cosine)
            logits = text * (base + self.pull(z, left_out)) + self.sharp * self.cosines(z, weight, trusted, left_out)
            before, z = z, self.clamp(softmax(logits))
            if (z.argmax(1) == before.argmax(1)).all() and np.abs(z - before).max() < 1e-4:
                break
        return z, steps

    def calibrated(self, z: Any, w: float) -> Any:
        """Eq. 14: T by bisection."""
        free, label = ~self.labelled, z.argmax(1)
        if not free.any():
            return z
        q = float(self.y[np.arange(self.n), label][free].mean())
        target = 1 - (1 - q) ** (1 + (0.7 - 0.55 * w) * (1 - 1 / self.n))
        low, high = np.log(0.02), np.log(5)
        for _ in range(60):
            power = np.exp((low + high) / 2)
            sure = softmax(power * np.log(z + 1e-30))[np.arange(self.n), label]
            low, high = (low, np.log(power)) if sure[free].mean() > target else (np.log(power), high)
        return softmax(power * np.log(z + 1e-30))

    def unknown(self, f: Any) -> Any:
        """Eq. 15, without negatives."""
        cosine = f @ self.text.T
        score, degree = 1 - (cosine.max(1) - cosine.mean(1)), self.w_graph.sum(1)
        around = self.w_graph @ score / np.where(degree > 0, degree, 1)
        return (score + np.where(degree > 0, around, score)) / 2


def literal(
    f: Any, text: Any, scale: float = 100.0, known: Any = None, shares: Any = None, past: Any = None, **options: Any
) -> Literal:
    """Return what the equations give; `shares` sum to 1, and `past` are sums and counts of labelled samples."""
    return Account(f, text, scale, known, shares, past, TIDE(**options)).solve()


def some_known(labels: Any, share: float, seed: int = 0) -> Any:
    """Return labels of a share of the samples, -1 for the others."""
    return np.where(np.random.default_rng(seed).random(len(labels)) < share, labels, -1)


def expect_equal(found: Result, wanted: Literal, tolerance: float = 1e-4) -> None:
    probs = to_numpy(found.probs)
    tolerance += 1e-5 * len(probs)  # the mean confidence is within 1e-5, and all of that may be in one sample
    np.testing.assert_allclose(probs, wanted.probs, atol=tolerance, rtol=0)
    two = np.sort(wanted.probs, axis=1)[:, -2:] if probs.shape[1] > 1 else np.asarray([[0.0, 1.0]])
    clear = two[:, 1] - two[:, 0] > 2 * tolerance
    np.testing.assert_array_equal(probs.argmax(1)[clear], wanted.probs.argmax(1)[clear])
    np.testing.assert_allclose(to_numpy(found.unknown), wanted.unknown, atol=tolerance)
    np.testing.assert_allclose(to_numpy(found.beta), wanted.beta, atol=tolerance)
    assert found.details["density"] == pytest.approx(wanted.density, abs=tolerance)


BATCHES: dict[str, dict[str, Any]] = {
    "few classes": {"n_samples": 48, "n_classes": 40, "effective_classes": 3},
    "one class": {"n_samples": 32, "n_classes": 20, "effective_classes": 1},
    "all classes": {"n_samples": 80, "n_classes": 10},
    "one sample": {"n_samples": 1, "n_classes": 12},
    "two samples": {"n_samples": 2, "n_classes": 12},
    "four samples": {"n_samples": 4, "n_classes": 3},
    "more classes than samples": {"n_samples": 20, "n_classes": 60},
    "two classes": {"n_samples": 40, "n_classes": 2},
    "two classes, one there": {"n_samples": 40, "n_classes": 2, "effective_classes": 1},
    "long-tailed": {"n_samples": 60, "n_classes": 25, "effective_classes": 12, "imbalance": 10},
}


def drawn(seed: int = 0, **kind: Any) -> tuple[Any, Any, Any]:
    """Return features, text and labels in float64, where rounding does not matter."""
    data = simulate(**kind, dim=48, seed=seed)
    return unit(data.features.astype(float)), unit(data.text.astype(float)), data.labels


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", BATCHES)
def test_the_equations_are_computed(kind: str, seed: int) -> None:
    f, text, _ = drawn(seed, **BATCHES[kind])
    wanted = literal(f, text)
    found = TIDE().fit_predict(f, text)
    expect_equal(found, wanted)
    assert found.n_iter == wanted.steps


@pytest.mark.parametrize("scale", [1.0, 30.4, 300.0])
@pytest.mark.parametrize("kind", ["few classes", "all classes"])
def test_the_equations_are_computed_at_other_logit_scales(kind: str, scale: float) -> None:
    f, text, _ = drawn(**BATCHES[kind])
    expect_equal(TIDE().fit_predict(f, text, logit_scale=scale), literal(f, text, scale))


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("kind", BATCHES)
def test_the_equations_are_computed_with_known_labels(kind: str, share: float) -> None:
    f, text, labels = drawn(**BATCHES[kind])
    known = some_known(labels, share)
    expect_equal(TIDE().fit_predict(f, text, known=known), literal(f, text, known=known))


def test_labels_of_which_none_is_known_change_nothing() -> None:
    f, text, _ = drawn(**BATCHES["all classes"])
    found, wanted = TIDE().fit_predict(f, text, known=np.full(len(f), -1)), TIDE().fit_predict(f, text)
    np.testing.assert_array_equal(found.probs, wanted.probs)


@pytest.mark.parametrize("kind", BATCHES)
def test_the_equations_are_computed_with_a_class_balance(kind: str) -> None:
    f, text, _ = drawn(**BATCHES[kind])
    shares = np.random.default_rng(0).dirichlet(np.full(len(text), 0.5))
    shares[0] = 0
    shares /= shares.sum()
    expect_equal(TIDE().fit_predict(f, text, class_prior=7 * shares), literal(f, text, shares=shares))


def test_the_equations_are_computed_with_labels_a_balance_and_other_options() -> None:
    f, text, labels = drawn(**BATCHES["long-tailed"])
    known, shares = some_known(labels, 0.2), np.bincount(labels, minlength=25) / len(labels)
    options = {"neighbours": 5, "sharpness": 4.0, "iterations": 3}
    found = TIDE(**options).fit_predict(f, text, known=known, class_prior=shares)
    expect_equal(found, literal(f, text, known=known, shares=shares, **options))


def test_labelled_samples_of_the_past_are_in_the_class_means() -> None:
    f, text, labels = drawn(n_samples=80, n_classes=10)
    method = TIDE()
    state = remember(method.start(Task(f, text)), f[:40], labels[:40])
    past = (hot(labels[:40], 10).T @ f[:40], np.bincount(labels[:40], minlength=10))
    found = method.solve(state, f[40:], given_by(state, np.full(40, -1)), None)
    expect_equal(found, literal(f[40:], text, past=past))
    assert not np.allclose(found.probs, method.fit_predict(f[40:], text).probs, atol=1e-3)


@settings(max_examples=15)
@given(
    n=st.integers(1, 30), k=st.integers(2, 30), there=st.integers(1, 30), seed=st.integers(0, 99), share=st.booleans()
)
def test_the_equations_are_computed_for_any_size(n: int, k: int, there: int, seed: int, share: bool) -> None:
    f, text, labels = drawn(seed, n_samples=n, n_classes=k, effective_classes=min(there, n, k))
    known = some_known(labels, 0.3, seed) if share else None
    expect_equal(TIDE().fit_predict(f, text, known=known), literal(f, text, known=known))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["few classes", "all classes", "long-tailed"])
def test_libraries_and_precisions_agree(kind: str, dtype: str, library: str) -> None:
    f, text, labels = drawn(**BATCHES[kind])
    make = np.asarray if library == "numpy" else pytest.importorskip("torch").asarray
    shares = np.bincount(labels, minlength=len(text)) + 1.0
    for given_too in ({}, {"known": some_known(labels, 0.2)}, {"class_prior": shares / shares.sum()}):
        wanted = literal(f, text, known=given_too.get("known"), shares=given_too.get("class_prior"))
        found = TIDE().fit_predict(make(f.astype(dtype)), make(text.astype(dtype)), **given_too)
        assert str(found.probs.dtype).endswith(dtype)
        expect_equal(found, wanted, 1e-4 if dtype == "float64" else 1e-3)


def test_a_sample_alone_gets_the_prediction_of_zero_shot() -> None:
    for seed in range(20):
        f, text, _ = drawn(seed, n_samples=1, n_classes=12)
        found = TIDE().fit_predict(f, text)
        np.testing.assert_allclose(found.probs, found.zero_shot, atol=1e-3)
        assert found.confidence[0] == pytest.approx(found.zero_shot.max(), abs=1e-4)


def test_classes_left_alone_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    tide_loops = pytest.importorskip("moontide.core.backends.tide_loops")
    set_idle, numbers = tide_loops.TIDERows._set_idle, []

    def counted(rows: Any, idle: Any) -> None:
        numbers.append((tide_loops.IDLE > 0, int(idle.sum()) > 9))
        set_idle(rows, idle)

    monkeypatch.setattr(tide_loops.TIDERows, "_set_idle", counted)
    monkeypatch.setattr(tide_loops, "FEW", 0)
    for kind in ({"n_samples": 32, "n_classes": 20, "effective_classes": 1}, {"n_samples": 10, "n_classes": 50}):
        for seed in range(6):
            f, text, _ = (x.astype(np.float32) for x in drawn(seed, **kind))
            found = TIDE().fit_predict(f, text, logit_scale=200.0)
            with monkeypatch.context() as patch:
                patch.setattr(tide_loops, "IDLE", -1.0)
                wanted = TIDE().fit_predict(f, text, logit_scale=200.0)
            np.testing.assert_allclose(found.probs, wanted.probs, atol=1e-4)
            np.testing.assert_allclose(found.beta, wanted.beta, atol=1e-6)
    assert (True, True) in numbers
    assert (False, True) not in numbers


@pytest.mark.parametrize(("n", "k", "there"), [(64, 100, 25), (300, 40, 8), (128, 300, 300), (5, 3, 2), (1, 1, 1)])
@pytest.mark.parametrize("balance", [False, True])
def test_the_compiled_step_gives_what_the_equations_give(n: int, k: int, there: int, balance: bool) -> None:
    pytest.importorskip("numba")
    data = simulate(n, k, effective_classes=min(there, n, k), seed=1)
    given_too = {"class_prior": np.arange(1.0, k + 1)} if balance else {}
    found = TIDE().fit_predict(data.features.astype(np.float32), data.text, **given_too)
    wanted = TIDE().fit_predict(data.features.astype(np.float64), data.text, **given_too)
    np.testing.assert_array_equal(found.labels, wanted.labels)
    np.testing.assert_allclose(found.probs, wanted.probs, atol=1e-4)
    np.testing.assert_allclose(found.beta, wanted.beta, atol=1e-5)


@pytest.mark.filterwarnings("ignore::moontide.errors.ImplausibleWarning")
def test_the_compiled_step_takes_logits_far_below_zero() -> None:
    pytest.importorskip("numba")
    rng, method = np.random.default_rng(0), TIDE(sharpness=3000.0)
    f, text = rng.normal(size=(40, 8)), rng.normal(size=(2, 8))
    found, wanted = (method.fit_predict(f.astype(kind), text.astype(kind)) for kind in (np.float32, np.float64))
    np.testing.assert_allclose(found.probs, wanted.probs, atol=1e-4)
