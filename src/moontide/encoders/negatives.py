"""Negatives: names of other things, embedded with the prompts of the classes.

A store keeps those that were embedded last, in `negatives.safetensors` beside its text features, with a hash of the
words, the templates and the encoder: the same words are not embedded again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress

from moontide.encoders.base import Encoder, FloatArray
from moontide.encoders.prompts import embed_classes
from moontide.errors import FileError, InputError
from moontide.store.features import FeatureStore


def drop_classes(words: Sequence[str], class_names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into those that are not classes and those that are, ignoring case and duplicates.

    >>> drop_classes(["pole", "Cat", "pole"], ["cat", "dog"])
    (['pole'], ['Cat'])
    """
    classes = {name.casefold() for name in class_names}
    words = list(dict.fromkeys(words))
    kept = [word for word in words if word.casefold() not in classes]
    if not kept:
        raise InputError("'negatives' must have at least one name that is not a class. Got none; leave them out.")
    return kept, [word for word in words if word.casefold() in classes]


def embed_negatives(encoder: Encoder, words: Sequence[str], templates: Sequence[str]) -> FloatArray:
    """Embed words like class names, (M, d); the default templates are the encoder's."""
    return embed_classes(encoder, words, templates).text


def stored_negatives(
    store: FeatureStore, make: Callable[[], Encoder], words: Sequence[str], templates: Sequence[str]
) -> FloatArray:
    """Return the embeddings of words from the store, or embed them, with the encoder that `make` makes, and keep them.

    >>> import tempfile, numpy as np
    >>> from moontide.store.features import Origin
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = FeatureStore.create(folder, Origin("a-model", "none", ("{}",)), ["cat"], np.eye(2)[:1])
    ...     store.keep_negatives(fingerprint(store, ["pole"], ["{}"]), np.eye(2)[1:])
    ...     stored_negatives(store, lambda: 1 / 0, ["pole"], ["{}"])
    array([[0., 1.]])
    """
    key = fingerprint(store, words, templates)
    found = store.negatives(key)
    if found is None:
        found = embed_negatives(make(), words, templates)
        with suppress(FileError):  # a store that cannot be written to still gives labels
            store.keep_negatives(key, found)
    return found


def fingerprint(store: FeatureStore, words: Sequence[str], templates: Sequence[str]) -> str:
    """Return a hash of all that the embeddings of words follow from."""
    made = [store.origin.encoder, store.origin.preprocessing, list(templates), list(words)]
    return hashlib.sha256(json.dumps(made).encode()).hexdigest()
