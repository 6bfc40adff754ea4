"""Images from tables, datasets, videos and addresses."""

from __future__ import annotations

import http.server
import io
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from moontide.encoders import web
from moontide.encoders.base import Encoder
from moontide.encoders.pipeline import encode_files
from moontide.encoders.sources import list_images
from moontide.errors import FileError, ImageError, OptionError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


class Grey(Encoder):
    """The brightness of an image, as an angle."""

    id, dim, logit_scale, preprocessing = "grey", 2, 10.0, "mean"

    def prepare(self, image: Image.Image) -> dict[str, np.ndarray]:
        return {"mean": np.asarray(image, dtype=np.float32).mean()}

    def _images(self, batch: object) -> np.ndarray:
        angles = np.asarray([one["mean"] for one in batch]) / 255  # type: ignore[attr-defined]
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)

    def _text(self, prompts: object) -> np.ndarray:
        raise NotImplementedError


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (12, 9), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


def brightness(found: object) -> list[int]:
    rows = np.concatenate([one.features for one in found])  # type: ignore[attr-defined]
    return np.rint(255 * np.arctan2(rows[:, 1], rows[:, 0])).astype(int).tolist()


@pytest.fixture
def table() -> object:
    images = [{"bytes": png(i), "path": f"/etc/{i}.png"} for i in range(150)]
    images[7]["bytes"] = None  # a path alone is never followed
    return pa.table({"image": images, "label": list(range(150))})


@pytest.mark.parametrize("kind", ["parquet", "arrow", "dataset", "binary"])
def test_a_column_of_images_is_read_in_its_order(kind: str, table: object, tmp_path: Path) -> None:
    path = tmp_path / ("a.arrow" if kind == "arrow" else "a.parquet")
    if kind in ("arrow", "dataset"):
        if kind == "dataset":  # what `datasets` writes with save_to_disk
            (tmp_path / "saved").mkdir()
            (tmp_path / "saved" / "state.json").write_text("{}")
            path = tmp_path / "saved" / "data-00000-of-00001.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:  # type: ignore
            writer.write_table(table, max_chunksize=40)
    elif kind == "binary":
        values = [one["bytes"] for one in table.column("image").to_pylist()]  # type: ignore[attr-defined]
        parquet.write_table(pa.table({"picture": values, "id": list(range(150))}), path, row_group_size=64)
    else:
        parquet.write_table(table, path, row_group_size=64)
    images = list_images([path.parent if kind == "dataset" else path]).images
    assert [image.id for image in images] == [f"{path}/{i}" for i in range(150)]
    found = list(encode_files(Grey(), images, batch_size=16, workers=2))
    assert brightness(found) == [i for i in range(150) if i != 7]
    assert [skip.reason for one in found for skip in one.skipped] == ["its row contains no image"]
    assert np.asarray(images[120].read())[0, 0, 0] == 120  # in any order, too
    assert np.asarray(images[3].read())[0, 0, 0] == 3


def test_a_table_of_paths_is_a_list_still(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    parquet.write_table(pa.table({"path": ["a.png"]}), tmp_path / "list.parquet")
    assert [image.path.name for image in list_images([tmp_path / "list.parquet"]).images] == ["a.png"]
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(FileError, match=r"broken\.parquet cannot be read as \.parquet"):
        list_images([tmp_path / "broken.parquet"])


def test_a_video_gives_frames_by_their_time(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(50):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 5 * i, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    images = list_images([path], frame_step=0.5).images
    assert [image.id for image in images] == [f"{path}#t={0.5 * i:.3f}" for i in range(10)]
    found = brightness(encode_files(Grey(), images, batch_size=4, workers=2))
    np.testing.assert_allclose(found, [25 * i for i in range(10)], atol=6)  # the codec's
    assert abs(np.asarray(images[2].read()).mean() - 50) < 6  # backwards, too
    with pytest.raises(OptionError, match="'--frame-step' must be more than 0"):
        list_images([path], frame_step=0)
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    with pytest.raises(FileError, match="cannot be read as a video"):
        list_images([tmp_path / "broken.mp4"])


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with an image, another address, too much, or nothing in time."""

    def do_GET(self) -> None:
        self.close_connection = True
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/9.png")
            self.end_headers()
        elif self.path == "/loop":
            self.send_response(302)
            self.send_header("Location", "/loop")
            self.end_headers()
        elif self.path == "/large":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bytes(3000))
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x")
            self.wfile.flush()
            threading.Event().wait(2)
        elif self.path.endswith(".png"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(png(int(self.path[1:-4])))
        else:
            self.send_error(404)

    def log_message(self, *given: object) -> None:
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(web, "public_address", lambda host, port: host)  # loopback stands for the world here
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_addresses_of_a_list_are_taken_only_where_they_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    (tmp_path / "list.txt").write_text("http://example.org/1.png\na.png\n")
    images, skipped = list_images([tmp_path / "list.txt"])
    assert [image.path.name for image in images] == ["a.png"]
    assert skipped[0].reason == "it is an address; add --allow-urls to download it"
    images, skipped = list_images([tmp_path / "list.txt"], allow_urls=True)
    assert [image.id for image in images] == ["http://example.org/1.png", f"{tmp_path}/a.png"]
    assert not skipped


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/a", "http://localhost/a", "http://10.1.2.3/a", "http://169.254.169.254/latest", "http://[::1]/a",
     "http://[::ffff:127.0.0.1]/a", "http://0.0.0.0/a", "http://192.168.0.1:8080/a", "http://[fd00::1]/a"],
)  # fmt: skip
def test_private_addresses_are_refused(url: str) -> None:
    with pytest.raises(ImageError, match="is not public"):
        web.fetch(url)


@pytest.mark.parametrize("url", ["ftp://example.org/a", "http://user:word@example.org/a", "file:///etc/passwd"])
def test_other_kinds_of_addresses_are_refused(url: str) -> None:
    with pytest.raises(ImageError, match="not a plain http or https address"):
        web.fetch(url)


def test_downloads_have_limits(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert web.fetch(f"{site}/7.png") == png(7)
    assert web.fetch(f"{site}/moved") == png(9)
    with pytest.raises(ImageError, match="status 404"):
        web.fetch(f"{site}/nothing")
    with pytest.raises(ImageError, match="more than 5 redirections"):
        web.fetch(f"{site}/loop")
    monkeypatch.setattr(web, "MAX_BYTES", 2000)
    with pytest.raises(ImageError, match="allowed for a download"):
        web.fetch(f"{site}/large")
    monkeypatch.setattr(web, "SECONDS", 0.5)
    with pytest.raises(ImageError, match="it took more than"):
        web.fetch(f"{site}/slow")


def test_a_redirection_to_a_private_address_is_refused(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def once(host: str, port: int) -> str:
        seen.append(host)
        if len(seen) > 1:
            raise ImageError(f"its address {host} is not public")
        return host

    monkeypatch.setattr(web, "public_address", once)
    with pytest.raises(ImageError, match="is not public"):
        web.fetch(f"{site}/moved")
