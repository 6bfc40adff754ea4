"""Files elsewhere, by fsspec: which protocols may be used, how long to wait, when to try again, and the errors.

A path without :// is local. s3://, gs:// and az:// are object storage and always allowed; any other protocol is used
only if the user has named it. Every request has a time limit. Requests that fail on the network are retried after
increasing waits; a file that is missing, refused or damaged is not retried.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from moontide.errors import FileError, MissingExtraError, MoontideError, OptionError, first_line, missing_extra

HERE = {"file", "local", "memory"}  # these reach nothing
STORAGE = {"s3", "gs", "az"}
CONNECT, READ = 10, 60  # seconds
WAITS = (0.5, 1.0, 2.0)  # seconds before another try
HOPELESS = (ValueError, TypeError, LookupError, FileNotFoundError, PermissionError, ImportError, MemoryError)

P = ParamSpec("P")
T = TypeVar("T")


class UnreachableError(FileError):
    """A request for a remote file that failed on the network; a retry may succeed."""


def protocols(path: str) -> list[str]:
    """Return the protocols of a path, several where one wraps another, none where it is local.

    >>> protocols("simplecache::s3://bucket/a.npy"), protocols("a.npy")
    (['simplecache', 's3'], [])
    """
    if "://" not in path and "::" not in path:
        return ["data"] if path.startswith("data:") else []
    return [re.split(r"://", part, maxsplit=1)[0].lower() for part in path.split("::")]


def check_remote(path: str, allowed: Iterable[str] = ()) -> None:
    """Refuse a path whose protocol is neither object storage nor `allowed`, or is not there at all.

    >>> check_remote("https://example.org/a.npy")
    Traceback (most recent call last):
        ...
    moontide.errors.OptionError: https://example.org/a.npy is fetched only with '--allow-remote https'; \
add it, or copy the file here.
    """
    named = {word.strip().lower().removesuffix("://") for word in allowed} | HERE | STORAGE
    for protocol in protocols(path):
        if protocol not in named:
            raise OptionError(
                f"{path} is fetched only with '--allow-remote {protocol}'; add it, or copy the file here."
            )
        _class_of(protocol, path)


def _class_of(protocol: str, path: str) -> Any:
    fsspec = _fsspec()
    try:
        if protocol == "data":
            raise ValueError("the address itself is the file, and no folder of shards")
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or error.name or f"fsspec[{protocol}]"
        raise MissingExtraError(
            f"{path} needs the package {package!r}, which is not installed. Run: pip install {package}"
        ) from None
    except ValueError:
        raise FileError(f"{path} has the unknown protocol {protocol!r}; s3://, gs:// and az:// work.") from None


def _fsspec() -> Any:
    try:
        return import_module("fsspec")
    except ImportError:
        raise missing_extra("fsspec", "shards", "Working on shards") from None


def _limits(path: str) -> dict[str, Any]:
    """Return the time limits of a path in the words of its protocol."""
    protocol = (protocols(path) or ["file"])[-1]
    if protocol == "s3":
        return {"config_kwargs": {"connect_timeout": CONNECT, "read_timeout": READ, "retries": {"max_attempts": 1}}}
    if protocol == "gs":
        return {"requests_timeout": READ}
    if protocol == "az":
        return {"connection_timeout": CONNECT, "read_timeout": READ}
    if protocol in ("http", "https"):
        aiohttp = import_module("aiohttp")
        return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(connect=CONNECT, sock_read=READ)}}
    return {"timeout": READ} if protocol in ("ftp", "sftp", "ssh") else {}


def filesystem(path: str) -> tuple[Any, str]:
    """Return the file system of a path and its path there.

    >>> filesystem("memory://a/b.npy")[1]
    '/a/b.npy'
    """
    try:
        return _fsspec().core.url_to_fs(path, **_limits(path))  # type: ignore[no-any-return]
    except TypeError as error:  # of a protocol that needs more than an address
        raise FileError(f"{path} cannot be opened by its address alone ({first_line(error)}).") from error


def open_file(path: str, mode: str = "rb") -> Any:
    """Open a file of a path, as a context.

    >>> with open_file("memory://a/c.txt", "wb") as handle:
    ...     handle.write(b"text")
    4
    """
    return _fsspec().open(path, mode, **_limits(path))


def on_its_way(path: str, error: Exception) -> bool:
    """Return whether a request for a file elsewhere has failed on its way, so that another may not.

    >>> on_its_way("s3://b/a.npy", TimeoutError()), on_its_way("s3://b/a.npy", FileNotFoundError())
    (True, False)
    """
    if not set(protocols(path)) - HERE:
        return False
    missing = isinstance(error, FileNotFoundError) and error.__cause__ is not None  # what fsspec makes of all errors
    cause = error.__cause__ if missing else error
    refused = 400 <= (getattr(cause, "status", None) or 0) < 500 and cause.status not in (408, 429)  # type: ignore[union-attr]
    return not refused and not isinstance(cause, HOPELESS)


def retried(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function of a path try again where a request fails on its way; FileError in the end.

    >>> tries = []
    >>> @retried
    ... def size(path):
    ...     tries.append(path)
    ...     raise FileNotFoundError
    >>> size("s3://bucket/a.npy")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file s3://bucket/a.npy.
    >>> len(tries)
    1
    """

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        path = str(args[0])
        for wait in (*WAITS, None) if set(protocols(path)) - HERE else (None,):
            try:
                return function(*args, **options)
            except UnreachableError:
                if wait is None:
                    raise
            except MoontideError:
                raise
            except Exception as error:
                if not on_its_way(path, error):
                    if isinstance(error, FileNotFoundError):
                        raise FileError(f"There is no file {path}.") from None
                    raise
                if wait is None:
                    raise unreachable(path, error.__cause__ or error) from error
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    return call


def unreachable(path: str, error: BaseException) -> UnreachableError:
    """Make the error for a request that failed on its way.

    >>> str(unreachable("s3://bucket/a.npy", TimeoutError("no answer")))
    's3://bucket/a.npy cannot be reached (no answer); check its name, the network and its permissions.'
    """
    why = first_line(error)[:100] or type(error).__name__
    return UnreachableError(f"{path} cannot be reached ({why}); check its name, the network and its permissions.")
