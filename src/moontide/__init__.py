"""Moontide: better zero-shot labels by looking at the whole batch at once.

`TIDE` is the method to start with; `MOON` is that of the paper, and `method(NAME)` gives every other one.

>>> import numpy as np
>>> from moontide import TIDE
>>> rng = np.random.default_rng(0)
>>> result = TIDE().fit_predict(rng.normal(size=(8, 16)), rng.normal(size=(3, 16)), logit_scale=100.0)
>>> result.probs.shape, result.labels.shape
((8, 3), (8,))
"""

import logging

from moontide.core.graph import Graph
from moontide.errors import MoontideError
from moontide.methods.moon import MOON
from moontide.methods.tide import TIDE
from moontide.registry import method, method_names
from moontide.streams import Stream
from moontide.types import Result, Task

logging.getLogger("moontide").addHandler(logging.NullHandler())  # silent until the user sets it up

__version__ = "0.2.0"

__all__ = [
    "MOON",
    "TIDE",
    "Graph",
    "MoontideError",
    "Result",
    "Stream",
    "Task",
    "__version__",
    "method",
    "method_names",
]
