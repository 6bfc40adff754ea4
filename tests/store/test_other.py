"""Embeddings in the files of other programs, and labels by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moontide import TIDE
from moontide.errors import FileError, InputError
from moontide.store.files import read_task

pd = pytest.importorskip("pandas")
torch = pytest.importorskip("torch")
X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
TEXT = np.eye(4, dtype=np.float32)[:3]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    np.save(tmp_path / "text.npy", TEXT)
    return tmp_path / "text.npy"


@pytest.mark.parametrize("kind", ["plain.csv", "header.csv", "index.csv", "ids.csv", "tabs.tsv"])
def test_a_table_of_numbers_is_a_matrix(tmp_path: Path, text: Path, kind: str) -> None:
    frame = pd.DataFrame(X)
    if kind == "ids.csv":
        frame.insert(0, "id", list("abcdef"))
    frame.to_csv(
        tmp_path / kind, index=kind == "index.csv", header=kind != "plain.csv", sep="\t" if kind == "tabs.tsv" else ","
    )
    task, _, ids = read_task(tmp_path / kind, text)
    np.testing.assert_allclose(task.features, X / np.linalg.norm(X, axis=1, keepdims=True), atol=1e-5)
    assert ids == {"ids.csv": list("abcdef"), "index.csv": list("012345")}.get(kind)


def test_a_column_of_vectors_in_a_csv_is_refused_with_the_command_that_converts(tmp_path: Path, text: Path) -> None:
    pd.DataFrame({"id": ["a"], "embedding": [[1.0, 2.0]]}).to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(FileError, match="to_parquet"):
        read_task(tmp_path / "a.csv", text)


def test_tensors_are_read_and_nothing_else_of_a_pt(tmp_path: Path, text: Path) -> None:
    torch.save(torch.tensor(X), tmp_path / "one.pt")
    torch.save({"image_features": torch.tensor(X).half(), "text_features": torch.tensor(TEXT)}, tmp_path / "both.pt")
    assert read_task(tmp_path / "one.pt", text).task.n == 6
    assert read_task(tmp_path / "both.pt").task.k == 3
    torch.save({"x": Path("a")}, tmp_path / "bad.pt")
    with pytest.raises(FileError, match="convert it"):
        read_task(tmp_path / "bad.pt", text)


@pytest.mark.parametrize(("name", "call"), [("a.pkl", "read_pickle"), ("a.JSONL", "read_json"), ("a.h5", "h5py")])
def test_files_of_other_kinds_are_refused_with_the_call_that_converts(tmp_path: Path, name: str, call: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(FileError, match=call) as caught:
        read_task(tmp_path / name)
    assert len(str(caught.value)) <= 300 + len(str(tmp_path))


def test_a_series_of_vectors_is_a_matrix() -> None:
    rows = np.tile(X, (5, 1)) + 0.5  # enough of them to be looked at for mistakes
    frame = pd.DataFrame({"vector": list(rows)})
    expected = TIDE().fit_predict(rows, TEXT).labels
    for given in (frame["vector"], pd.DataFrame(rows), rows.tolist()):
        assert np.array_equal(TIDE().fit_predict(given, TEXT).labels, expected)


def test_labels_that_are_names_are_found_among_the_class_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", image_features=X, text_features=TEXT, labels=list("abcabc"), classnames=list("abc"))
    assert read_task(tmp_path / "a.npz").labels.tolist() == [0, 1, 2, 0, 1, 2]  # type: ignore[union-attr]
    (tmp_path / "labels.txt").write_text("c\nb\na\nc\nb\na\n")
    assert read_task(tmp_path / "a.npz", labels=tmp_path / "labels.txt").labels.tolist() == [2, 1, 0, 2, 1, 0]  # type: ignore[union-attr]
    with pytest.raises(InputError, match="no class called 'c'"):
        read_task(tmp_path / "a.npz", classes="a,b,x")


def test_known_labels_can_be_names() -> None:
    found = TIDE().fit_predict(X, TEXT, class_names=list("abc"), known=["c", "", "", "", "", None])
    assert int(found.labels[0]) == 2
    with pytest.raises(InputError, match="pass 'class_names'"):
        TIDE().fit_predict(X, TEXT, known=["c", "", "", "", "", ""])
