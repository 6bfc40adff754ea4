"""The scikit-learn estimator: its own checks, pipelines, clones, labels of some, and what TIDE says."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer
from sklearn.utils.estimator_checks import check_estimator

from moontide import TIDE
from moontide.simulate import simulate
from moontide.sklearn import EXPECTED_FAILURES, TideClassifier

DATA = simulate(300, 8, seed=0)
NAMES = [f"class {k}" for k in "abcdefgh"]


@pytest.mark.filterwarnings("ignore")  # the checks speak of their own
def test_every_check_of_scikit_learn_passes_but_those_that_do_not_apply() -> None:
    found = check_estimator(TideClassifier(), expected_failed_checks=EXPECTED_FAILURES, on_skip=None, on_fail=None)
    states = {one["check_name"]: one["status"] for one in found}
    assert [name for name, state in states.items() if state == "failed"] == []
    assert {name for name, state in states.items() if state == "xfail"} == set(EXPECTED_FAILURES)
    assert sum(state == "passed" for state in states.values()) > 40


def test_without_labels_it_says_what_tide_says() -> None:
    model = TideClassifier(DATA.text, class_names=NAMES).fit(DATA.features)
    result = TIDE().fit_predict(DATA.features, DATA.text)
    assert model.labels_.tolist() == [NAMES[k] for k in result.labels]
    np.testing.assert_allclose(model.confidence_, result.confidence)


def test_labels_of_some_rows_are_used_and_the_others_are_minus_one() -> None:
    y = np.where(np.arange(300) < 60, DATA.labels, -1)
    model = TideClassifier(DATA.text).fit(DATA.features, y)
    assert (model.labels_[:60] == DATA.labels[:60]).all()
    assert model.classes_.tolist() == list(range(8))
    for none in ("", None, -1):
        given = np.asarray([NAMES[k] if k >= 0 else none for k in y], dtype=object)
        named = TideClassifier(DATA.text, class_names=NAMES).fit(DATA.features, given)
        assert np.array_equal(named.known_, y)
    named = TideClassifier(DATA.text, class_names=NAMES).fit(DATA.features, [NAMES[k] if k >= 0 else "" for k in y])
    assert named.labels_.tolist() == [NAMES[k] for k in model.labels_]
    with pytest.raises(ValueError, match="classes of 'class_names'"):
        TideClassifier(DATA.text).fit(DATA.features, y + 100)


def test_without_text_the_labelled_rows_are_the_anchors() -> None:
    y = np.where(np.arange(300) < 100, DATA.labels, -1)
    model = TideClassifier().fit(DATA.features, y)
    assert np.mean(model.predict(DATA.features[100:]) == DATA.labels[100:]) > 0.8
    with pytest.raises(ValueError, match="at least one known label"):
        TideClassifier().fit(DATA.features, np.full(300, -1))


def test_it_goes_into_pipelines_clones_and_cross_validation() -> None:
    model = make_pipeline(Normalizer(), TideClassifier(DATA.text, options={"iterations": 5}))
    again = clone(model)
    assert again.get_params()["tideclassifier__options"] == {"iterations": 5}
    scores = cross_val_score(again, DATA.features, DATA.labels, cv=3)
    assert scores.mean() > 0.8
    proba = again.fit(DATA.features).predict_proba(DATA.features[:5])
    np.testing.assert_allclose(proba.sum(axis=1), 1, atol=1e-5)
