"""The page in a real browser: it shows, filters, pages, explains and stays quiet, whatever the names in it are."""

import io

import numpy as np
import pytest

import moontide
from moontide.report.gallery import pack, page, write_gallery
from moontide.simulate import simulate
from moontide.types import Task

NASTY = "<img src=x onerror=window.hacked=1>"
N = 150


@pytest.fixture(scope="module")
def case():
    data = simulate(N, 30, dim=64, effective_classes=5, seed=3)
    names = [NASTY, "</script><script>window.hacked=2</script>", *(f"class {k}" for k in range(2, 30))]
    task = Task(data.features, data.text, data.logit_scale, names)
    result = moontide.MOON().fit_predict(task)
    assert result.changed.any()
    return task, result, data.labels


@pytest.fixture
def shown(browser, case, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    pillow.new("RGB", (16, 12), "teal").save(buffer, "JPEG")
    task, result, labels = case
    paths = [f"photos/<b onclick=window.hacked=3>/{i:03d}\"'&.jpg" for i in range(N)]
    about = {"encoder": NASTY}
    skipped = [(NASTY, "<script>window.hacked=4</script>")]
    write_gallery(
        tmp_path / "a.html",
        task,
        result,
        paths,
        lambda i, side: buffer.getvalue(),
        truth=labels,
        skipped=skipped,
        about=about,
    )
    browser.resize(1280, 900)
    browser.open(tmp_path / "a.html")
    yield browser
    assert browser.complaints() == []
    assert browser.requests() == [(tmp_path / "a.html").as_uri()]
    assert browser.run("window.hacked") is None


def tiles(tab):
    return tab.run("document.querySelectorAll('#grid .tile').length")


def choose(tab, select, value):
    tab.run(f"$('{select}').value = '{value}'; $('{select}').dispatchEvent(new Event('change'))")


def test_shows_a_page_of_pictures(shown):
    assert shown.run("document.title").startswith(f"{N} images, 30 classes")
    assert tiles(shown) == 60
    assert shown.run("[...document.querySelectorAll('#grid img')].every((i) => i.complete && i.naturalWidth === 16)")
    assert shown.run("document.documentElement.scrollWidth <= innerWidth")


def test_turns_pages(shown):
    first = shown.run("document.querySelector('#grid .file').textContent")
    shown.run("$('next').click()")
    assert shown.run("document.querySelector('#grid .file').textContent") != first
    shown.run("$('last').click()")
    assert (tiles(shown), shown.run("$('page').value"), shown.run("$('next').disabled")) == (30, "3", True)
    shown.run("$('page').value = 99; $('page').dispatchEvent(new Event('change'))")
    assert shown.run("$('page').value") == "3"


def test_filters_by_changed_by_class_and_by_words(shown, case):
    _, result, labels = case
    changed = int(result.changed.sum())
    choose(shown, "kind", "changed")
    assert shown.run("state.found.length") == changed
    assert f"{changed} image" in shown.run("$('status').textContent")
    assert shown.run("[...document.querySelectorAll('#grid .tile')].every((t) => t.querySelector('.was'))")
    shown.run("$('clear').click()")
    assert shown.run("state.found.length") == N
    largest = int(np.bincount(result.labels).argmax())
    choose(shown, "label", largest)
    assert shown.run("state.found.length") == int((result.labels == largest).sum())
    choose(shown, "kind", "wrong")
    assert shown.run("state.found.length") == int(((result.labels == largest) & (labels != largest)).sum())
    shown.run("$('clear').click(); $('search').value = '007'; $('search').dispatchEvent(new Event('input'))")
    assert shown.run("[...state.found]") == [7]
    shown.run("$('search').value = 'no such thing'; $('search').dispatchEvent(new Event('input'))")
    assert shown.run("$('grid').textContent") == "No image matches these filters."


def test_says_why_an_image_changed(shown, case):
    task, result, _ = case
    i = int(np.flatnonzero(result.changed)[0])
    shown.run(f"open({i})")
    names = task.class_names
    why = shown.run("$('why').innerText")
    assert f"Zero-shot predicts “{names[result.zero_shot_labels[i]]}”" in why
    assert f"the prediction is “{names[result.labels[i]]}”" in why
    near = result.details["graph"].neighbours[i]
    agree = int((result.labels[near] == result.labels[i]).sum())
    assert f"{agree} of its 3 nearest images" in why
    assert shown.run("[...document.querySelectorAll('#near .name')].map((n) => n.textContent)") == [
        names[k] for k in result.labels[near]
    ]


def test_works_with_the_keyboard_alone(shown):
    shown.press("/")
    assert shown.run("document.activeElement.id") == "search"
    shown.run("document.querySelector('#grid .tile').focus()")
    shown.press("Enter", 13)
    assert shown.run("$('one').open")
    before = shown.run("$('one-name').textContent")
    shown.press("ArrowRight", 39)
    assert shown.run("$('one-name').textContent") != before
    shown.press("Escape", 27)
    assert not shown.run("$('one').open")
    assert shown.run("document.activeElement.className") == "tile"


def test_class_shares_moves_and_the_confusion_matrix_lead_to_the_images(shown, case):
    _, result, labels = case
    cell = "document.querySelector('#matrix td.right button')"
    count = int(shown.run(f"{cell}.textContent"))
    shown.run(f"{cell}.click()")
    assert shown.run("state.found.length") == count
    shown.run("document.querySelector('#moves button').click()")
    assert shown.run("state.found.every((i) => label[i] !== before[i])")
    total = "[...document.querySelectorAll('#matrix button')].reduce((sum, b) => sum + Number(b.textContent), 0)"
    assert shown.run(total) == N
    shown.run("$('show-before').click()")
    right = "[...document.querySelectorAll('#matrix td.right')].reduce((sum, b) => sum + Number(b.textContent), 0)"
    assert shown.run(right) == int((result.zero_shot_labels == labels).sum())


def test_map_opens_the_image_that_is_pressed(shown):
    shown.run("$('map').scrollIntoView()")
    x, y = shown.run(
        "(() => { const box = canvas.getBoundingClientRect(), f = frame();"
        " return [box.left + f.left + D.x[5] * f.scale, box.top + f.top + D.y[5] * f.scale] })()"
    )
    shown.click(x, y)
    assert shown.run("$('one').open")
    opened = shown.run("current")
    assert shown.run(f"Math.hypot(D.x[5] - D.x[{opened}], D.y[5] - D.y[{opened}]) * frame().scale < 14")
    shown.run("$('one').close(); $('closer').click()")
    assert shown.run("view.zoom") == 1.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_a_phone_in_both_colour_schemes(shown, scheme):
    shown.resize(390, 844, scheme)
    assert shown.run("document.documentElement.scrollWidth") == 390
    paper, ink = shown.run(
        "['backgroundColor', 'color'].map((k) => getComputedStyle(document.body)[k].match(/\\d+/g).map(Number))"
    )
    assert (sum(ink) > sum(paper)) == (scheme == "dark")
    assert abs(sum(ink) - sum(paper)) > 500


def test_names_stay_names(shown):
    choose(shown, "label", 0)
    options = shown.run(
        "[...document.querySelectorAll('#before option, #label option')].map((o) => o.textContent).join(' ')"
    )
    assert NASTY in options or "</script>" in options
    assert NASTY in shown.run("$('about').textContent")
    assert NASTY in shown.run("$('skips').textContent")
    assert shown.run("document.querySelectorAll('main b[onclick], main script').length") == 0


def test_fifty_thousand_images(browser, tmp_path):
    n, k = 50_000, 1000
    rng = np.random.default_rng(0)
    label, before = rng.integers(k, size=n), rng.integers(k, size=n)
    before[: 9 * n // 10] = label[: 9 * n // 10]
    top = (label[:, None] + np.arange(5)) % k
    data = {
        "n": n, "k": k, "classes": [f"class {i}" for i in range(k)], "choices": k, "confidence": pack(np.full(n, 2000)),
        "prefix": "", "names": [f"{i}.jpg" for i in range(n)],
        "label": pack(label), "before": pack(before), "before_share": pack(np.full(n, 4000)), "top": pack(top),
        "top_now": pack(np.full((n, 5), 2000)), "top_before": pack(np.full((n, 5), 2000)),
        "neighbours": pack(rng.integers(n, size=(n, 3))), "cosines": pack(np.full((n, 3), 7000)),
        "x": pack(rng.integers(65536, size=n)), "y": pack(rng.integers(65536, size=n)), "beta": [0.5] * k,
        "truth": pack(label), "pictures": {}, "skipped": [], "skipped_count": 0, "about": {},
    }  # fmt: skip
    (tmp_path / "big.html").write_text(page(data))
    browser.open(tmp_path / "big.html")
    assert (tiles(browser), browser.run("$('pages').textContent")) == (60, "834")
    choose(browser, "kind", "changed")
    assert browser.run("state.found.length") == int((label != before).sum())
    browser.run("$('next').click()")
    assert tiles(browser) == 60
    assert browser.run("document.querySelectorAll('#shares tbody tr').length") == 20
    assert browser.complaints() == []
