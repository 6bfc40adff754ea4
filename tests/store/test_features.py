import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.errors import FileError, InputError
from moontide.store.features import MANIFEST, TEXT, FeatureStore, Origin

ORIGIN = Origin("a-model", "resize 224", ("a photo of a {}.",), 50.0, "toys")
NAMES = ("ant", "bee", "cat")


def make(folder, **changes):
    return FeatureStore.create(folder, ORIGIN, NAMES, np.eye(3, 4, dtype=np.float32), **changes)


def shard(start, n, dtype=np.float32):
    rows = np.random.default_rng(start).normal(size=(n, 4)).astype(dtype)
    return [f"{start + i}.jpg" for i in range(n)], rows, np.arange(start, start + n) % 3


@given(sizes=st.lists(st.integers(1, 9), max_size=4), data=st.data())
def test_what_was_appended_is_read_back_in_order(tmp_path_factory, sizes, data):
    folder = tmp_path_factory.mktemp("store")
    store, ids, rows, labels = make(folder), [], [np.empty((0, 4), np.float32)], []
    for size in sizes:
        names, features, y = shard(len(ids), size)
        store = store.append(names, features, y)
        ids += names
        rows.append(features)
        labels += y.tolist()
    whole = np.concatenate(rows)
    same = FeatureStore.open(folder)
    assert (same.n, same.ids, same.hash) == (len(ids), ids, store.hash)
    assert same.class_names == NAMES
    assert same.origin == ORIGIN
    assert labels == ([] if same.labels is None else same.labels.tolist())
    wanted = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=20)) if ids else []
    assert np.array_equal(same.take(wanted), whole[wanted])
    same.verify()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_features_are_mapped_in_the_type_they_were_written_in(tmp_path, dtype):
    store = make(tmp_path).append(*shard(0, 5, dtype))
    assert store.take([0, 4]).dtype == dtype
    assert isinstance(store._maps[0][0]["image_features"], np.memmap)


def test_create_continues_a_store_of_the_same_origin_and_no_other(tmp_path):
    store = make(tmp_path).append(*shard(0, 2))
    assert make(tmp_path).ids == store.ids
    with pytest.raises(FileError, match="with the encoder 'a-model', and these have 'b-model'; choose a new folder"):
        FeatureStore.create(tmp_path, Origin("b-model", "resize 224", ("{}",)), NAMES, np.eye(3, 4))
    with pytest.raises(FileError, match="another prompt, dataset or class list"):
        FeatureStore.create(tmp_path, ORIGIN, NAMES, 2 * np.eye(3, 4))


def test_the_hash_follows_the_contents_and_not_the_place(tmp_path):
    stores = [make(tmp_path / name).append(*shard(0, 3)) for name in "ab"]
    assert stores[0].hash == stores[1].hash != stores[0].append(*shard(3, 1)).hash


@pytest.mark.parametrize(
    ("ids", "rows", "labels", "words"),
    [
        (["x"], np.ones((1, 5)), [0], "the dimension of the store, 4. Got shape"),
        (["x", "y"], np.ones((1, 4)), [0], "one row for each of the 2 ids"),
        (["0.jpg"], np.ones((1, 4)), [0], "new to the store .* Got '0.jpg' again"),
        (["x", "x"], np.ones((2, 4)), [0, 0], "Got 'x' again"),
        (["x"], np.full((1, 4), np.nan), [0], "must be finite"),
        (["x"], np.ones((1, 4)), [3], "class numbers from 0 to 2"),
        (["x"], np.ones((1, 4)), None, "'labels' must be given for every shard of a store, or for none"),
    ],
)
def test_a_wrong_shard_is_refused_and_leaves_the_store_as_it_was(tmp_path, ids, rows, labels, words):
    store = make(tmp_path).append(*shard(0, 2))
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(InputError, match=words):
        store.append(ids, rows, labels)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert FeatureStore.open(tmp_path).ids == ["0.jpg", "1.jpg"]


def test_damage_is_found(tmp_path):
    store = make(tmp_path).append(*shard(0, 2))
    path = store.shards[0]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FileError, match="its SHA-256 differs"):
        FeatureStore.open(tmp_path).verify()
    path.write_bytes(data[:-1])
    with pytest.raises(FileError, match="damaged, truncated"):
        FeatureStore.open(tmp_path).take([0])
    path.unlink()
    with pytest.raises(FileError, match="is missing from the store"):
        FeatureStore.open(tmp_path).verify()
    (tmp_path / MANIFEST).write_text(json.dumps({"format": 9}))
    with pytest.raises(FileError, match="has the format 9"):
        FeatureStore.open(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(FileError, match="is damaged"):
        FeatureStore.open(tmp_path)
    with pytest.raises(FileError, match="is not a feature store"):
        FeatureStore.open(tmp_path / "elsewhere")


def test_kill_9_while_a_shard_is_written_leaves_a_valid_store(tmp_path):
    code = """
import os, signal, sys
import numpy as np
from moontide.store import features
from moontide.store.features import FeatureStore, Origin
store = FeatureStore.create(sys.argv[1], Origin("m", "p", ("{}",)), ["a"], np.ones((1, 4)))
store = store.append(["0"], np.ones((1, 4)))
os.replace = lambda a, b: os.kill(os.getpid(), signal.SIGKILL) if str(b).endswith(sys.argv[2]) else os.rename(a, b)
store.append(["1"], np.ones((1, 4)))
"""
    for name in ("00001.safetensors", MANIFEST):  # before the shard has its name, and before the manifest names it
        folder = tmp_path / name
        done = subprocess.run([sys.executable, "-c", code, str(folder), name], env=dict(os.environ))
        assert done.returncode == -9
        store = FeatureStore.open(folder)
        store.verify()
        assert store.ids == ["0"]
        store = store.append(["1", "2"], np.ones((2, 4)))
        assert FeatureStore.open(folder).ids == ["0", "1", "2"]
        assert (folder / TEXT).exists()
