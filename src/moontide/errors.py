"""The exceptions of Moontide. Each message is one sentence with the parameter, the rule, the value and the remedy.

    MoontideError
    ├── InputError            arrays that no method can use (shape, NaN, zero rows, ...)
    │   └── MissingInputError a method needs something beyond features and did not get it
    ├── FileError             a file that is missing, unreadable, of another kind, or cannot be written
    │   └── ImageError        an image that cannot be decoded, or is too large
    ├── OptionError           a parameter outside its range, unknown, or without effect
    │   └── UnknownNameError  a method, option or preset that does not exist
    ├── MissingExtraError     an optional package that is not installed
    └── ResourceError         more memory or another device than this machine has

The command line prints the sentence and exits with status 2; a library user catches `MoontideError`, or the
matching built-in class (`ValueError`, `OSError`, `ImportError`, `MemoryError`). Input that is valid but
doubtful gives an `ImplausibleWarning`.

>>> from moontide.errors import unknown_name
>>> raise unknown_name("method", "mooon", ["moon", "stata"])
Traceback (most recent call last):
    ...
moontide.errors.UnknownNameError: There is no method 'mooon'. Did you mean 'moon'? Known: moon, stata.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

LENGTH = 300  # characters of an error sentence
LISTED = 160  # characters of the known names in it


def without_credentials(text: str) -> str:
    """Return text without the user, password and query of every URL in it.

    >>> without_credentials("postgresql://me:secret@db/streams and https://a.org/x.npy?sig=abc are gone")
    'postgresql://***@db/streams and https://a.org/x.npy?*** are gone'
    >>> without_credentials("there is no folder postgresql:/me:secret@db?sslkey=abc")
    'there is no folder postgresql:/***@db?***'
    """
    text = re.sub(r"(\w:/{1,2})[^\s/?#]*@", r"\1***@", text)  # a path has one slash for two
    return re.sub(r"(\w:/{1,2}[^\s?]*\?)[^\s'\")]+", r"\1***", text)


class MoontideError(Exception):
    """Base class of all errors that Moontide raises; messages never contain credentials."""

    def __str__(self) -> str:
        """Return the sentence."""
        return without_credentials(super().__str__())


class ImplausibleWarning(UserWarning):
    """Input that is valid but probably not what was meant; the message names the remedy."""


class InputError(MoontideError, ValueError):
    """Arrays that cannot be used."""


class MissingInputError(InputError):
    """A method needs more than features (views, images, an encoder) and did not get it."""


class FileError(MoontideError, OSError):
    """A file that cannot be read or written, or has the wrong contents."""


class ImageError(FileError):
    """An image that cannot be used; the message is what follows its name: "it is truncated"."""


class OptionError(MoontideError, ValueError):
    """A parameter outside its range, or one that is set but has no effect."""


class UnknownNameError(OptionError):
    """A name that is not registered; the message offers the nearest one, or the one that replaces it."""


class MissingExtraError(MoontideError, ImportError):
    """An optional package is not installed."""


class ResourceError(MoontideError, MemoryError):
    """More memory, or another device, than the machine has."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Create the error for an unknown `kind` (method, option, ...), with the nearest known name.

    >>> str(unknown_name("option", "betta", ["alpha", "beta"]))
    "There is no option 'betta'. Did you mean 'beta'? Known: alpha, beta."
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {shorten(near[0], 40)!r}?" if near else ""
    return UnknownNameError(f"There is no {kind} {shorten(name, 40)!r}.{hint} Known: {listed(known)}.")


def listed(names: Iterable[str], length: int = LISTED) -> str:
    """Join names with commas; if that is longer than `length`, show the first ones and count the others.

    >>> listed(["alpha", "beta", "gamma"], 12)
    'alpha, beta and 1 more'
    """
    names = list(names)
    shown = [shorten(name, 40) for name in names[: length + 1]]
    while len(", ".join(shown)) > length and len(shown) > 1:
        shown.pop()
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return (", ".join(shown) or "none") + more


def shorten(text: str, length: int = LENGTH) -> str:
    """Shorten a text in the middle if it is longer than `length`; half a password would not be found any more.

    >>> shorten("a" * 50 + "b" * 50, 9)
    'aaa...bbb'
    >>> shorten("https://me:secret@a.org/x.npy", 26)
    'https://***@a.org/x.npy'
    """
    if len(text) > length:
        text = without_credentials(text)
    half = (length - 3) // 2
    return text if len(text) <= length else f"{text[:half]}...{text[-half:]}"


def first_line(error: BaseException) -> str:
    r"""Return the first line of the message of an error, without a full stop.

    >>> first_line(ValueError("It failed.\nAt line 3."))
    'It failed'
    """
    return str(error).strip().partition("\n")[0].rstrip(".")


def replaced_name(kind: str, name: str, by: str) -> UnknownNameError:
    """Create the error for a removed name of a `kind` (method, ...), with its replacement.

    >>> str(replaced_name("method", "old", "new"))
    "There is no method 'old' any more; use 'new', which replaces it."
    """
    return UnknownNameError(f"There is no {kind} {name!r} any more; use {by!r}, which replaces it.")


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """Create the error for an optional package that is not installed.

    >>> print(missing_extra("pyarrow", "parquet", "A .parquet"))
    A .parquet needs the package 'pyarrow', which is not installed. In Moontide's folder run: pip install '.[parquet]'
    """
    return MissingExtraError(f"{purpose} needs the package {package!r}, which is not installed. {install(extra)}")


def install(extra: str) -> str:
    """Return a sentence on how to install an extra.

    >>> install("plot")
    "In Moontide's folder run: pip install '.[plot]'"
    """
    return f"In Moontide's folder run: pip install '.[{extra}]'"
