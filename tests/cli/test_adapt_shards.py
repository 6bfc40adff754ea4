"""`moontide adapt` on globs and folders of shards: kinds of files, bad ones, ids, and options that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("fsspec")
from safetensors.numpy import save_file  # noqa: E402

from moontide import TIDE  # noqa: E402


@pytest.fixture
def shards(tmp_path: Path, arrays: Any) -> Path:
    """The same task as `features`, in three shards of three kinds."""
    folder = tmp_path / "shards"
    folder.mkdir()
    rows = np.array_split(arrays["image_features"], 3)
    np.save(folder / "a.npy", rows[0])
    save_file({"image_features": rows[1], "other": rows[1][:, :1].copy()}, folder / "b.safetensors")
    ids = [f"image {i}" for i in range(len(rows[2]))]
    pq.write_table(pa.table({"id": ids, "embedding": rows[2].astype(np.float16).tolist()}), folder / "c.parquet")
    np.save(tmp_path / "text.npy", arrays["text_features"])
    return folder


@pytest.fixture
def adapt(moontide: Any, shards: Path) -> Any:
    """Run the command on the folder of shards, with further options."""

    def run(*options: Any) -> Any:
        text, out = shards.parent / "text.npy", shards.parent / "out"
        return moontide("adapt", shards, "--text", text, "--logit-scale", 20, "--out", out, *options)

    return run


def test_three_kinds_of_shards_are_one_task(adapt: Any, shards: Path, arrays: Any, moontide: Any) -> None:
    options = ("--method", "moon", "--set", "laplacian_weight=0", "--classes", "ant,bee,cat,dog")
    status, out, err = adapt(*options)
    assert status == 0, err
    assert "3 shards, 40 rows; workers: 1, each with up to" in err
    assert "iteration 11 of 11" in err
    tables = [pq.read_table(shards.parent / "out" / f"{name}.parquet") for name in "abc"]
    np.savez(shards.parent / "one.npz", logit_scale=20.0, **{k: arrays[k] for k in ("image_features", "text_features")})
    whole = shards.parent / "one.parquet"
    status, expected, _ = moontide("adapt", shards.parent / "one.npz", "--out", whole, *options)
    assert out == expected
    labels = [label for table in tables for label in table["label"].to_pylist()]
    assert labels == pq.read_table(whole)["label"].to_pylist()
    assert tables[0]["id"].to_pylist() == list(range(14))
    assert tables[2]["id"].to_pylist()[:2] == ["image 0", "image 1"]
    assert set(tables[2]["class_name"].to_pylist()) <= {"ant", "bee", "cat", "dog"}


@pytest.mark.parametrize("given", [(), ("--class-prior", "prior.csv"), ("--negatives", "negatives.npy")])
def test_one_shard_is_what_one_file_is(
    given: tuple[str, ...], shards: Path, arrays: Any, moontide: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shards.parent)
    Path("prior.csv").write_text("class,share\nant,1\nbee,2\ncat,3\ndog,4\n")
    np.save("negatives.npy", np.eye(16)[:2])
    np.save("one.npy", arrays["image_features"])
    options = ("--text", "text.npy", "--logit-scale", 20, "--classes", "ant,bee,cat,dog", *given)
    status, out, err = moontide("adapt", "one.npy", "--engine", "local", "--out", "apart", *options)
    assert status == 0, err
    steps = TIDE().plan().steps
    assert f"iteration {steps} of {steps}" in err or f"of {steps}: 0 labels changed" in err
    status, expected, err = moontide("adapt", "one.npy", "--out", "whole.parquet", *options)
    assert status == 0, err
    assert out.splitlines()[1:] == expected.splitlines()[-len(out.splitlines()) + 1 :]
    apart, whole = pq.read_table("apart/one.parquet"), pq.read_table("whole.parquet")
    assert apart["label"].to_pylist() == whole["label"].to_pylist()
    for column in ("confidence", "unknown"):
        np.testing.assert_allclose(apart[column].to_numpy(), whole[column].to_numpy(), atol=1e-4)


def test_every_bad_shard_is_named_before_anything_runs(adapt: Any, shards: Path) -> None:
    whole = (shards / "a.npy").read_bytes()
    (shards / "a.npy").write_bytes(whole[:-5])
    np.save(shards / "d.npy", np.ones((3, 7)))
    pq.write_table(pa.table({"id": ["x"]}), shards / "e.parquet")
    (shards / "f.parquet").write_bytes((shards / "c.parquet").read_bytes()[:-50])
    status, out, err = adapt()
    assert (status, out) == (2, "")
    assert "4 of 6 shards cannot be used" in err
    assert "a.npy is truncated" in err
    assert "So are d.npy, e.parquet, f.parquet." in err
    assert len(err) <= 310
    assert "iteration" not in err
    assert not (shards.parent / "out").exists()


def test_bad_rows_are_named_or_skipped_and_counted(adapt: Any, shards: Path) -> None:
    rows = np.load(shards / "a.npy")
    rows[3], rows[5, 2], rows[7] = 0, np.nan, np.inf
    np.save(shards / "a.npy", rows)
    status, _, err = adapt()
    assert status == 2
    assert "1 of 3 shards cannot be used" in err
    assert "a.npy has NaN, infinity or only zeros in the rows 3, 5, 7 (--skip-bad-rows)" in err
    assert "iteration" not in err
    status, out, err = adapt("--skip-bad-rows")
    assert status == 0, err
    assert "3 rows cannot be used and are skipped" in err
    assert "of 37" in out
    assert pq.read_table(shards.parent / "out" / "a.parquet")["id"].to_pylist() == [0, 1, 2, 4, 6, 8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--batch-size", 4], "All shards are one task"),
        (["--labels", "labels.npy"], "do not work with shards"),
        (["--workers", 2], "no effect without '--engine ray'"),
        (["--engine", "ray", "--workers", 0], "must be 1 or more"),
        (["--method", "zlap"], "Only moon, stata, tide and zero_shot run on shards"),
    ],
)
def test_options_that_do_not_go_with_shards(adapt: Any, options: list[Any], sentence: str) -> None:
    status, _, err = adapt(*options)
    assert status == 2
    assert sentence in err


def test_what_shards_need(moontide: Any, shards: Path, features: Path) -> None:
    assert "add '--text'" in moontide("adapt", f"{shards}/*.npy")[2]
    assert "are for shards; add '--engine'" in moontide("adapt", features, "--graph", "global")[2]
    text = shards.parent / "text.npy"
    assert (
        "matches no .parquet" in moontide("adapt", f"{shards}/*.csv", "--text", text, "--out", shards.parent / "o")[2]
    )
