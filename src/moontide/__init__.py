"""Moontide: better zero-shot labels by looking at the whole batch at once.

`TIDE` is the method to start with; `MOON` is that of the paper, and `method(NAME)` gives every other one.

>>> import numpy as np
>>> from moontide import TIDE
>>> rng = np.random.default_rng(0)
>>> result = TIDE().fit_predict(rng.normal(size=(8, 16)), rng.normal(size=(3, 16)), logit_scale=100.0)
>>> result.probs.shape, result.labels.shape
((8, 3), (8,))
"""

TYPE_CHECKING = False  # that of `typing`, which takes time to load
if TYPE_CHECKING:
    from moontide.core.graph import Graph
    from moontide.errors import MoontideError
    from moontide.methods.moon import MOON
    from moontide.methods.tide import TIDE
    from moontide.registry import method, method_names
    from moontide.streams import Stream
    from moontide.types import Result, Task

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

if not TYPE_CHECKING:  # loaded when it is asked for, so that `moontide` can answer Ctrl-C before numpy is there
    _MODULES = {
        "MOON": "methods.moon",
        "TIDE": "methods.tide",
        "Graph": "core.graph",
        "MoontideError": "errors",
        "Result": "types",
        "Stream": "streams",
        "Task": "types",
        "method": "registry",
        "method_names": "registry",
    }

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module 'moontide' has no attribute {name!r}")
        from importlib import import_module

        globals()[name] = found = getattr(import_module(f"moontide.{_MODULES[name]}"), name)
        return found

    def __dir__():
        return [*globals(), *_MODULES]
