"""All kinds of features files give the same task, all kinds of predictions say the same, writing is all or nothing."""

import csv
import json
import resource
from dataclasses import dataclass, replace

import numpy as np
import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

import moontide
from moontide.errors import FileError
from moontide.evaluate import run_batches
from moontide.protocols import Method
from moontide.store.disk import replacing
from moontide.store.files import PREDICTIONS, check_output, read_task
from moontide.store.predictions import write_predictions

N, K, D = 7, 3, 8
NAMES = ["cat", "dog", "émeu"]


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "image_features": rng.normal(size=(N, D)).astype(np.float32),
        "text_features": rng.normal(size=(K, D)).astype(np.float32),
        "labels": rng.integers(K, size=N),
    }


def fixed_size_lists(x):
    return pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1])


def save(path, x):
    """Write a matrix as the kind that the name of the file asks for."""
    if path.name.endswith(".npy"):
        np.save(path, x)
    elif path.name.endswith(".safetensors"):
        save_file({"embeddings": x}, path)
    else:
        column = {
            "fixed": lambda: fixed_size_lists(x),
            "lists": lambda: pa.array(x.tolist(), pa.list_(pa.from_numpy_dtype(x.dtype))),
            "binary": lambda: pa.array([row.tobytes() for row in x], pa.binary(x.itemsize * x.shape[1])),
            "blobs": lambda: pa.array([row.tobytes() for row in x], pa.binary()),
        }[path.name.partition(".")[0]]()
        field = pa.field("embedding", column.type, metadata={"dtype": str(x.dtype)})
        ids = pa.array([f"image-{i}" for i in range(len(x))])
        table = pa.table([ids, column], pa.schema([pa.field("id", pa.string()), field]))
        pq.write_table(table, path, row_group_size=3)
    return path


KINDS = ["a.npy", "a.safetensors", "fixed.parquet", "lists.parquet", "binary.parquet", "blobs.parquet"]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_task(tmp_path, arrays, kind, dtype):
    image = arrays["image_features"].astype(dtype)
    (tmp_path / "text").mkdir()
    features, text = save(tmp_path / kind, image), save(tmp_path / "text" / kind, arrays["text_features"])
    task, labels, ids = read_task(features, text, classes="cat, dog, émeu", logit_scale=50.0)
    expected = moontide.Task(image, arrays["text_features"])
    np.testing.assert_array_equal(task.features, expected.features)
    np.testing.assert_array_equal(task.text, expected.text)
    assert task.features.dtype == expected.features.dtype
    assert (task.logit_scale, task.class_names, labels) == (50.0, ("cat", "dog", "émeu"), None)
    assert ids == ([f"image-{i}" for i in range(N)] if kind.endswith("parquet") else None)


def test_npz_brings_everything(tmp_path, arrays):
    views = np.stack([arrays["image_features"]] * 2, axis=1)
    path = tmp_path / "f.npz"
    np.savez(path, **arrays, classnames=NAMES, temperature=np.float32(0.02), view_features=views, meta="ignored")
    task, labels, ids = read_task(path)
    assert task.class_names == tuple(NAMES)
    assert task.logit_scale == pytest.approx(50)
    assert task.extras["views"].shape == (N, 2, D)
    np.testing.assert_array_equal(labels, arrays["labels"])
    assert ids is None


def test_safetensors_brings_named_tensors(tmp_path, arrays):
    save_file({**arrays, "logit_scale": np.asarray([30.0])}, tmp_path / "f.safetensors")
    task, labels, _ = read_task(tmp_path / "f.safetensors")
    assert (task.n, task.k, task.logit_scale) == (N, K, 30.0)
    np.testing.assert_array_equal(labels, arrays["labels"])


def test_what_is_passed_goes_before_what_the_file_holds(tmp_path, arrays):
    path = tmp_path / "f.npz"
    np.savez(path, **arrays, classnames=NAMES, logit_scale=10.0)
    np.save(tmp_path / "text.npy", arrays["text_features"][:2])
    (tmp_path / "names.txt").write_text("ant\nbee\n", encoding="utf-8")
    (tmp_path / "labels.txt").write_text("1\n" * N)
    given = {"classes": str(tmp_path / "names.txt"), "labels": tmp_path / "labels.txt", "logit_scale": 5.0}
    task, labels, _ = read_task(path, tmp_path / "text.npy", dtype="float64", **given)
    assert (task.k, task.class_names, task.logit_scale) == (2, ("ant", "bee"), 5.0)
    assert labels.tolist() == [1] * N
    assert task.features.dtype == np.float64


def test_class_names_of_a_file_do_not_go_with_other_text(tmp_path, arrays):
    np.savez(tmp_path / "f.npz", **arrays, classnames=NAMES)
    np.save(tmp_path / "text.npy", arrays["text_features"])
    assert read_task(tmp_path / "f.npz", tmp_path / "text.npy").task.class_names is None


def test_byte_strings_are_names_too(tmp_path, arrays):
    np.savez(tmp_path / "f.npz", **arrays, classnames=np.asarray([name.encode() for name in NAMES]))
    assert read_task(tmp_path / "f.npz").task.class_names == tuple(NAMES)


def read_back(path):
    if path.suffix == ".csv":
        with open(path, encoding="utf-8", newline="") as handle:
            return list(csv.DictReader(handle))
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix == ".xlsx":
        header, *rows = openpyxl.load_workbook(path).active.values
        return [dict(zip(header, row, strict=True)) for row in rows]
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize("kind", PREDICTIONS)
@pytest.mark.parametrize("named", [True, False])
def test_every_kind_of_predictions_says_the_same(tmp_path, arrays, kind, named):
    result = moontide.MOON().fit_predict(arrays["image_features"], arrays["text_features"], logit_scale=5.0)
    path = tmp_path / f"p{kind}"
    write_predictions(path, result, [f"i,{n}" for n in range(N)] if named else None, NAMES if named else None)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    if kind == ".npz":
        with np.load(path, allow_pickle=False) as held:
            top = ["top5_confidence", "top5_labels"]
            assert sorted(held.files) == ["confidence", "labels", "probs", "scores", *top, "zero_shot_labels"]
            np.testing.assert_array_equal(held["top5_labels"], np.argsort(-result.probs, axis=1, kind="stable"))
            for name in set(held.files) - set(top):
                np.testing.assert_array_equal(held[name], getattr(result, name))
        return
    rows = read_back(path)
    missing = "" if kind == ".csv" else None
    assert [str(row["id"]) for row in rows] == [f"i,{n}" if named else str(n) for n in range(N)]
    assert [int(row["label"]) for row in rows] == result.labels.tolist()
    assert [int(row["zero_shot_label"]) for row in rows] == result.zero_shot_labels.tolist()
    assert [row["class_name"] for row in rows] == [NAMES[k] if named else missing for k in result.labels]
    assert [row["zero_shot_class_name"] for row in rows] == [
        NAMES[k] if named else missing for k in result.zero_shot_labels
    ]
    np.testing.assert_allclose([float(row["confidence"]) for row in rows], result.confidence, atol=1e-6)


@dataclass(frozen=True)
class Scored(Method):
    """Zero-shot with a score for samples of none of the classes."""

    def _fit(self, task):
        result = moontide.method("zero_shot").fit_predict(task)
        return replace(result, unknown=-result.native_scores.max(axis=1))


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_a_score_for_the_unknown_is_written_where_there_is_one(tmp_path, arrays, kind):
    task = moontide.Task(arrays["image_features"], arrays["text_features"])
    result = run_batches(Scored(), task, 5, shuffle_seed=0)
    path = tmp_path / f"p{kind}"
    write_predictions(path, result)
    if kind == ".npz":
        with np.load(path, allow_pickle=False) as held:
            np.testing.assert_array_equal(held["unknown"], result.unknown)
    else:
        np.testing.assert_allclose([float(row["unknown"]) for row in read_back(path)], result.unknown, atol=1e-6)
    nearest = (task.features @ task.text.T).max(axis=1)
    np.testing.assert_allclose(result.unknown, -100 * nearest, rtol=1e-5)  # in file order


def test_torch_results_are_written_like_numpy_ones(tmp_path, arrays):
    torch = pytest.importorskip("torch")
    image, text = (torch.from_numpy(arrays[name]) for name in ("image_features", "text_features"))
    write_predictions(tmp_path / "p.csv", moontide.MOON().fit_predict(image, text))
    write_predictions(tmp_path / "q.csv", moontide.MOON().fit_predict(image.numpy(), text.numpy()))
    ours, theirs = read_back(tmp_path / "p.csv"), read_back(tmp_path / "q.csv")
    assert [row["label"] for row in ours] == [row["label"] for row in theirs]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_broken_write_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "p.npz"
    path.write_bytes(b"old")
    with pytest.raises(error), replacing(path) as handle:  # noqa: PT012 (the body is what fails)
        handle.write(b"half of the new")
        raise error
    assert [p.name for p in tmp_path.iterdir()] == ["p.npz"]
    assert path.read_bytes() == b"old"


def test_a_disk_that_fills_up_is_a_sentence(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(FileError, match="cannot be written: File too large"), replacing(tmp_path / "p.npz") as file:
            file.write(bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot be written: Not a directory"), replacing(tmp_path / "file" / "p.npz"):
        pass


def test_output_check_leaves_no_trace(tmp_path):
    check_output(tmp_path / "p.csv")
    assert list(tmp_path.iterdir()) == []
