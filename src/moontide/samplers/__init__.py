"""The realistic protocols: which samples a method sees together, and in which order.

Samplers see labels and give indices; a method sees neither. All randomness comes from one `numpy.random.Generator`,
and `rng_for` makes the one that belongs to a run of a benchmark:

>>> import numpy as np
>>> from moontide.samplers import BatchSampler, rng_for
>>> labels = np.repeat(np.arange(10), 50)
>>> batch = BatchSampler(batch_size=64, effective_classes=(1, 4)).draw(labels, rng_for("demo", "toy", "very_low", 0))
>>> len(batch) <= 64 and 1 <= len(set(labels[batch])) <= 4
True
"""

from moontide.samplers.batch import BatchSampler
from moontide.samplers.common import rng_for
from moontide.samplers.stream import StreamSampler

__all__ = ["BatchSampler", "StreamSampler", "rng_for"]
