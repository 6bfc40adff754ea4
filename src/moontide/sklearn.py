"""TIDE as a scikit-learn estimator: fit, predict, predict_proba, in pipelines, searches and clones.

    from moontide.sklearn import TideClassifier

    model = TideClassifier(text_features, class_names=names).fit(X)          # no labels
    model = TideClassifier(text_features, class_names=names).fit(X, y)       # labels of some, -1 for the others
    model.predict(X), model.predict_proba(X)

TIDE labels a batch as a whole. `fit(X, y)` keeps X with its labels, and `labels_` are the predictions for X itself;
`predict(Y)` labels Y together with X. The prediction for a row of Y therefore depends slightly on the other rows of Y,
which scikit-learn does not expect of a classifier (`EXPECTED_FAILURES`).

Without `text_features` the classifier is a semi-supervised one: the anchors are the means of the labelled rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moontide.errors import missing_extra
from moontide.methods.tide import TIDE
from moontide.types import Result, Task

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise missing_extra("scikit-learn", "sklearn", "moontide.sklearn") from None

FloatArray = npt.NDArray[np.floating[Any]]

# What of scikit-learn's checks does not apply, and why: check_estimator(model, expected_failed_checks=...)
EXPECTED_FAILURES = {
    "check_classifiers_classes": "-1 in y is not a class but an unknown label",
    "check_methods_subset_invariance": "rows that are predicted together influence each other",
}

__all__ = ["EXPECTED_FAILURES", "TideClassifier"]


def _is_unknown(value: Any) -> bool:
    """Return whether an entry of y means that the class is not known."""
    return value is None or (not isinstance(value, bool) and value in (-1, ""))


class TideClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """TIDE with the interface of scikit-learn.

    text_features: (K, d) embeddings of the class names; None takes the means of the labelled rows.
    class_names: what `predict` returns, one per row of `text_features`; None: the numbers from 0, or the values of y.
    logit_scale: 1 / temperature of the model. options: options of TIDE by name.

    After `fit`: `classes_` (K,), `labels_` (N,) the classes of the rows that were fitted, `confidence_` (N,) and
    `unknown_` (N,), and `n_features_in_`.

    >>> rng = np.random.default_rng(0)
    >>> text = rng.normal(size=(3, 16)) + 1
    >>> X = text[np.arange(30) % 3] + 0.3 * rng.normal(size=(30, 16))
    >>> model = TideClassifier(text, class_names=["ant", "bee", "cat"]).fit(X)
    >>> model.predict(X[:3])
    array(['ant', 'bee', 'cat'], dtype='<U3')
    """

    def __init__(
        self,
        text_features: npt.ArrayLike | None = None,
        *,
        class_names: Sequence[Any] | None = None,
        logit_scale: float = 100.0,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.text_features = text_features
        self.class_names = class_names
        self.logit_scale = logit_scale
        self.options = options

    def fit(self, X: npt.ArrayLike, y: npt.ArrayLike | None = None) -> TideClassifier:
        """Label the rows of X together; y has their classes (-1, "" or None if unknown), or is None."""
        if self.text_features is None and y is None:
            raise ValueError(
                "TideClassifier without 'text_features' requires y to be passed, but the target y is None; pass one."
            )
        kinds = {"dtype": [np.float64, np.float32]}
        rows: FloatArray = validate_data(self, X, **kinds) if y is None else validate_data(self, X, y, **kinds)[0]
        target = None if y is None else np.asarray(y).ravel()
        if target is not None and target.dtype.kind != "O" and type_of_target(target) != "unknown":
            check_classification_targets(target)
        known, self.classes_ = self._known(rows, target)
        text = self._anchors(rows, known)
        self.centre_ = text.mean(axis=0)
        rows = self._directed(rows)
        self.rows_, self.known_, self.text_ = rows, known, text
        result = self._label(rows, known)
        self.labels_ = self.classes_[result.labels]
        self.confidence_ = np.asarray(result.confidence)
        self.unknown_ = None if result.unknown is None else np.asarray(result.unknown)
        return self

    def _known(self, X: FloatArray, y: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Return the class number of each row (-1 if unknown) and the classes."""
        if y is None:
            classes = np.arange(len(np.asarray(self.text_features))) if self.class_names is None else self.class_names
            return np.full(len(X), -1, dtype=np.int64), np.asarray(classes)
        values = [None if _is_unknown(value) else value for value in y.tolist()]
        there = [value for value in values if value is not None]
        found = np.unique(np.asarray(there, dtype=None if y.dtype.kind == "O" else y.dtype))
        if self.text_features is None:
            if not len(found):
                raise ValueError("'y' must have at least one known label if 'text_features' is None.")
            classes = found
        else:
            k = len(np.asarray(self.text_features))
            classes = np.asarray(np.arange(k) if self.class_names is None else self.class_names)
            if not set(found.tolist()) <= set(classes.tolist()):
                raise ValueError(f"'y' must hold classes of 'class_names', or -1. Got {found[:5].tolist()} instead.")
        number: dict[object, int] = {value: k for k, value in enumerate(classes.tolist())}
        return np.asarray([number.get(value, -1) for value in values], dtype=np.int64), classes

    def _anchors(self, X: FloatArray, known: npt.NDArray[np.int64]) -> FloatArray:
        if self.text_features is not None:
            return np.asarray(self.text_features, dtype=X.dtype)
        return np.stack([X[known == k].mean(axis=0) for k in range(len(self.classes_))])

    def _directed(self, X: FloatArray) -> FloatArray:
        """Replace rows of zeros, which have no direction, by the mean of the anchors, which favours no class."""
        zero: npt.NDArray[np.bool_] = np.asarray((X == 0).all(axis=1))
        return np.where(zero[:, None], self.centre_, X).astype(X.dtype) if zero.any() else X

    def _label(self, X: FloatArray, known: npt.NDArray[np.int64]) -> Result:
        task = Task(X, self.text_, self.logit_scale, known=known if (known >= 0).any() else None)
        return TIDE(**(self.options or {})).fit_predict(task)

    def predict_proba(self, X: npt.ArrayLike) -> FloatArray:
        """Return the probabilities of the classes for each row, (N, K)."""
        check_is_fitted(self)
        X = self._directed(validate_data(self, X, dtype=[np.float64, np.float32], reset=False))
        known = np.concatenate([self.known_, np.full(len(X), -1, dtype=np.int64)])
        found = self._label(np.concatenate([self.rows_.astype(X.dtype), X]), known)
        return np.asarray(found.probs[len(self.rows_) :], dtype=X.dtype)

    def predict(self, X: npt.ArrayLike) -> npt.NDArray[Any]:
        """Return the class of each row, (N,)."""
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]  # type: ignore[no-any-return]

    def fit_predict(self, X: npt.ArrayLike, y: npt.ArrayLike | None = None) -> npt.NDArray[Any]:
        """Return the classes of the rows of X as TIDE labels them together, (N,)."""
        return self.fit(X, y).labels_
