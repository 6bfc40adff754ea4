"""Files from strangers that stand for far more than they hold, that wait for ever, or that are nested without end."""

import json
import os
import time
import tracemalloc
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save

from moontide.encoders.sources import list_images
from moontide.errors import FileError, InputError, ResourceError
from moontide.integrations.labels import Labels, read_table
from moontide.store.classes import read_classes
from moontide.store.disk import read_json, text_of
from moontide.store.features import ABOUT, MANIFEST, FeatureStore, Origin
from moontide.store.files import read_arrays, read_parquet_column
from moontide.store.inputs import read_class_prior
from moontide.store.states import load_state

TOO_MUCH = "it is not read"


def zeros(rows):
    """Return the array that a dictionary of one value is spread over."""
    return np.zeros(rows, np.int64)


@pytest.mark.parametrize("name", ["image_features.npy", "image_features"])
def test_an_archive_of_arrays_far_larger_than_its_file_is_not_read(tmp_path, name):
    with (
        zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_BZIP2) as archive,
        archive.open(name, "w", force_zip64=True) as member,
    ):
        for _ in range(300):
            member.write(bytes(2**20))
    assert (tmp_path / "a.npz").stat().st_size < 2**12
    with pytest.raises(ResourceError, match=TOO_MUCH):
        read_arrays(tmp_path / "a.npz")


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.struct([("a", pa.string())])])
def test_ids_are_texts_or_numbers_and_nothing_nested(tmp_path, kind):
    one = ["x" * 4096] if pa.types.is_list(kind) else {"a": "x" * 4096}
    ids = pa.array([one], kind).take(pa.array(zeros(100)))
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(200, np.float32)), 2)
    pq.write_table(pa.table({"id": ids, "embedding": vectors}), tmp_path / "a.parquet")
    with pytest.raises(FileError, match="one text or number per row"):
        read_arrays(tmp_path / "a.parquet")


def test_a_column_of_flags_takes_memory_too(tmp_path):
    pq.write_table(pa.table({"camera": pa.array(np.ones(5_000_000, bool))}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(ResourceError, match=TOO_MUCH):
        read_parquet_column(tmp_path / "a.parquet", "camera")


def test_a_table_of_labels_far_larger_than_its_file_is_not_read(tmp_path):
    columns = {"id": pa.array(["x" * 20_000]), "label": pa.array(["cat"]), "confidence": pa.array([0.5])}
    pq.write_table(pa.table(columns).take(pa.array(zeros(20_000))), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(ResourceError, match=TOO_MUCH):
        Labels.read(tmp_path / "a.parquet")


def test_millions_of_rows_in_a_few_bytes_are_no_list_of_images(tmp_path):
    pq.write_table(pa.table({"image": pa.nulls(2_000_000, pa.binary())}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(ResourceError, match=TOO_MUCH):
        list_images([tmp_path / "a.parquet"])


@pytest.mark.parametrize("way", ["stream", "file"])
def test_compressed_arrow_far_larger_than_its_file_is_not_read(tmp_path, way):
    batch = pa.record_batch({"image": pa.array([bytes(2**25)])})
    new = pa.ipc.new_stream if way == "stream" else pa.ipc.new_file
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        new(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer,
    ):
        for _ in range(10):
            writer.write_batch(batch)
    with pytest.raises(ResourceError, match=TOO_MUCH):
        list_images([tmp_path / "a.arrow"])


def test_a_tensor_that_repeats_one_number_is_not_spread_out(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(torch.ones(1).expand(10**6, 10**4), tmp_path / "a.pt")
    with pytest.raises(ResourceError, match=TOO_MUCH):
        read_arrays(tmp_path / "a.pt")


def test_arrays_that_overlap_are_refused(tmp_path):
    entry = {"dtype": "U8", "shape": [1000], "data_offsets": [0, 1000]}
    about = {"moontide": "1", "method": "tda", "options": "{}"}
    header = json.dumps({"__metadata__": about, **{f"a{i}": entry for i in range(1000)}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1000))
    with pytest.raises(FileError, match=r"a\.safetensors cannot be read"):
        load_state(tmp_path / "a.safetensors")


def read_arrays_of(folder):
    store = FeatureStore.open(folder)
    return store.ids, store.text


def made(folder):
    store = FeatureStore.create(folder, Origin("a-model", "none", ("{}",)), ["cat", "dog"], np.eye(2))
    return store.append(["a.jpg", "b.jpg"], np.eye(2), [0, 1])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
@pytest.mark.parametrize("name", [MANIFEST, "00000.safetensors", "text.safetensors"])
def test_a_store_with_a_pipe_in_it_is_not_waited_for(tmp_path, name):
    made(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileError, match="is not a regular file"):
        read_arrays_of(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "about"),
    [
        ({"other": np.eye(2)}, {"ids": ["a", "b"]}),
        ({"image_features": np.ones(2)}, {"ids": ["a", "b"]}),
        ({"image_features": np.eye(2)}, {"ids": ["a"]}),
        ({"image_features": np.eye(2)}, {"ids": [1, 2]}),
        ({"image_features": np.eye(2)}, {"ids": 5}),
        ({"image_features": np.eye(2), "labels": np.asarray([0, 9])}, {"ids": ["a", "b"]}),
        ({"image_features": np.eye(2)}, "[" * 100_000),
    ],
)
def test_a_shard_that_holds_something_else_is_a_sentence(tmp_path, arrays, about):
    made(tmp_path)
    text = about if isinstance(about, str) else json.dumps(about)
    (tmp_path / "00000.safetensors").write_bytes(save(arrays, {ABOUT: text}))
    with pytest.raises((FileError, InputError)) as caught:
        FeatureStore.open(tmp_path).ids  # noqa: B018
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("change", [{"logit_scale": "x"}, {"logit_scale": -1}, {"encoder": 5}, {"prompts": [1]}])
def test_an_origin_of_other_values_is_damage(tmp_path, change):
    made(tmp_path)
    held = json.loads((tmp_path / MANIFEST).read_text())
    held["origin"] |= change
    (tmp_path / MANIFEST).write_text(json.dumps(held))
    with pytest.raises(FileError, match="is damaged"):
        FeatureStore.open(tmp_path)


def test_json_that_is_nested_too_deeply_is_a_sentence(tmp_path):
    (tmp_path / "a.json").write_text("[" * 200_000)
    with pytest.raises(FileError, match="nested too deeply"):
        read_json(tmp_path / "a.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_a_text_that_does_not_fit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(bytes(2**20))
    monkeypatch.setattr("moontide.store.disk.available_bytes", lambda: 2**20)
    with pytest.raises(ResourceError, match="store numbers as"):
        text_of(tmp_path / "a.txt")


def test_a_text_is_kept_as_it_is(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfid\r\n"a\rb"\r\n')
    assert text_of(tmp_path / "a.csv") == 'id\r\n"a\rb"\r\n'


def test_more_values_than_the_header_are_a_sentence(tmp_path):
    (tmp_path / "a.csv").write_text("name\ncat,dog\n")
    with pytest.raises(FileError, match="one and the same set of columns"):
        Labels.read(tmp_path / "a.csv")


def test_sixty_thousand_classes_of_every_kind_of_file_are_read_at_once(tmp_path):
    names = [f"class number {i}" for i in range(60_000)]
    (tmp_path / "a.json").write_text(json.dumps({name: ["other " + name] for name in names}))
    (tmp_path / "a.csv").write_text("name,parent\n" + "".join(f"{name},things\n" for name in names))
    start = time.process_time()
    for kind in ("json", "csv"):
        classes = read_classes(str(tmp_path / f"a.{kind}"))
        assert sum(len(classes.phrases(name)) for name in classes.names) >= 60_000
    assert time.process_time() - start < 10


def test_a_tree_has_a_hundred_levels_at_most(tmp_path):
    (tmp_path / "a.csv").write_text("name,parent\n" + "".join(f"c{i},c{i + 1}\n" for i in range(20_000)))
    with pytest.raises(InputError, match="more than 100 levels"):
        read_classes(str(tmp_path / "a.csv"))


@pytest.mark.parametrize("kind", ["features.csv", "shares.csv", "labels.csv", "images.csv"])
def test_a_line_that_is_no_row_of_a_table_is_refused_before_it_is_split(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("moontide.store.disk.LINE", 2**20)
    path = tmp_path / kind
    path.write_text("id,label,path\n" + "1," * 2**20)
    read = {
        "features.csv": read_arrays,
        "shares.csv": lambda path: read_class_prior(path, None, 2),
        "labels.csv": read_table,
        "images.csv": lambda path: list_images([path]),
    }
    with pytest.raises(FileError, match="one line per row"):
        read[kind](path)


def test_a_table_of_numbers_takes_little_more_memory_than_its_numbers(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(("0.5," * 63 + "1\n") * 10_000)
    tracemalloc.start()
    matrix = read_arrays(path).matrix("image_features")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert matrix.shape == (10_000, 64)
    assert peak < 3 * matrix.nbytes
