"""Class names from a list on the command line, or from a .txt, .json, .csv or .tsv file.

    .txt        one name per line; blank lines are left out, and so is # at the start of a line or after a space, with
                what follows it
    .json       a list of names, or an object: the name of each class with its synonyms and descriptions
    .csv, .tsv  a header with a column of names (`NAMES`) and, where there are any, of synonyms (separated by ; or |),
                of a description and of a parent; several rows of one name are one class with several descriptions

A class with more than its name is embedded as the mean of all its prompts. A synonym replaces the name in the
templates; a description is a complete prompt. In a plain list, entries of `SENTENCE` words or more are descriptions.
Embeddings that were made elsewhere have one row per class, or one row per prompt (`ClassList.means`).

Classes are a tree where names are paths, such as animal/dog/beagle, or where there is a column of parents.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moontide.answers import SEPARATOR
from moontide.core.arrays import unit_rows
from moontide.errors import FileError, InputError, listed, shorten
from moontide.store.disk import reading, text_of

NAMES = ("name", "class", "class_name", "classname", "classnames", "label", "category", "species", "names", "classes")
SYNONYMS, DESCRIPTIONS = ("synonym", "synonyms", "aliases"), ("description", "descriptions", "prompt", "prompts")
PARENT = "parent"
TEXTS, KINDS = (".txt", ".names", ".lst", ".list", ""), (".txt", ".json", ".csv", ".tsv")
SENTENCE = 5  # words of a description
LARGEST = 64 * 2**20  # bytes of a file of names
MOST_LEVELS = 100  # of a tree
NO_TEXT = re.compile("[\0\ud800-\udfff]")  # what JSON can write with a backslash, and no prompt or table can hold

AnyArray = npt.NDArray[Any]


@dataclass(frozen=True)
class ClassList:
    """Names of classes with what else is known of them: further prompts, and their positions in a tree.

    >>> classes = ClassList.of(["animal/dog/beagle", "animal/cat"])
    >>> classes.names, classes.paths
    (('beagle', 'cat'), (('animal', 'dog', 'beagle'), ('animal', 'cat')))
    """

    names: tuple[str, ...]
    synonyms: Mapping[str, Sequence[str]] = field(default_factory=dict)
    descriptions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    paths: tuple[tuple[str, ...], ...] | None = None  # from the root of the tree to each class
    lines: tuple[int, ...] | None = None  # the class of each line of a table that has several per class

    @classmethod
    def of(cls, names: Iterable[str], **more: Any) -> ClassList:
        """Make a list of names, which are paths in a tree where at least two of them begin alike."""
        names = tuple(names)
        parts = [tuple(part.strip() for part in name.split(SEPARATOR) if part.strip()) or (name,) for name in names]
        roots = Counter(one[0] for one in parts)
        parts = [one if roots[one[0]] > 1 else (name,) for name, one in zip(names, parts, strict=True)]
        if all(len(one) == 1 for one in parts):  # such as T-shirt/top
            return cls(names, **more)
        last = [one[-1] for one in parts]
        count = Counter(last)
        own = [one[-1] if count[one[-1]] == 1 else SEPARATOR.join(one) for one in parts]
        renamed = dict(zip(names, own, strict=True))
        for key in {"synonyms", "descriptions"} & more.keys():
            more[key] = {renamed[name]: value for name, value in more[key].items()}
        return cls(tuple(own), paths=tuple(parts), **more)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each class, of equal names the first."""
        return {name: k for k, name in reversed(list(enumerate(self.names)))}

    def with_prompts(self, more: Mapping[str, Sequence[str]]) -> ClassList:
        """Return the list with synonyms and descriptions of some classes, distinguished by their length.

        >>> ClassList(("cat", "dog")).with_prompts({"cat": ["kitty", "a small animal with soft fur"]}).synonyms
        {'cat': ['kitty']}
        """
        strange = [name for name in more if name not in self.numbers]
        if strange:
            raise InputError(f"'synonyms' must belong to classes, and {shorten(strange[0], 60)!r} is not one.")
        kinds = {name: _kinds_of_text(name, texts) for name, texts in more.items()}
        return replace(self, **_some(*({name: two[i] for name, two in kinds.items()} for i in (0, 1))))

    def part(self, start: int, stop: int) -> ClassList:
        """Return the list of some of the classes, with their prompts and paths.

        >>> ClassList(("cat", "dog", "cow"), synonyms={"dog": ["hound"]}).part(1, 2).phrases("dog")
        ['dog', 'hound']
        """
        paths = None if self.paths is None else self.paths[start:stop]
        return replace(self, names=self.names[start:stop], paths=paths, lines=None)

    def phrases(self, name: str) -> list[str]:
        """Return the words that are put into templates for a class: its name, then its synonyms."""
        last = name if self.paths is None else self.paths[self.numbers[name]][-1]
        return [last, *self.synonyms.get(name, ())]

    def prompts(self) -> list[int]:
        """Return the class of each prompt: of every class its name, then its synonyms, then its descriptions.

        >>> ClassList(("cat", "dog"), synonyms={"cat": ["kitty"]}).prompts()
        [0, 0, 1]
        """
        counts = [1 + len(self.synonyms.get(name, ())) + len(self.descriptions.get(name, ())) for name in self.names]
        return [k for k, count in enumerate(counts) for _ in range(count)]

    def means(self, text: AnyArray) -> AnyArray:
        """Return one embedding per class: the mean of the unit vectors of its prompts, scaled to length 1 again.

        text: (K, d), which is returned as it is, or one row per prompt (`prompts`), or per line of the file.

        >>> ClassList(("cat", "dog"), synonyms={"cat": ["kitty"]}).means(np.eye(3)).round(2)
        array([[0.71, 0.71, 0.  ],
               [0.  , 0.  , 1.  ]])
        """
        if text.ndim != 2 or len(text) == len(self.names):
            return text
        for owners in (self.lines, self.prompts()):
            if owners is not None and len(owners) == len(text):
                rows = unit_rows(np.asarray(text), "text_features")
                sums = np.zeros((len(self.names), text.shape[1]), rows.dtype)
                np.add.at(sums, list(owners), rows)
                return np.asarray(unit_rows(sums, "text_features"))
        if len(self.prompts()) == len(self.names):
            return text  # a task raises the error
        raise InputError(
            f"'text_features' must have one row for each of the {len(self.names)} classes, or for each of their "
            f"{len(self.prompts())} names, synonyms and descriptions in the order of the file. It has {len(text)}."
        )

    def doubts(self) -> list[str]:
        """Warn of synonyms that stand for more than one class."""
        owners: dict[str, set[str]] = {}
        for name in self.names:
            for word in {name, *self.synonyms.get(name, ())}:
                owners.setdefault(word.casefold(), set()).add(name)
        words = {word.casefold() for synonyms in self.synonyms.values() for word in synonyms}
        double = [f"{word} ({' and '.join(sorted(owners[word]))})" for word in sorted(words) if len(owners[word]) > 1]
        return [f"synonyms stand for more than one class: {listed(double)}; keep each with one"] if double else []


def read_classes(classes: str) -> ClassList:
    """Read class names from a comma-separated list or a file.

    >>> read_classes("cat, dog").names
    ('cat', 'dog')
    >>> read_classes("dress hat")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file 'dress hat'. To list classes, separate them with commas: "dress, hat".
    """
    path = Path(classes)
    if not _is_file(path):
        if "," in classes:
            return ClassList.of(name.strip() for name in as_text(classes).split(",") if name.strip())
        if path.suffix in (*KINDS, *TEXTS[:-1]) or SEPARATOR in classes or not classes.strip():
            raise FileError(f"There is no file {shorten(classes, 160)}.")
        words = ", ".join(classes.split()) if " " in classes.strip() else f"{classes.strip()},"
        raise FileError(
            f"There is no file {shorten(classes, 80)!r}. To list classes, separate them with commas: "
            f'"{shorten(words, 80)}".'
        )
    if path.suffix not in (*KINDS, *TEXTS):
        raise FileError(f"Class names must be a comma-separated list or a {', '.join(KINDS)}. Got {path} instead.")
    text = text_of(path)
    if len(text) > LARGEST:
        raise FileError(f"{path} is too large for a file of class names: more than {LARGEST >> 20} MiB.")
    with reading(path):
        if "\0" in text:
            raise FileError(f"{path} is not text; class names must be a {', '.join(KINDS)}.")
        read = {".json": _from_json, ".csv": _from_table, ".tsv": _from_table}.get(path.suffix, _from_text)
        found = read(path, text)
    if not found.names:
        raise FileError(f"{path} has no class names; add at least one.")
    for texts in (found.names, *found.synonyms.values(), *found.descriptions.values()):
        if bad := NO_TEXT.search("\n".join(texts)):
            raise FileError(f"{path} has {bad[0]!a} in a name, which no prompt or table can hold; correct it.")
    return found


def read_class_names(classes: str) -> list[str]:
    """Return the names that `read_classes` finds.

    >>> read_class_names("cat, dog")
    ['cat', 'dog']
    """
    return list(read_classes(classes).names)


def as_text(argument: str) -> str:
    """Return the text of an argument of the command line, which is UTF-8 whatever the character set of the locale.

    >>> as_text("K\\udcc3\\udca4se")
    'Käse'
    """
    try:
        return argument.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise InputError(f"Names and templates must be UTF-8. Got {shorten(ascii(argument), 80)} instead.") from None


def _is_file(path: Path) -> bool:
    try:
        return bool(path.name) and path.exists()
    except OSError:  # a long list is no path
        return False


def _from_text(path: Path, text: str) -> ClassList:
    if text.lstrip().startswith(("[", "{")):
        raise FileError(f"{path} looks like JSON; rename it to .json, or write one name per line.")
    names = [re.split(r"(?:^|\s)#", line)[0].strip() for line in text.splitlines()]
    names = [name for name in names if name]
    if len(names) == 1 and "," in names[0]:
        raise FileError(f"{path} has one line with commas; write one name per line, or make it a .csv with a header.")
    return ClassList.of(names)


def _from_json(path: Path, text: str) -> ClassList:
    held = json.loads(text, object_pairs_hook=_Pairs)
    if isinstance(held, list) and not isinstance(held, _Pairs):
        if all(isinstance(name, str) for name in held):
            return ClassList.of(name.strip() for name in held if name.strip())
        if all(isinstance(one, _Pairs) for one in held):  # rows of a table
            rows = [{str(key): value for key, value in one} for one in held]
            return _from_rows(path, rows, list(dict.fromkeys(key for row in rows for key in row)))
    if not isinstance(held, _Pairs):
        raise FileError(
            f'{path} must be a list of names, ["cat", "dog"], or an object of synonyms, {{"cat": ["kitty"]}}.'
        )
    double = [name for name, count in Counter(name for name, _ in held).items() if count > 1]
    if double:
        raise FileError(f"{path} has more than one entry for {listed(map(repr, double))}; keep one.")
    synonyms, descriptions = {}, {}
    for name, value in held:
        synonyms[name], descriptions[name] = _more(path, name, value)
    return ClassList.of([name for name, _ in held], **_some(synonyms, descriptions))


class _Pairs(list[tuple[str, Any]]):
    """A JSON object, in which a name given twice is seen."""


def _more(path: Path, name: str, value: Any) -> tuple[list[str], list[str]]:
    """Return the synonyms and the descriptions of an entry of a JSON object."""
    if isinstance(value, _Pairs):
        keys = dict(value)
        if not keys.keys() <= {*SYNONYMS, *DESCRIPTIONS}:
            raise FileError(f"{path} must have 'synonyms' and 'descriptions' for {name!r}. Got {listed(keys)} instead.")
        return _texts(path, name, keys, SYNONYMS), _texts(path, name, keys, DESCRIPTIONS)
    return _kinds_of_text(name, _texts(path, name, {SYNONYMS[0]: value}, SYNONYMS))


def _kinds_of_text(name: str, texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what are synonyms of a name, and what are descriptions."""
    sentences = [one for one in texts if len(one.split()) >= SENTENCE]
    return [one for one in texts if one not in sentences and one != name], sentences


def _texts(path: Path, name: str, held: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    found: list[str] = []
    for key in keys:
        value = held.get(key) or []
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise FileError(f"{path} must have texts for the class {shorten(name, 40)!r}. Got other values.")
        found += [one.strip() for one in value if one.strip()]
    return found


def _from_table(path: Path, text: str) -> ClassList:
    rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if path.suffix == ".tsv" else ","))
    header = list(rows[0]) if rows else [text.strip()]
    if any(None in row for row in rows):
        raise FileError(f"{path} has a row with more values than its header; put values with commas into quotes.")
    plain = {str(name): str(name).strip().lower() for name in header}
    return _from_rows(path, [{plain[key]: value for key, value in row.items()} for row in rows], list(plain.values()))


def _from_rows(path: Path, rows: Sequence[Mapping[str, Any]], header: Sequence[str]) -> ClassList:
    column = next((name for name in NAMES if name in header), None)
    if column is None:
        raise FileError(
            f"{path} must have a column of names called {', '.join(NAMES[:3])} or {NAMES[5]}. "
            f"It has {listed(map(repr, header), 80)}; name the column, or write a .txt with one name per line."
        )
    synonyms: dict[str, list[str]] = {}
    descriptions: dict[str, list[str]] = {}
    parents: dict[str, str] = {}
    names: list[str] = []
    lines: list[str] = []
    merges = any(key in header for key in (*SYNONYMS, *DESCRIPTIONS))
    for row in rows:
        name = str(row.get(column) or "").strip()
        if not name or name.startswith("#"):
            continue
        if name not in synonyms or not merges:
            names.append(name)
        lines.append(name)
        cells = {key: re.split("[;|]", value) if isinstance(value, str) else value for key, value in row.items()}
        synonyms.setdefault(name, []).extend(_texts(path, name, cells, SYNONYMS))
        descriptions.setdefault(name, []).extend(_texts(path, name, row, DESCRIPTIONS))
        parents[name] = str(row.get(PARENT) or "").strip()
    more = _some(synonyms, descriptions)
    if len(lines) > len(names):
        number = {name: k for k, name in enumerate(names)}
        more["lines"] = tuple(number[name] for name in lines)
    if not any(parents.values()):
        return ClassList.of(names, **more)
    return ClassList(tuple(names), paths=tuple(_path_to(path, name, parents) for name in names), **more)


def _path_to(path: Path, name: str, parents: Mapping[str, str]) -> tuple[str, ...]:
    found, seen = [name], {name}
    while above := parents.get(found[0], ""):
        parts = [part.strip() for part in above.split(SEPARATOR)]
        found = [*parts, *found]
        if len(seen | set(parts)) < len(found):
            raise InputError(f"{path} has a class above itself: {shorten(' / '.join(found), 100)}; correct 'parent'.")
        seen.update(parts)
        if len(found) > MOST_LEVELS:
            raise InputError(f"{path} has more than {MOST_LEVELS} levels above {shorten(name, 40)!r}; leave some out.")
    return tuple(found)


def _some(synonyms: Mapping[str, list[str]], descriptions: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return what some class has, each text once."""
    kinds = {"synonyms": synonyms, "descriptions": descriptions}
    return {
        kind: {name: list(dict.fromkeys(texts)) for name, texts in held.items() if texts}
        for kind, held in kinds.items()
        if any(held.values())
    }
