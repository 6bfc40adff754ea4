"""Run a method along a stream, and keep its state in a file between two parts of it.

A state file is a .safetensors file: the arrays of the state, its numbers as 0-d arrays, and as metadata the method, its
options and the version of moontide. It holds no code, and loading it runs none. Everything is restored to the last bit:
a stream that is cut after any whole number of batches and continued from the file gives the same answers as one that
was not.

    state, monday = run_stream(method("tda"), task, 64)
    save_state("tda.safetensors", method("tda"), state)
    tda, state = load_state("tda.safetensors")
    state, tuesday = run_stream(tda, other_task, 64, state=state)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import moontide
from moontide.core.arrays import Array, device, like, namespace, to_numpy
from moontide.errors import FileError, InputError, OptionError
from moontide.protocols import Method, OnlineMethod, PerBatch, State, as_online, samples
from moontide.registry import method as make_method
from moontide.store.files import reading, replacing
from moontide.types import Result, Task

BATCH_SIZE = "batch_size"  # in the metadata
SAME_TEXT = 1e-3  # how far class embeddings may differ and still be the same ones, in another precision


def run_stream(
    method: Method,
    task: Task,
    batch_size: int,
    *,
    state: State | None = None,
    drop_last: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[State, Result]:
    """Feed the samples of a task to a method in their order, `batch_size` at a time, and join the answers.

    A batch method labels every batch on its own. `state` is where to go on from, `drop_last` leaves out samples at the
    end that do not fill a batch, and `progress` is called with the number of samples done and of all.

    >>> rng = np.random.default_rng(0)
    >>> state, result = run_stream(moontide.method("tda"), Task(rng.normal(size=(10, 8)), np.eye(8)), 4)
    >>> state.seen, result.probs.shape
    (10, (10, 8))
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise OptionError(f"'batch_size' must be an integer of at least 1. Got {batch_size!r} instead.")
    n = task.n - task.n % batch_size if drop_last else task.n
    if n == 0:
        raise InputError(
            f"'drop_last' leaves nothing of {task.n} samples in batches of {batch_size}; use smaller batches."
        )
    online = as_online(method)
    online.require(task.rows(0, min(batch_size, n)))
    if state is None:
        state = online.start(task)
    else:
        check_state(online, state)
        check_same_classes(state, task)
    x, results = samples(online, task), []
    for start in range(0, n, batch_size):
        stop = min(start + batch_size, n)
        state, result = online.step(state, x[start:stop], None if task.known is None else task.known[start:stop])
        results.append(result)
        if progress is not None:
            progress(stop, n)
    return state, Result.concatenate(results)


def check_state(method: OnlineMethod, state: State) -> None:
    """Refuse a state that another method made.

    >>> tda, dmn = moontide.method("tda"), moontide.method("dmn")
    >>> check_state(tda, dmn.start(Task(np.eye(2), np.eye(2))))
    Traceback (most recent call last):
        ...
    moontide.errors.InputError: 'state' must be one that tda made, a TDAState. Got a DMNState instead.
    """
    if type(state) is not method.state_type:
        raise InputError(
            f"'state' must be one that {method.name} made, a {method.state_type.__name__}. "
            f"Got a {type(state).__name__} instead."
        )


def check_same_classes(state: State, task: Task) -> None:
    """Refuse to go on with other classes, or another logit scale, than a state was made with.

    >>> tda = moontide.method("tda")
    >>> check_same_classes(tda.start(Task(np.eye(2), np.eye(2))), Task(np.eye(2), np.eye(2)[::-1]))
    Traceback (most recent call last):
        ...
    moontide.errors.InputError: 'text_features' must be those that the state was made with. They differ in values.
    """
    rule = "'text_features' must be those that the state was made with."
    if tuple(task.text.shape) != tuple(state.text.shape):
        raise InputError(f"{rule} Got shape {tuple(task.text.shape)} instead of {tuple(state.text.shape)}.")
    xp = namespace(state.text)
    if not bool(xp.all(xp.abs(like(task.text, state.text) - state.text) <= SAME_TEXT)):
        raise InputError(f"{rule} They differ in values.")
    if abs(task.logit_scale / state.logit_scale - 1) > SAME_TEXT:
        raise InputError(
            f"'logit_scale' must be the one of the state, {state.logit_scale:g}. Got {task.logit_scale:g} instead."
        )


def save_state(path: str | Path, method: Method, state: State, batch_size: int | None = None) -> None:
    """Write a state with its method and options; `load_state` gives both back, `saved_batch_size` the batch size.

    >>> import tempfile
    >>> tda = moontide.method("tda", positive_capacity=5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_state(f"{folder}/a.safetensors", tda, tda.start(Task(np.eye(2), np.eye(2))))
    ...     loaded, state = load_state(f"{folder}/a.safetensors")
    >>> loaded == tda, state.positive_keys.shape
    (True, (2, 5, 2))
    """
    with replacing(path) as handle:
        handle.write(state_bytes(method, state, None if batch_size is None else {BATCH_SIZE: str(batch_size)}))


def saved_batch_size(path: str | Path) -> int | None:
    """Return the batch size that a state was made with, or None where the file does not say it.

    >>> import tempfile
    >>> tda = moontide.method("tda")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_state(f"{folder}/a.safetensors", tda, tda.start(Task(np.eye(2), np.eye(2))), batch_size=16)
    ...     saved_batch_size(f"{folder}/a.safetensors")
    16
    """
    metadata, _ = unpack(read_file(path), str(path))
    size = metadata.get(BATCH_SIZE) or json.loads(metadata.get("stream", "{}")).get("batch_size")
    return None if size is None else int(size)


def load_state(path: str | Path, ref: Array | None = None, **live: Any) -> tuple[OnlineMethod, State]:
    """Read a state and the method that made it; its arrays are numpy's, or of the kind and on the device of `ref`.

    What a state refers to and cannot be saved, such as an encoder, is handed in again by name.

    >>> load_state("none.safetensors")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file none.safetensors.
    """
    return read_state(*unpack(read_file(path), str(path)), str(path), ref, **live)


def state_bytes(
    method: Method, state: State, metadata: Mapping[str, str] | None = None, arrays: Mapping[str, Array] | None = None
) -> bytes:
    """Return the contents of a state file; what is added to it by names that begin with "stream" is not the state's.

    >>> tda = moontide.method("tda")
    >>> data = state_bytes(tda, tda.start(Task(np.eye(2), np.eye(2))))
    >>> read_state(*unpack(data, "data"), "data")[1].seen
    0
    """
    from safetensors.numpy import save

    online = as_online(method)
    check_state(online, state)
    inside = online.method if isinstance(online, PerBatch) else online
    about = {
        "moontide": moontide.__version__,
        "method": online.name,
        "options": json.dumps({name: getattr(inside, name) for name in inside.specs()}),
    }
    values = {name: getattr(state, name) for name in saved_fields(online)} | dict(arrays or {})
    packed = {name: np.asarray(to_numpy(value), order="C") for name, value in values.items()}
    data: bytes = save(packed, {**about, **(metadata or {})})
    return data


def read_file(path: str | Path) -> bytes:
    """Return the contents of a state file."""
    with reading(Path(path)):
        return Path(path).read_bytes()


def unpack(data: bytes, source: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the metadata and the arrays of a state file; `source` names it in errors.

    >>> unpack(b"no state", "a.safetensors")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: a.safetensors cannot be read; it is damaged, cut short or no state file.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(data)
    except SafetensorError as error:
        raise FileError(f"{source} cannot be read; it is damaged, cut short or no state file.") from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__", {})
    if not {"moontide", "method", "options"} <= metadata.keys():
        raise FileError(f"{source} is not a state that moontide wrote.")
    return metadata, arrays


def read_state(
    metadata: Mapping[str, str], arrays: Mapping[str, Any], source: str, ref: Array | None = None, **live: Any
) -> tuple[OnlineMethod, State]:
    """Make a method and its state from what `unpack` found."""
    arrays = {name: value for name, value in arrays.items() if not name.startswith("stream")}
    try:
        method = as_online(make_method(metadata["method"], **json.loads(metadata["options"])))
    except (OptionError, ValueError, TypeError) as error:
        raise FileError(
            f"{source} is a state of the method {metadata['method']!r}, which cannot be used here: {error}"
        ) from error
    missing, unknown = saved_fields(method) - arrays.keys(), arrays.keys() - saved_fields(method)
    if missing or unknown:
        what = [f"lacks {sorted(missing)}"] * bool(missing) + [f"has the unknown {sorted(unknown)}"] * bool(unknown)
        raise FileError(
            f"{source}, a state of {method.name} by moontide {metadata['moontide']}, {' and '.join(what)}; "
            f"this is moontide {moontide.__version__}. Start the stream anew, or use that version."
        )
    wanted = {f.name for f in dataclasses.fields(method.state_type)} - saved_fields(method)
    if wanted != live.keys():
        names = ", ".join(f"{name}=..." for name in sorted(wanted)) or "nothing"
        raise InputError(f"A state of {method.name} needs besides its file: {names}. Got {sorted(live)} instead.")
    return method, method.state_type(**{name: restore(value, ref) for name, value in arrays.items()}, **live)


def saved_fields(method: OnlineMethod) -> set[str]:
    """Name the fields of the states of a method that go into a file.

    >>> sorted(saved_fields(as_online(moontide.method("moon"))))
    ['logit_scale', 'seen', 'text']
    """
    return {f.name for f in dataclasses.fields(method.state_type) if not f.metadata.get("live")}


def restore(value: Any, ref: Array | None) -> Any:
    """Turn a 0-d array into the number it was, and bring any other to the kind and device of `ref`.

    >>> restore(np.asarray(3), None), restore(np.ones(1), None)
    (3, array([1.]))
    """
    if value.ndim == 0:
        return value.item()
    return np.array(value) if ref is None else namespace(ref).asarray(np.array(value), device=device(ref))
