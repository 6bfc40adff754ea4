"""State files: the state of a stream with its method, in a .safetensors file.

A file has the arrays of the state, its numbers as 0-d arrays, and as metadata the method, its options and the version
of moontide. It contains no code, and loading it runs none. Everything is restored exactly: a stream that is interrupted
after a whole number of batches and continued from the file gives the same answers as an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import moontide
from moontide.core.arrays import Array, device, like, namespace, to_numpy
from moontide.errors import FileError, InputError, OptionError
from moontide.protocols import Method, OnlineMethod, PerBatch, State, as_online
from moontide.registry import method as make_method
from moontide.store.disk import reading, replacing
from moontide.store.tensors import Tensors, pieces
from moontide.types import Task

BATCH_SIZE = "batch_size"  # in the metadata
SAME_TEXT = 1e-3  # how far class embeddings may differ and still be the same ones, in another precision


def check_state(method: OnlineMethod, state: State) -> None:
    """Refuse a state that another method made.

    >>> tda, dmn = moontide.method("tda"), moontide.method("dmn")
    >>> check_state(tda, dmn.start(Task(np.eye(2), np.eye(2))))
    Traceback (most recent call last):
        ...
    moontide.errors.InputError: 'state' must come from tda, as a TDAState. Got a DMNState instead.
    """
    if type(state) is not method.state_type:
        raise InputError(
            f"'state' must come from {method.name}, as a {method.state_type.__name__}. "
            f"Got a {type(state).__name__} instead."
        )


def check_same_classes(state: State, task: Task) -> None:
    """Refuse to go on with other classes, or another logit scale, than a state was made with.

    >>> made = moontide.method("tda").start(Task(np.eye(2), np.eye(2)))
    >>> check_same_classes(made, Task(np.eye(2), np.eye(2), logit_scale=50))
    Traceback (most recent call last):
        ...
    moontide.errors.InputError: 'logit_scale' must be the one of the state, 100. Got 50 instead.
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
    """Return the batch size that a state was made with, or None where the file does not have it.

    >>> import tempfile
    >>> tda = moontide.method("tda")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_state(f"{folder}/a.safetensors", tda, tda.start(Task(np.eye(2), np.eye(2))), batch_size=16)
    ...     saved_batch_size(f"{folder}/a.safetensors")
    16
    """
    metadata, _ = unpack_state(read_file(path), str(path))
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
    return read_state(*unpack_state(read_file(path), str(path)), str(path), ref, **live)


def state_bytes(
    method: Method, state: State, metadata: Mapping[str, str] | None = None, arrays: Mapping[str, Array] | None = None
) -> bytes:
    """Return the contents of a state file; what is added to it by names that begin with "stream" is not the state's.

    >>> tda = moontide.method("tda")
    >>> data = state_bytes(tda, tda.start(Task(np.eye(2), np.eye(2))))
    >>> read_state(*unpack_state(data, "data"), "data")[1].seen
    0
    """
    online = as_online(method)
    check_state(online, state)
    inside = online.method if isinstance(online, PerBatch) else online
    about = {
        "moontide": moontide.__version__,
        "method": online.name,
        "options": json.dumps({name: getattr(inside, name) for name in inside.specs()}),
    }
    values = {name: getattr(state, name) for name in saved_fields(online)} | dict(arrays or {})
    packed = {name: np.asarray(to_numpy(value)) for name, value in values.items()}
    widest = sorted(packed, key=lambda name: (-packed[name].itemsize, name))  # so that every array is aligned
    return b"".join(pieces({name: packed[name] for name in widest}, {**about, **(metadata or {})}))


def read_file(path: str | Path) -> bytes:
    """Return the contents of a state file."""
    with reading(Path(path)):
        return Path(path).read_bytes()


def unpack_state(data: bytes, source: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the metadata and the arrays of a state file; `source` names it in errors.

    >>> unpack_state(b"no state", "a.safetensors")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: a.safetensors cannot be read; it is damaged, truncated or not a state file.
    """
    try:
        held = Tensors(io.BytesIO(data))
        arrays = dict(held)
    except Exception as error:  # whatever a damaged header makes the parser stumble over
        raise FileError(f"{source} cannot be read; it is damaged, truncated or not a state file.") from error
    if not {"moontide", "method", "options"} <= held.metadata.keys():
        raise FileError(f"{source} is not a state written by moontide.")
    return held.metadata, arrays


def read_state(
    metadata: Mapping[str, str], arrays: Mapping[str, Any], source: str, ref: Array | None = None, **live: Any
) -> tuple[OnlineMethod, State]:
    """Make a method and its state from what `unpack_state` found."""
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
            f"this is moontide {moontide.__version__}. Start the stream again, or use that version."
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
