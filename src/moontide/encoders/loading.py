"""Error messages for loading models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moontide.errors import FileError, MoontideError

TINY = "it is not CLIP but an ImageNet classifier with a name matcher"


@contextmanager
def saying(what: str) -> Iterator[None]:
    """Convert errors in the user's files to a sentence.

    >>> with saying("The weights are damaged"):
    ...     raise ValueError("too short. More text.")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: The weights are damaged (too short).
    """
    try:
        yield
    except (MoontideError, MemoryError):
        raise
    except Exception as error:  # the libraries raise whatever they stumble over in a broken file
        why = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".: ") or type(error).__name__
        raise FileError(f"{what} ({why}).") from error


def cache_folder() -> Path:
    """Return the folder for what can be made again: `moontide` in the user's cache folder.

    >>> cache_folder().name
    'moontide'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moontide"


def onnx_runtime() -> Any:
    """Import onnxruntime, and keep it from reporting what is run to its makers.

    >>> onnx_runtime().__name__
    'onnxruntime'
    """
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    return onnxruntime


def ask_hub(name: str) -> None:
    """Explain in one sentence why a model cannot be downloaded, without long retries."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=10)
    except Exception as error:
        unknown = isinstance(error, RepositoryNotFoundError | HFValidationError)
        why = "the hub does not show a model of that name" if unknown else "the hub cannot be reached"
        raise FileError(
            f"The model {name} is not on this machine, and {why}: point --encoder at a local folder with such a "
            f"model, or try things out with --encoder tiny, which needs no hub ({TINY})."
        ) from error
