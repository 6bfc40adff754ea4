"""TransCLIP: a Gaussian mixture with one covariance for all classes, which depends on the text only by its prior.

M. Zanella et al., NeurIPS 2024, after what their program (MaxZanella/transduction-for-vlms) computes.

Symbols:  f_i -> features[i]   t_k -> text[k]   log y_ik -> log_y   log z_ik -> log_z   mu_k -> mu
          diag(Sigma) -> spread (1, d)   w_ij -> graph   tau -> 1 / task.logit_scale   lambda -> text_weight

Two programs exist. The one in the tables of the StatA and MOON papers, the default, starts with the text as class
means; the original (preset "original") starts with means of images: in each class the 8 with the largest y_ik, or all
samples if there are fewer. The original takes the number of classes from the labels of the batch; here all candidate
classes are used. Both start with the variance 1 / d and divide the log-likelihood by 50 and the Laplacian by 2m.

For more than 2500 samples the first program computes the variance wrongly (see `_gaussian.row_weights`). By default the
equation is followed for any N; `faithful=True` repeats the defect, and has no effect up to 2500 samples. As in `stata`,
class means are computed from log z and variances have a floor of 1e-6 / d, so that nothing is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moontide.core.arrays import Array, namespace, unit_rows
from moontide.core.simplex import log_softmax, softmax
from moontide.methods._alternation import Components, Repeated
from moontide.methods._gaussian import class_weights, log_density, pooled_variance, row_weights, weighted_moments
from moontide.options import option
from moontide.types import Result, Task

TOP = 8  # images of a class that make its initial mean


@dataclass(frozen=True)
class TransCLIP(Repeated):
    """Transduction with free class means and a shared diagonal covariance, for batches in which every class occurs.

    >>> import numpy as np
    >>> features = np.asarray([[1.0, 0.1, 0.5], [0.9, 0.2, 0.5], [0.2, 0.9, 0.5]])
    >>> TransCLIP().fit_predict(features, np.eye(3)).labels
    array([0, 0, 1])
    """

    citation: ClassVar[str] = "Zanella et al., NeurIPS 2024"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"tables": {}, "original": {"initial_means": "images"}}

    initial_means: str = option("text", "class means at the start: the text, or the 8 images likeliest by zero-shot",
                                choices=("text", "images"))  # fmt: skip
    faithful: bool = option(False, "above 2500 samples, repeat the error in the variance behind the published tables")

    def _fit(self, task: Task) -> Result:
        xp = namespace(task.features)
        f, text = task.features, task.text
        log_y = log_softmax(task.logit_scale * (f @ text.T))  # (N, K)
        centre, weights = xp.mean(f, axis=0), row_weights(f, self.faithful)  # (d,), (N,)
        free = xp.ones_like(text[:, 0])  # (K,) beta = 1: the means are those of the batch alone

        def m_step(log_z: Array) -> Components:
            # mu_k = normalise(sum_i z_ik f_i / sum_i z_ik),  sigma^2_j = sum_ik z_ik (f_ij - mu_kj)^2 / N
            mu = unit_rows(class_weights(log_z) @ f)  # (K, d)
            spread = pooled_variance(*weighted_moments(xp.exp(log_z), f - centre, weights), mu - centre)  # (1, d)
            return Components(mu, spread, free)

        mu = text if self.initial_means == "text" else image_means(log_y, f)  # (K, d)
        return self._alternate(
            task,
            log_y,
            Components(mu, xp.full_like(text[:1, :], 1 / task.d), free),
            lambda classes: log_density(f, classes.mu, classes.spread),
            m_step,
            self.inner_iterations,
        )


def image_means(log_y: Array, f: Array) -> Array:
    """Return for each class the direction of sum_i y_ik f_i over the 8 samples with the largest y_ik, (K, d).

    >>> import numpy as np
    >>> image_means(np.log(np.asarray([[1.0], [0.5]])), np.asarray([[0.6, 0.8], [1.0, 0.0]])).round(3)
    array([[0.809, 0.588]])
    """
    xp = namespace(f)
    order = xp.argsort(log_y, axis=0, descending=True, stable=True)[:TOP, :]  # (8, K)
    weights = softmax(xp.take_along_axis(log_y, order, axis=0).T)  # (K, 8)
    return unit_rows(sum(weights[:, r, None] * f[order[r, :], :] for r in range(order.shape[0])))
