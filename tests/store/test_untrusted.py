"""Files from strangers: a store that points elsewhere, Parquet that expands, cells that compute, hosts that fail."""

import csv
import io
import json
import threading
import time
import unicodedata
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import moontide
from moontide.classify import Classified
from moontide.encoders import tables
from moontide.encoders.sources import ImageFile, list_images
from moontide.engine.run import ShardTask, adapt_shards
from moontide.errors import FileError, ImageError, MissingExtraError, MoontideError, OptionError, ResourceError
from moontide.report.grids import Grid, Line, Number
from moontide.report.render import csv_text, latex, latex_text
from moontide.store import remote
from moontide.store.features import MANIFEST, FeatureStore, Origin
from moontide.store.files import read_task
from moontide.store.inputs import read_known
from moontide.store.predictions import write_predictions
from moontide.store.tables import as_cell, from_cell

FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "'=1", "''@x"]
FORMULAS += [" =1", "\u00a0+1", "\u200b=1", "\uff1d1+1", "\uff0b1", "\uff0d1", " \uff20SUM(A1)", "\ufe661"]


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..", "a/00000.safetensors", "00000.safetensors\0", ""]
)
def test_a_manifest_names_only_files_of_its_store(tmp_path, name):
    store = FeatureStore.create(tmp_path, Origin("a-model", "none", ("{}",)), ["cat", "dog"], np.eye(2))
    store.append(["a.jpg"], np.eye(2)[:1])
    held = json.loads((tmp_path / MANIFEST).read_text())
    held["files"][name] = "0" * 64
    (tmp_path / MANIFEST).write_text(json.dumps(held))
    with pytest.raises(FileError, match="not a file of the store; ignored"):
        FeatureStore.open(tmp_path)


@pytest.mark.parametrize("size", [2**63, 2**40, 10**6])
def test_a_shard_whose_header_claims_more_than_the_file_is_damaged(tmp_path, size):
    store = FeatureStore.create(tmp_path, Origin("a-model", "none", ("{}",)), ["cat", "dog"], np.eye(2))
    (tmp_path / "text.safetensors").write_bytes(size.to_bytes(8, "little") + b"{}")
    with pytest.raises(FileError, match="longer than the file"):
        FeatureStore.open(store.folder).text  # noqa: B018


def bomb(path, column):
    """Write half a gigabyte of one column in a few kilobytes."""
    rows = 2**17
    if column == "id":
        ids = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array(["x" * 4096])).cast(pa.string())
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(2 * rows, np.float32)), 2)
        table = pa.table({"id": ids, "embedding": vectors, "path": ids})
    elif column == "embedding":
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(1024 * rows, np.float32)), 1024)
        table = pa.table({"embedding": vectors})
    else:  # binary values
        values = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array([b"x" * 4096])).cast(pa.binary())
        table = pa.table({"embedding": values})
    pq.write_table(table, path, compression="zstd")
    return path


@pytest.mark.parametrize("column", ["id", "embedding", "binary"])
def test_a_column_far_larger_than_its_file_is_not_read(tmp_path, column):
    path = bomb(tmp_path / "f.parquet", column)
    assert path.stat().st_size < 500_000
    np.save(tmp_path / "text.npy", np.eye(2))
    with pytest.raises(ResourceError, match=r"would take 512\.0 MiB from a file of"):
        read_task(path, tmp_path / "text.npy")


def test_a_list_of_images_far_larger_than_its_file_is_not_read(tmp_path):
    with pytest.raises(ResourceError, match=r"'path' of .* would take 512\.0 MiB"):
        list_images([bomb(tmp_path / "f.parquet", "id")])


def test_images_far_larger_than_their_file_are_read_one_by_one_or_not_at_all(tmp_path, monkeypatch):
    """Forty images of 32 MiB each, the same, in a few kilobytes: by sixty-four they would take over a gigabyte."""
    same = pa.DictionaryArray.from_arrays(np.zeros(40, np.int32), pa.array([b"x" * 2**25])).cast(pa.binary())
    pq.write_table(pa.table({"image": same}), path := tmp_path / "f.parquet", compression="zstd", row_group_size=4)
    assert path.stat().st_size < 100_000
    held = [batch.num_rows for batch in tables._Table(path)._batches("image", 0)]
    assert sum(held) == 40
    assert max(held) * 2**25 <= tables.BATCH_BYTES
    monkeypatch.setattr(tables, "BATCH_BYTES", 2**20)
    with pytest.raises(ImageError, match="its group of rows would take"):
        tables.read_row(path, "image", 3)


def test_shards_far_larger_than_their_files_are_not_read(tmp_path):
    bomb(tmp_path / "f.parquet", "embedding")
    with pytest.raises(MoontideError, match=r"would take 512\.0 MiB"):
        adapt_shards(ShardTask(f"{tmp_path}/*.parquet", np.eye(1024)), moontide.method("zero_shot"), f"{tmp_path}/out")


def test_no_table_has_a_cell_that_a_spreadsheet_computes(tmp_path):
    rng = np.random.default_rng(0)
    k = len(FORMULAS)
    task = moontide.Task(rng.normal(size=(k, 8)), rng.normal(size=(k, 8)), class_names=FORMULAS)
    result = moontide.method("zero_shot").fit_predict(task)
    write_predictions(tmp_path / "p.csv", result, FORMULAS, FORMULAS, {"group": FORMULAS})
    images = [ImageFile(name, tmp_path / "a.jpg") for name in FORMULAS]
    Classified(images, task, result, [], None, "a-model", "zero_shot").save(tmp_path / "labels.csv")
    line = Line("=title", [Number(1.0)])
    (tmp_path / "grid.csv").write_text(csv_text(Grid("t", "c", ["@heading"], [("-name", [line])])), newline="")
    for file in ("p.csv", "labels.csv", "grid.csv"):
        with open(tmp_path / file, encoding="utf-8", newline="") as handle:
            rows = list(csv.reader(handle))
        cells = [cell for row in rows for cell in row]
        assert sum(cell[:1] in "'" and cell != "" for cell in cells) >= 3
        assert not [cell for cell in cells if cell[:1] in ("\t", "\r")]
        assert not [cell for cell in cells if unicodedata.normalize("NFKC", cell).strip(" \u200b")[:1] in tuple("=+-@")]
    known = "id,label\n" + "".join(f'"{as_cell(name)}","{as_cell(name)}"\n' for name in FORMULAS if "\r" not in name)
    (tmp_path / "known.csv").write_text(known)
    found = read_known(tmp_path / "known.csv", FORMULAS, FORMULAS, k)
    assert found.tolist() == [i if "\r" not in name else -1 for i, name in enumerate(FORMULAS)]


@pytest.mark.parametrize("text", [*FORMULAS, "cat", "'tis", "", "1", "a=b", "'", "''"])
def test_a_cell_is_read_back_as_it_was(text):
    assert from_cell(as_cell(text)) == text


def test_names_do_not_compute_in_latex_either():
    nasty = r"\input{/etc/passwd} a_b^2 50% & #1 ~ $x$ {y} <z> |"
    line = Line(nasty, [Number(1.0)])
    table = latex(Grid("t", nasty, [nasty], [(nasty, [line])]))
    assert table.count(latex_text(nasty)) == 4
    plain = latex_text(nasty)
    for name in (r"\textbackslash{}", r"\textasciicircum{}", r"\textasciitilde{}", r"\textless{}", r"\textgreater{}"):
        assert name in plain
        plain = plain.replace(name, "")
    plain = plain.replace(r"\textbar{}", "")
    for mark in "%&#_${}":
        plain = plain.replace("\\" + mark, "")
    assert not set(plain) & set("\\^~%&#_${}<>|")
    assert latex_text("a\n\nb") == "a b"  # an empty line ends a caption


def test_sixty_thousand_class_names_are_read_at_once():
    names = [f"class {i // 2}" for i in range(60_000)]
    start = time.perf_counter()
    with pytest.warns(UserWarning, match="class names appear more than once: class 0, class 1, .* and 29995 more"):
        moontide.Task(np.ones((2, 3)), np.ones((60_000, 3)), class_names=names)
    assert time.perf_counter() - start < 5


# hosts


@pytest.fixture
def host(monkeypatch):
    """A web server whose answers are a table: path to (statuses of the first requests, the body that then comes)."""
    monkeypatch.setattr(remote, "WAITS", (0.01, 0.02, 0.04))
    asked, files = Counter(), {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.reply()
            if body is not None:
                self.wfile.write(body)

        def do_HEAD(self):
            self.reply()

        def reply(self):
            statuses, body = files.get(self.path, ([404] * 99, b""))
            asked[self.path] += 1
            status = statuses[asked[self.path] - 1] if asked[self.path] <= len(statuses) else 200
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) if status == 200 else 0))
            self.end_headers()
            return body if status == 200 else None

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", files, asked
    server.shutdown()
    server.server_close()


def npy(x):
    np.save(buffer := io.BytesIO(), x)
    return buffer.getvalue()


def adapt(shards, out, allow_remote):
    task = ShardTask(shards, np.eye(3), allow_remote=[allow_remote])
    return adapt_shards(task, moontide.method("zero_shot"), str(out))


def test_a_host_that_fails_for_a_while_is_asked_again(host, tmp_path):
    url, files, asked = host
    files["/a.npy"] = [503, 503], npy(np.eye(3))
    found = adapt([f"{url}/a.npy"], tmp_path / "out", "http")
    assert found.counts.tolist() == [1, 1, 1]
    assert asked["/a.npy"] > 2


def test_a_host_that_fails_for_ever_is_named_in_a_sentence(host, tmp_path):
    url, files, asked = host
    files["/a.npy"] = [503] * 99, b""
    with pytest.raises(FileError, match=r"http://127.0.0.1:\d+/a.npy cannot be reached .503.* check its name"):
        adapt_shards(
            ShardTask([f"{url}/a.npy"], np.eye(3), allow_remote=["http"]), moontide.method("zero_shot"), f"{tmp_path}/o"
        )
    assert 4 <= asked["/a.npy"] <= 12


def test_a_file_that_is_not_there_is_not_asked_for_again(host, tmp_path):
    url, _, asked = host
    with pytest.raises(FileError, match="There is no file"):
        adapt_shards(
            ShardTask([f"{url}/no.npy"], np.eye(3), allow_remote=["http"]),
            moontide.method("zero_shot"),
            f"{tmp_path}/o",
        )
    assert asked["/no.npy"] <= 2


def test_no_request_is_made_by_a_protocol_that_was_not_named(host, tmp_path):
    url, files, asked = host
    files["/a.npy"] = [], npy(np.eye(3))
    for shards in ([f"{url}/a.npy"], f"{url}/a.npy", f"simplecache::{url}/a.npy"):
        with pytest.raises(OptionError, match="--allow-remote"):
            adapt_shards(
                ShardTask(shards, np.eye(3), allow_remote=["https"]), moontide.method("zero_shot"), f"{tmp_path}/o"
            )
    assert not asked


@pytest.mark.parametrize(
    ("path", "package"), [("s3://b/a.npy", "s3fs"), ("gs://b/a.npy", "gcsfs"), ("az://b/a", "adlfs")]
)
def test_the_package_of_an_object_storage_is_named(path, package, monkeypatch):
    pytest.importorskip("fsspec")
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingExtraError, match=f"needs the package '{package}'.*pip install {package}"):
        remote.check_remote(path)


def test_every_request_has_a_time_limit():
    pytest.importorskip("aiohttp")
    limits = {url: remote._limits(url) for url in ("s3://b/a", "gs://b/a", "az://b/a", "https://b/a", "ftp://b/a")}
    assert all(limits.values())
    assert limits["s3://b/a"]["config_kwargs"]["read_timeout"] == remote.READ
    assert limits["https://b/a"]["client_kwargs"]["timeout"].sock_read == remote.READ
    assert remote._limits("a.npy") == {}


def test_a_host_that_never_answers_is_given_up(host, monkeypatch, tmp_path):
    import socket

    monkeypatch.setattr(remote, "READ", 0.2)
    monkeypatch.setattr(remote, "CONNECT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.npy"
        start = time.perf_counter()
        with pytest.raises(FileError, match="cannot be reached"):
            adapt_shards(
                ShardTask([url], np.eye(3), allow_remote=["http"]), moontide.method("zero_shot"), f"{tmp_path}/o"
            )
        assert time.perf_counter() - start < 10
