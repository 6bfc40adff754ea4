"""Make the pictures of photographs and pages in the documentation: python docs/make_pictures.py [before_after].

It needs the encoder tiny and Chromium. The pictures show actual results; nothing is chosen by hand.
"""

from __future__ import annotations

import importlib.util
import io
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from moontide.classify import Classified, classify
from moontide.encoders import encoder
from moontide.encoders.prompts import embed_classes
from moontide.encoders.sources import list_images
from moontide.store.classes import read_class_names

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "images"
PHOTOS = ROOT / "examples" / "clothing"
SEED, ACROSS, DOWN = 0, 6, 2  # seed for choosing the photographs, and their layout
SIDE, LINE, HEAD = 170, 26, 60  # pixels of a photograph, of a line below it, and of the heading
GOOD, BAD, INK, MUTED = "#1a7f37", "#c4261d", "#1b2430", "#5b6673"


def labelled() -> Classified:
    """Label the photographs that come with the project."""
    tiny = encoder("tiny")
    names = read_class_names(str(ROOT / "examples" / "clothing.txt"))
    found = classify(list_images([PHOTOS]), embed_classes(tiny, names), tiny)
    assert found.truth is not None
    return found


def before_after(found: Classified) -> Image.Image:
    """Show photographs whose label TIDE changed, drawn at random, with both labels."""
    truth, now, before = found.truth, np.asarray(found.result.labels), np.asarray(found.result.zero_shot_labels)
    assert truth is not None
    changed = np.flatnonzero(now != before)
    shown = np.sort(np.random.default_rng(SEED).choice(changed, ACROSS * DOWN, replace=False))
    names, height = found.task.class_names or (), SIDE + 2 * LINE + 14
    sheet = Image.new("RGB", (ACROSS * (SIDE + 10) + 10, HEAD + DOWN * height + 58), "white")
    pen, large, font, small = (ImageDraw.Draw(sheet), *(ImageFont.load_default(size) for size in (30, 19, 16)))
    x = 12
    for words, labels, colour in (("Zero-shot", before, INK), ("TIDE", now, GOOD)):
        if x > 12:
            pen.line([(x, HEAD / 2), (x + 36, HEAD / 2)], MUTED, 3)
            pen.line([(x + 26, HEAD / 2 - 8), (x + 36, HEAD / 2), (x + 26, HEAD / 2 + 8)], MUTED, 3)
            x += 54
        text = f"{words}: {100 * (labels == truth).mean():.1f} % right"
        pen.text((x, HEAD / 2), text, colour, large, anchor="lm")
        x += int(pen.textlength(text, large)) + 18
    for place, i in enumerate(shown):
        x, y = 10 + (place % ACROSS) * (SIDE + 10), HEAD + (place // ACROSS) * height
        sheet.paste(found.images[i].read().resize((SIDE, SIDE)), (x, y))
        for row, (what, k) in enumerate((("zero-shot", before[i]), ("TIDE", now[i]))):
            top, colour = y + SIDE + 5 + row * LINE, GOOD if k == truth[i] else BAD
            mark(pen, x, top, colour)
            pen.text((x + 20, top), names[k], colour, font)
            pen.text((x + SIDE, top + 3), what, MUTED, small, anchor="ra")
    gained, lost = (int(((a == truth) & (b != truth)).sum()) for a, b in ((now, before), (before, now)))
    words = (
        f"All {len(truth)} example photographs, with the encoder tiny, which is much weaker than CLIP. TIDE changed "
        f"{len(changed)} labels: {gained} became right, {lost} became wrong.\n"
        f"The {len(shown)} shown were drawn at random from those {len(changed)}."
    )
    pen.multiline_text((12, HEAD + DOWN * height + 6), words, MUTED, small, spacing=5)
    return sheet


def mark(pen: ImageDraw.ImageDraw, x: int, y: int, colour: str) -> None:
    """Draw a tick, or a cross for a wrong label."""
    if colour == GOOD:
        pen.line([(x + 1, y + 12), (x + 6, y + 17), (x + 15, y + 6)], colour, 3)
    else:
        pen.line([(x + 2, y + 6), (x + 13, y + 17)], colour, 3)
        pen.line([(x + 13, y + 6), (x + 2, y + 17)], colour, 3)


def save(picture: Image.Image, name: str, width: int | None = None) -> None:
    """Write a picture as JPEG, at most `width` wide."""
    if width is not None and picture.width > width:
        picture = picture.resize((width, round(picture.height * width / picture.width)))
    picture.convert("RGB").save(OUT / f"{name}.jpg", quality=80, optimize=True)
    print(f"wrote docs/images/{name}.jpg")


def chromium() -> Any:
    """Return a tab of the browser that the tests use."""
    spec = importlib.util.spec_from_file_location("chromium", ROOT / "tests" / "browser" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Page()


def shot(tab: Any, name: str, width: int | None = None) -> None:
    """Save what the window shows."""
    with tempfile.TemporaryDirectory() as folder:
        tab.screenshot(Path(folder) / "a.png")
        save(Image.open(io.BytesIO((Path(folder) / "a.png").read_bytes())), name, width)


def wait(tab: Any, expression: str) -> None:
    """Wait until an expression is true in the page."""
    for _ in range(600):
        if tab.run(expression):
            return
        time.sleep(0.1)
    raise TimeoutError(expression)


def report_pages(tab: Any, found: Classified, folder: Path) -> None:
    """Show the report: its top, a correction, and the map."""
    found.report(folder / "report.html")
    tab.resize(1100, 760)
    tab.open(folder / "report.html")
    shot(tab, "classify_report", 1000)
    tab.run("document.querySelector('#grid .tile').focus()")
    tab.run("document.querySelector('#grid .tile').scrollIntoView({block: 'start'})")
    for letter in "sh":
        tab.press(letter)
    shot(tab, "correcting", 1000)
    tab.press("Escape", 27)
    tab.run("document.querySelector('#map').scrollIntoView({block: 'center'})")
    time.sleep(1)
    shot(tab, "map", 1000)


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Serve streams in a thread, and yield the address."""
    from moontide.serve.databases import open_store
    from moontide.serve.server import Server, listen
    from moontide.serve.service import Service

    paths = [path for path in sorted(PHOTOS.rglob("*.jpg")) if path.parent.name in ("dress", "hat", "shoes")]
    service = Service(open_store(str(folder / "data"), "never"), encoder=encoder("tiny"), samples=paths)
    running, listening = Server(service), listen("127.0.0.1", 0)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    running.should_exit = True
    thread.join()


def server_pages(tab: Any, folder: Path) -> None:
    """Show the page of a stream with photographs, on a desktop and on a phone."""
    names = "\\n".join(read_class_names(str(ROOT / "examples" / "clothing.txt")))
    with server(folder) as address:
        tab.resize(1100, 760)
        tab("Page.navigate", url=address)
        wait(tab, "document.querySelector('#method')?.value === 'tide'")
        tab.run(
            f"$('by-classes').querySelector('input').click(); $('names').value = '{names}'; $('name').value = 'shop'"
        )
        tab.run("document.querySelector('#create button').click()")
        wait(tab, "!$('stream').hidden")
        tab.run("$('play').click()")
        wait(tab, "page.rows.size >= 56")
        tab.run("$('play').click()")
        wait(tab, "!page.feeding")
        time.sleep(1)
        shot(tab, "server", 1000)
        tab.resize(390, 780)
        time.sleep(0.5)
        shot(tab, "server_phone")
        tab("Page.navigate", url="about:blank")


def bench_page(tab: Any, folder: Path) -> None:
    """Show the report of a benchmark on simulated features."""
    from moontide.cli import main as moontide
    from moontide.simulate import simulate

    data = simulate(2000, 200, effective_classes=200, seed=0)
    np.savez(
        folder / "simulated.npz", image_features=data.features, text_features=data.text, labels=data.labels,
        logit_scale=data.logit_scale, classnames=data.class_names,
    )  # fmt: skip
    results = str(folder / "results")
    words = ["--methods", "zero_shot,stata,moon,tide", "--runs", "20", "--out", results]
    assert moontide(["bench", "run", "batch-64", "--data", str(folder / "simulated.npz"), *words]) == 0
    assert moontide(["bench", "report", results]) == 0
    tab.resize(1100, 700)
    tab.open(folder / "results" / "report" / "report.html")
    shot(tab, "bench_report", 1000)


def main() -> None:
    """Make all pictures, or only the one of photographs before and after."""
    found = labelled()
    save(before_after(found), "before_after")
    if sys.argv[1:] == ["before_after"]:
        return
    tab = chromium()
    try:
        with tempfile.TemporaryDirectory() as folder:
            report_pages(tab, found, Path(folder))
            server_pages(tab, Path(folder))
            bench_page(tab, Path(folder))
    finally:
        tab.close()


if __name__ == "__main__":
    main()
