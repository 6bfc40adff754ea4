"""The one reader of .safetensors: what the library writes, and nothing that a wrong header promises."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save

from moontide.errors import FileError
from moontide.store.features import FeatureStore, Origin
from moontide.store.shards import look, read_ids, read_shard
from moontide.store.tensors import DTYPES, Tensors, read_tensors, write_tensors

shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
arrays = st.sampled_from(sorted(DTYPES.values())).flatmap(lambda code: hnp.arrays(np.dtype(code), shapes))


@given(st.dictionaries(st.sampled_from("abc"), arrays))
def test_it_reads_what_the_library_writes(given_: dict[str, Any]) -> None:
    held = Tensors(io.BytesIO(save(given_, {"by": "library"})))
    assert dict(held).keys() == given_.keys()
    for name, x in given_.items():
        assert held[name].dtype == x.dtype
        assert held.shape(name) == x.shape
        np.testing.assert_array_equal(held[name], x)
    assert held.metadata == {"by": "library"}


def test_the_library_reads_what_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    x = {"x": np.arange(6.0).reshape(2, 3), "n": np.asarray(7)}
    write_tensors(str(path), x)
    for name, found in load_file(path).items():
        np.testing.assert_array_equal(found, x[name])
    assert read_tensors(str(path), "n", "none") == {"n": 7}


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4]},
        {"shape": [1]},
        [],
    ],
)
def test_a_header_that_is_wrong_is_not_believed(entry: Any, tmp_path: Path) -> None:
    text = json.dumps({"x": entry}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(FileError, match="damaged, truncated"):
        read_tensors(str(path))


def test_shards_of_a_store_have_its_ids(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path, Origin("a-model", "none", ("{}",))).append(["a.jpg", "b.jpg"], np.eye(2))
    shard = str(store.shards[0])
    assert read_ids(shard) == ["a.jpg", "b.jpg"]
    assert (look(shard).rows, look(shard).d) == (2, 2)
    np.testing.assert_array_equal(read_shard(shard), np.eye(2))
