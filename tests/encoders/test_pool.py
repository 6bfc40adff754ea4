"""Processes that decode: what one image does to them costs that image, and nothing of the run is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from moontide.encoders import pool as pools
from moontide.encoders.places import HeldImage, ImageFile
from moontide.encoders.pool import Decoders
from moontide.encoders.steps import BICUBIC, Steps

from .conftest import picture

STEPS = Steps(32, (32, 32), BICUBIC, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are looked up in /proc")


@pytest.fixture
def photos(tmp_path: Path) -> list[ImageFile]:
    for i in range(24):
        picture(i, (60 + i, 40)).save(tmp_path / f"{i:02d}.png")
    return [ImageFile(f"{i:02d}", tmp_path / f"{i:02d}.png") for i in range(24)]


def decoders() -> list[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return [c for c in children if b"encoders.decoder" in Path(f"/proc/{c}/cmdline").read_bytes()]


def taken(pool: Decoders, images: list[ImageFile], after_first: Callable[[], None] = lambda: None) -> dict[str, object]:
    """Return what became of images: an array, or the reason of a skip."""
    found: dict[str, object] = {}
    for one in pool.decode(images):
        found[one.image.id] = one.data if one.kind == "skip" else (one.kind, np.array(one.data))
        pool.release(1)
        if len(found) == 1:
            after_first()
    return found


def test_pixels_are_those_of_this_process_in_their_order(photos: list[ImageFile]) -> None:
    with Decoders(STEPS, workers=2, batch=2) as pool:
        found = taken(pool, photos)
    assert list(found) == [image.id for image in photos]
    for image in photos:
        kind, pixels = found[image.id]  # type: ignore[misc]
        assert kind == "pixels"
        np.testing.assert_array_equal(pixels, STEPS.pixels(image.read()))
    assert decoders() == []


def test_slots_that_are_released_after_the_last_image_write_to_no_file_of_others(photos: list[ImageFile]) -> None:
    with Decoders(STEPS, workers=1, batch=2) as pool:
        count = len([pool.release(1) for _ in pool.decode(photos)])
        pipes = [os.pipe() for _ in range(8)]  # they get the numbers that the pool has given back
        pool.release(count)
    for read, write in pipes:
        os.close(write)
        assert os.read(read, 1) == b""
        os.close(read)


def test_images_that_are_resized_elsewhere_come_as_they_are_unless_they_are_large(tmp_path: Path) -> None:
    picture(0, (500, 375)).save(tmp_path / "a.png")
    picture(1, (900, 700)).save(tmp_path / "b.png")
    images = [ImageFile(name, tmp_path / f"{name}.png") for name in "ab"]
    with Decoders(STEPS, workers=1, batch=2, resize=False) as pool:
        found = taken(pool, images)
    assert [(kind, array.shape) for kind, array in found.values()] == [  # type: ignore[misc]
        ("image", (375, 500, 3)), ("pixels", (32, 32, 3)),
    ]  # fmt: skip


def test_an_image_that_is_larger_than_its_slot_comes_whole_where_nothing_resizes_it(tmp_path: Path) -> None:
    large = picture(1, (1200, 900))
    with Decoders(None, workers=1, batch=1) as pool:
        found = taken(pool, [HeldImage("0", Path("0"), image=large)])
        assert not list(pool.spill.iterdir())
    np.testing.assert_array_equal(found["0"][1], np.asarray(large))  # type: ignore[index]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_dies_costs_the_image_it_had_in_hand(photos: list[ImageFile], how: int) -> None:
    with Decoders(STEPS, workers=1, batch=1) as pool:
        found = taken(pool, photos, lambda: os.kill(decoders()[0], how))
    lost = [name for name, one in found.items() if isinstance(one, str)]
    assert list(found) == [image.id for image in photos]
    assert len(lost) <= 1
    assert all(found[name] == f"the decoder crashed on it (signal {how})" for name in lost)


def test_a_process_that_hangs_costs_the_image_it_had_in_hand(
    photos: list[ImageFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "PATIENCE", 3.0)
    start = time.monotonic()
    with Decoders(STEPS, workers=1, batch=1) as pool:
        found = taken(pool, photos, lambda: os.kill(decoders()[0], signal.SIGSTOP))
    lost = [name for name, one in found.items() if isinstance(one, str)]
    assert [found[name] for name in lost] == ["decoding it took more than 3 s"]
    assert len(found) == len(photos)
    assert time.monotonic() - start < 40


def test_no_more_is_decoded_than_there_are_slots(photos: list[ImageFile]) -> None:
    asked: list[str] = []

    def tell() -> object:
        for image in photos * 3:
            asked.append(image.id)
            yield image

    with Decoders(STEPS, workers=1, batch=1) as pool:
        running = pool.decode(tell())  # type: ignore[arg-type]
        next(running)
        time.sleep(0.5)
        assert len(asked) <= pool.terms.slots
        running.close()  # type: ignore[attr-defined]
    assert decoders() == []
    assert not [thread for thread in threading.enumerate() if thread.name == "decode"]


def test_processes_that_cannot_start_are_a_sentence(photos: list[ImageFile], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools.sys, "path", [])
    monkeypatch.setattr(pools.sys, "executable", "/bin/false")
    with (
        Decoders(STEPS, workers=1, batch=1) as pool,
        pytest.raises(pools.ResourceError, match="cannot start: status 1"),
    ):
        taken(pool, photos)


def test_a_large_jpeg_is_decoded_at_a_part_of_its_size_and_looks_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    smooth = np.asarray(picture(3, (2800, 2720)), dtype=np.float32)
    Image.fromarray((smooth + rng.normal(0, 12, smooth.shape)).clip(0, 255).astype(np.uint8)).save(
        tmp_path / "large.jpg", quality=92
    )
    image = ImageFile("large", tmp_path / "large.jpg")
    steps = Steps(224, (224, 224), BICUBIC, (0.5,) * 3, (0.5,) * 3)
    with Decoders(steps, workers=1, batch=1) as pool:
        ((_, pixels),) = taken(pool, [image]).values()  # type: ignore[misc]
    assert steps.least(2800, 2720) == 1
    assert np.abs(pixels.astype(float) - steps.pixels(image.read())).mean() < 0.6  # of 255


def test_plain_jpeg_files_are_handed_on_where_a_device_decodes_them(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(0, (90, 60)).save(tmp_path / "plain.jpg")
    picture(0, (90, 60)).convert("L").save(tmp_path / "grey.jpg")
    picture(0, (90, 60)).save(tmp_path / "turned.jpg", exif=exif)
    picture(0, (90, 60)).convert("CMYK").save(tmp_path / "cmyk.jpg")
    picture(0, (90, 60)).save(tmp_path / "other.png")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "plain.jpg").read_bytes()[:-300])
    images = [ImageFile(path.stem, path) for path in sorted(tmp_path.iterdir())]
    with Decoders(STEPS, workers=1, batch=8, resize=False, jpeg=1.0) as pool:
        found = taken(pool, images)
    kinds = {name: "skip" if isinstance(one, str) else one[0] for name, one in found.items()}  # type: ignore[index]
    assert kinds == {
        "plain": "jpeg", "grey": "jpeg", "turned": "image", "cmyk": "image", "other": "image", "cut": "skip",
    }  # fmt: skip
    assert found["plain"][1].tobytes() == (tmp_path / "plain.jpg").read_bytes()  # type: ignore[index]
    with Decoders(STEPS, workers=1, batch=64, resize=False, jpeg=0.25) as pool:
        some = taken(pool, [ImageFile(f"{i}", tmp_path / "plain.jpg") for i in range(60)])
    share = np.mean([one[0] == "jpeg" for one in some.values()])  # type: ignore[index]
    assert 0.1 < share < 0.4
