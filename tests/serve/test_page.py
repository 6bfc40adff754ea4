"""The page in a real browser: upload, sample set, reset, reload, tokens; nothing from elsewhere, no HTML from names."""

import re
import time

import numpy as np
import pytest
from PIL import Image

from moontide.serve.auth import new_token

PATIENCE = 120  # seconds, on a machine that does much else
EVIL = '<img src=x onerror="document.title=1">'


class Driver:
    """A tab on a server."""

    def __init__(self, tab, client):
        self.tab, self.url = tab, str(client.base_url).rstrip("/")

    def go(self, path="/"):
        self.tab("Page.navigate", url="about:blank")  # so that a mere change of # is a load too
        self.tab.events.clear()
        self.tab("Page.navigate", url=self.url + path)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def reload(self):
        self.run("window.old = true")
        self.tab("Page.reload")
        self.wait("!window.old && document.readyState === 'complete'")

    def run(self, expression):
        return self.tab.run(expression)

    def wait(self, expression, seconds=PATIENCE):
        """Wait until an expression is true in the page, and return it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if value := self.run(expression):
                    return value
            except RuntimeError:  # between two documents
                pass
            time.sleep(0.05)
        status = self.run("document.querySelector('#status')?.textContent")
        raise AssertionError(f"{expression} does not come true; the page shows: {status}")

    def click(self, selector):
        self.run(f"document.querySelector({selector!r}).click()")

    def text(self, selector):
        return self.run(f"document.querySelector({selector!r}).innerText")

    def says(self, selector, *words):
        """Wait until an element has some words."""
        for word in words:
            self.wait(f"document.querySelector({selector!r}).innerText.includes({word!r})")

    def rows(self):
        return self.run("[...document.querySelectorAll('#predictions tbody tr')].map((row) => row.innerText)")

    def upload(self, *paths):
        root = self.tab("DOM.getDocument")["root"]["nodeId"]
        field = self.tab("DOM.querySelector", nodeId=root, selector="#files")["nodeId"]
        self.tab("DOM.setFileInputFiles", nodeId=field, files=[str(path) for path in paths])

    def clean(self):
        """Tell that nothing went wrong in the page and nothing was asked of others."""
        complaints = self.tab.complaints()
        assert complaints == []
        assert all(url.startswith(self.url) for url in self.tab.requests())


def fed(client):
    """Feed the simulated samples to a stream, and return the client."""
    client.post("/streams", json={"name": "a", "sample": "simulated", "max_wait_ms": 0})
    data = client.get("/samples/simulated")
    headers = {"Content-Type": "application/octet-stream", "X-Shape": data.headers["x-shape"]}
    client.post("/streams/a/embeddings", content=data.content, headers=headers)
    return client


def test_upload_watch_reset_and_reload(browser, app, sqlite, colour, tmp_path):
    page = Driver(browser, app(sqlite, encoder=colour))
    page.go()
    page.wait("!document.querySelector('#by-classes').hidden")
    page.click("#by-classes input")
    page.run(f"document.querySelector('#names').value = 'red\\nblue, green\\n{EVIL}'")
    page.click("#create button")
    page.wait("!document.querySelector('#drop').offsetParent === false")
    for name in ("red", "blue", "green"):
        Image.new("RGB", (20, 20), name).save(tmp_path / f"{name}.png")
    (tmp_path / "notes.txt").write_text("no image")
    page.upload(*(tmp_path / f"{name}.png" for name in ("red", "blue", "green")), tmp_path / "notes.txt")
    page.wait("document.querySelectorAll('#predictions tbody tr').length === 3")
    assert [row.split()[0] for row in page.rows()] == ["2", "1", "0"]
    for row, name in zip(page.rows(), ("green", "blue", "red"), strict=True):
        assert row.count(name) == 2  # before and after, side by side
        assert "same" in row or "changed" in row
    page.wait("document.querySelectorAll('#predictions img').length === 3")
    assert page.wait("document.querySelectorAll('#map g').length") == 3
    page.says("#status", "3 images are in the stream")
    (tmp_path / "broken.png").write_bytes((tmp_path / "red.png").read_bytes()[:60])
    page.upload(tmp_path / "broken.png")
    page.wait("document.querySelector('#status').innerText.includes('cannot be decoded')")
    page.reload()  # the stream is kept
    page.wait("document.querySelectorAll('#predictions tbody tr').length === 3")
    page.wait("[...document.querySelectorAll('#predictions img')].filter((each) => each.naturalWidth).length === 3")
    page.click("#reset")
    page.wait("document.querySelectorAll('#predictions tbody tr').length === 0")
    page.says("#status", "was reset")
    page.reload()
    page.wait("document.querySelector('#facts').innerText.includes('Samples in the state')")
    assert page.rows() == []
    page.upload(tmp_path / "red.png")
    page.wait("document.querySelectorAll('#predictions tbody tr').length === 1")
    page.says("#status", "1 image is in the stream.")
    assert page.run("document.querySelectorAll('#predictions img').length") == 1  # those before the reset are forgotten
    assert page.rows()[0].startswith("3")
    assert page.run("document.title") == "Moontide stream"
    complaints = [each for each in page.tab.complaints() if "422" not in str(each)]  # of the broken image
    assert complaints == []


def test_names_are_text_and_never_html(browser, app, sqlite, colour):
    client = app(sqlite, encoder=colour)
    client.post("/streams", json={"name": "a", "classes": [EVIL, "blue"], "max_wait_ms": 0})
    client.post("/streams/a/embeddings", json={"embeddings": [[1] * 7 + [9]]})
    page = Driver(browser, client)
    page.go("/#a")
    page.wait("document.querySelectorAll('#predictions tbody tr').length === 1")
    assert EVIL in page.rows()[0]
    assert EVIL in page.text("#classes")
    assert page.run("document.querySelectorAll('td img, th img').length") == 0
    page.clean()


def test_the_sample_set_is_fed_paused_and_predicted_again(browser, app, sqlite, tmp_path):
    client = app(sqlite)
    page = Driver(browser, client)
    page.go()
    page.wait("document.querySelector('#method').value === 'tide'")
    page.run("document.querySelector('#method').value = 'moon'")  # which says which classes it believes present
    page.says("#source", "not from images")
    page.click("#create button")
    page.wait("document.querySelectorAll('#predictions tbody tr').length >= 32")
    page.says("#about", "simulated embeddings, not images")
    page.says("#facts", "Right before", "Right after", "Classes believed present", "of 100")
    page.says("#classes", "● present")
    page.wait("document.querySelectorAll('#classes .spark path').length >= 8")
    assert page.wait("[...document.querySelectorAll('#map text')].map((mark) => mark.textContent).join('')")
    page.click("#pause")
    page.wait("document.querySelector('#pause').getAttribute('aria-pressed') === 'true'")
    page.wait("document.querySelector('#play').innerText === 'Feed the sample set'")
    name = page.run("location.hash.slice(1)")
    before = page.rows()
    client.post(f"/streams/{name}/embeddings", json={"embeddings": [[1] * 512]})  # by someone else
    time.sleep(0.3)
    assert page.rows() == before
    page.click("#pause")
    page.wait("document.querySelector('#pause').innerText === 'Pause'")
    total = client.get(f"/streams/{name}").json()["total"]
    page.wait(f"document.querySelector('#predictions tbody th').innerText === '{total - 1}'")
    page.click("#revise")
    page.wait("!document.querySelector('#now').hidden")
    page.says("#status", "predicted again with the state as it is now")
    page.tab("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click("#csv")
    page.click("#state")
    deadline = time.monotonic() + PATIENCE
    while not ((tmp_path / f"{name}.csv").exists() and (tmp_path / f"{name}.safetensors").exists()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    lines = (tmp_path / f"{name}.csv").read_text().splitlines()
    assert len(lines) == total + 1
    page.clean()


def test_scores_survive_a_reload_and_name_the_order_of_feeding(browser, app, sqlite):
    client = app(sqlite)
    page = Driver(browser, client)
    page.go()
    page.wait("document.querySelector('#method').value === 'tide'")
    page.wait("document.querySelector('#streams').innerText === 'none yet'")
    page.run("document.querySelector('#name').value = ' Front door! '")
    page.click("#create button")
    page.wait("document.querySelectorAll('#predictions tbody tr').length >= 32")
    page.reload()  # while a part of the sample set is on its way
    page.wait("document.querySelector('#facts').innerText.includes('Right after')")
    total = page.wait("!page.pending && page.stream.total === page.rows.size && page.rows.size")
    assert client.get("/streams").json()[0]["name"] == page.run("location.hash.slice(1)") == "front-door"
    truth = client.get("/samples/simulated").headers["x-labels"].split(",")
    given = client.get(f"/streams/front-door/predictions?size={total}").json()
    right = [np.mean([int(truth[i]) == k for i, k in enumerate(given[key])]) for key in ("zero_shot_labels", "labels")]
    page.wait(
        f"document.querySelector('#order').innerText.includes('{total} samples fed by this page in random order')"
    )
    shown = re.search(
        r"before ([\d.]+) % Right after ([\d.]+) % Gain \+([\d.]+)", " ".join(page.text("#facts").split())
    )
    np.testing.assert_allclose([float(x) / 100 for x in shown.groups()], [*right, right[1] - right[0]], atol=0.0006)
    page.click("#close")
    page.wait("!!document.querySelector('#streams a')")
    page.wait(f"document.querySelector('#streams').innerText === 'front-door tide, 100 classes, {total} samples'")
    page.click("#streams a")
    page.wait("document.querySelector('#facts').innerText.includes('Gain')")
    page.clean()


def test_pictures_of_the_sample_folder_say_that_they_were_fed_folder_by_folder(browser, app, sqlite, colour, tmp_path):
    paths = [tmp_path / "samples" / name / f"{i}.png" for name in ("blue", "red") for i in range(6)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 20), path.parent.name).save(path)
    client = app(sqlite, encoder=colour, samples=paths)
    client.post("/streams", json={"name": "a", "classes": ["red", "blue"]})
    page = Driver(browser, client)
    page.go("/#a")
    page.wait("!document.querySelector('#stream').hidden")
    page.click("#play")
    page.wait("document.querySelectorAll('#predictions img').length === 12")
    page.reload()
    page.wait("document.querySelectorAll('#predictions img').length === 12")
    page.wait("document.querySelector('#order').innerText.includes('12 samples fed by this page folder by folder')")
    assert client.get("/streams/a").json()["total"] == 12
    page.clean()


def test_an_answer_from_before_a_reset_does_not_come_back(browser, app, sqlite):
    client = app(sqlite)
    client.post("/streams", json={"name": "a", "prototypes": np.eye(2).tolist()})
    client.post("/streams/a/embeddings", json={"embeddings": np.eye(2).tolist()})
    page = Driver(browser, client)
    page.go("/#a")
    page.wait("document.querySelectorAll('#predictions tbody tr').length === 2")
    page.run(
        "window.real = window.fetch; window.fetch = async (address, more) => {"
        "  const answer = await real(address, more);"
        "  if (String(address).endsWith('streams/a')) await new Promise((done) => { window.release = done; });"
        "  return answer; }; page.rows.clear(); window.late = catchUp(); 0"
    )
    page.wait("!!window.release")  # the description is on its way
    page.click("#reset")
    page.says("#status", "was reset")
    page.run("window.fetch = real; window.release(); window.late.then(() => 0)")
    assert page.rows() == []
    page.clean()


def test_one_is_not_a_plural(browser, app, sqlite):
    client = app(sqlite)
    client.post("/streams", json={"name": "a", "prototypes": [[1.0, 0.0]], "classes": ["cat"]})
    client.post("/streams/a/embeddings", json={"embeddings": [[1, 0]]})
    page = Driver(browser, client)
    page.go()
    page.wait("!!document.querySelector('#streams a')")
    page.wait("document.querySelector('#streams').innerText === 'a tide, 1 class, 1 sample'")
    page.click("#streams a")
    page.wait("document.querySelectorAll('#predictions tbody tr').length === 1")
    page.wait("document.querySelector('#about').innerText === 'tide, 1 class, embeddings'")
    page.wait("document.querySelector('#others').innerText === '0 of 1 class never.'")
    page.click("#revise")
    page.wait("document.querySelector('#status').innerText.startsWith('1 sample of the window was predicted again')")
    page.clean()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_of_a_phone_is_content(browser, app, sqlite, scheme):
    page = Driver(browser, fed(app(sqlite)))
    browser.resize(390, 844, scheme)
    page.go("/#a")
    page.wait("document.querySelectorAll('#predictions tbody tr').length === 60")
    box = "(({top, bottom, height}) => [top, bottom, height])(document.querySelector('%s').getBoundingClientRect())"
    facts, row, controls = (page.run(box % each) for each in ("#facts", "#predictions tbody tr", ".controls"))
    assert facts[0] < 150  # numbers come first
    assert row[1] < 700  # and a prediction without scrolling
    assert controls[1] == 844  # buttons are one line at the thumb
    assert controls[2] < 70
    browser.resize(1280, 900)
    page.clean()


@pytest.mark.parametrize("width", [1280, 360])
def test_it_fits_the_screen(browser, app, sqlite, width):
    page = Driver(browser, fed(app(sqlite)))
    browser.resize(width, 800)
    page.go("/#a")
    page.wait("document.querySelectorAll('#predictions tbody tr').length === 60")
    assert page.run("document.documentElement.scrollWidth") <= width
    small = "[...document.querySelectorAll('#stream button')].filter((button) => button.offsetHeight < 40).length"
    assert page.run(small) == 0  # fingers find them
    browser.resize(1280, 900)
    page.clean()


def test_a_token_is_asked_for(browser, app, sqlite):
    token, kept = new_token()
    page = Driver(browser, app(sqlite, tokens={"me": kept}))
    page.go()
    page.wait("!document.querySelector('#login').hidden")
    page.run(f"document.querySelector('#token').value = {token!r}")
    page.click("#login button")
    page.wait("document.querySelector('#login').hidden")
    page.click("#create button")
    page.wait("document.querySelectorAll('#predictions tbody tr').length >= 16")  # events come with the token too
    page.run("sessionStorage.clear()")


def test_the_requests_are_listed(browser, app, sqlite):
    client = app(sqlite)
    page = Driver(browser, client)
    page.go("/docs")
    paths = client.get("/openapi.json").json()["paths"]
    page.wait(f"document.querySelectorAll('details').length === {sum(map(len, paths.values()))}")
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    page.says("#operations", "little-endian float32")
    page.clean()


def press(page, *keys):
    for key in keys:
        page.tab.press(key, {"ArrowDown": 40, "ArrowUp": 38, "Enter": 13, "Escape": 27, "Delete": 46}.get(key, 0))


def typed(page, text):
    for letter in text:
        page.tab("Input.dispatchKeyEvent", type="keyDown", key=letter, text=letter)
        page.tab("Input.dispatchKeyEvent", type="keyUp", key=letter)


def selected(page):
    return page.run("document.activeElement.closest('tr')?.dataset.number")


def test_a_label_is_corrected_by_keyboard_and_by_click(browser, app, sqlite, learner):
    client = app(sqlite)
    names = ["tabby cat", "golden retriever", "espresso", EVIL]
    client.post("/streams", json={"name": "a", "prototypes": np.eye(4).tolist(), "classes": names, "method": "learner"})
    client.post("/streams/a/embeddings", json={"embeddings": np.eye(4)[[0, 1, 2]].tolist()})
    page = Driver(browser, client)
    page.go("/#a")
    page.wait("document.querySelectorAll('#predictions tbody tr').length === 3")
    page.says("#fix-note", "search the true")
    page.run("document.querySelector('#predictions tbody tr').focus()")
    assert selected(page) == "2"
    press(page, "ArrowDown", "ArrowDown", "ArrowUp")
    assert selected(page) == "1"
    typed(page, "esp")  # letters search
    page.wait("document.querySelectorAll('#offered [role=option]').length === 1")
    assert page.run("document.querySelector('.picker input').value") == "esp"
    client.post("/streams/a/embeddings", json={"embeddings": [[1, 0, 0, 0]]})  # the table is drawn anew meanwhile
    page.wait("document.querySelectorAll('#predictions tbody tr').length === 4")
    assert page.run("document.querySelector('.picker input') === document.activeElement")
    press(page, "Enter")
    page.wait("document.querySelector('tr[data-number=\"1\"]').innerText.includes('corrected')")
    page.says("#status", "Sample 1 is espresso")
    assert selected(page) == "1"
    assert client.get("/streams/a/predictions").json()["known"] == [None, 2, None, None]
    page.click("tr[data-number='0'] .truth button")  # by click, any class
    page.wait("document.querySelectorAll('#offered [role=option]').length === 4")
    assert page.run("document.querySelectorAll('#offered img').length") == 0  # names are text
    press(page, "ArrowDown", "Escape")
    page.wait("!document.querySelector('.picker') && !!document.querySelector('tr[data-number=\"0\"] .truth button')")
    page.click("tr[data-number='0'] .truth button")
    page.run("document.querySelector('#offered li').dispatchEvent(new MouseEvent('mousedown', {bubbles: true}))")
    page.wait("document.querySelector('tr[data-number=\"0\"]').innerText.includes('confirmed')")
    assert client.get("/streams/a/predictions").json()["known"] == [0, 2, None, None]
    client.post("/streams/a/known", json={"samples": [3], "labels": [1]})  # by somebody else
    page.wait(
        "document.querySelector('tr[data-number=\"3\"]').innerText.includes('golden retriever corrected'.slice(0, 16))"
    )
    page.run("document.querySelector('tr[data-number=\"0\"]').focus()")
    press(page, "Delete")
    page.wait("!!document.querySelector('tr[data-number=\"0\"] .truth button')")
    page.reload()
    page.wait("document.querySelector('tr[data-number=\"1\"]')?.innerText.includes('corrected')")
    assert page.run("document.title") == "Moontide stream"
    page.clean()


def test_a_method_without_use_for_labels_offers_no_correction(browser, app, sqlite):
    client = app(sqlite)
    client.post("/streams", json={"name": "a", "prototypes": np.eye(4).tolist(), "method": "tda"})
    client.post("/streams/a/embeddings", json={"embeddings": np.eye(4).tolist()})
    page = Driver(browser, client)
    page.go("/#a")
    page.wait("document.querySelectorAll('#predictions tbody tr').length === 4")
    assert page.run("document.querySelector('#fix-note').hidden")
    assert page.run("document.querySelectorAll('.truth button').length") == 0
    page.clean()
