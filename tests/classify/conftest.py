"""An encoder that a plug-in package brings, which sees colours; a folder of images; and the command line."""

import csv

import numpy as np
import pytest

pillow = pytest.importorskip("PIL.Image")

PLUGIN = '''
import numpy as np
from PIL import ImageColor
from moontide.encoders import Encoder

class Colour(Encoder):
    """The colours of a 4 x 4 grid; names are colours."""

    id, dim, logit_scale, templates = "colour", 48, 40.0, ("{}",)

    def __init__(self, model="", device="cpu", precision="auto"):
        self.preprocessing = f"4 x 4 {model}"

    def prepare(self, image):
        return {"grid": np.asarray(image.resize((4, 4)), dtype=np.float32).ravel() - 127.5}

    def _images(self, batch):
        return np.stack([one["grid"] for one in batch])

    def _text(self, prompts):
        return np.stack([np.tile(ImageColor.getrgb(p.split()[-1]), 16) - 127.5 for p in prompts])
'''
COLOURS = ["red", "lime", "blue", "yellow", "cyan", "magenta"]


@pytest.fixture(autouse=True)
def plugin(tmp_path_factory, monkeypatch):
    """Install the plug-in, as a package manager would."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "colour_encoder.py").write_text(PLUGIN)
    (folder / "colour_encoder-1.dist-info").mkdir()
    (folder / "colour_encoder-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: colour-encoder\nVersion: 1\n"
    )
    entry = "[moontide.encoders]\ncolour = colour_encoder:Colour\n"
    (folder / "colour_encoder-1.dist-info" / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def moontide(moontide, tmp_path, monkeypatch):
    """Run a command line in an empty folder; returns the exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return moontide


def _paint(path, colour, rng, size=(24, 16)):
    """Save an image that is mostly of one colour."""
    grid = np.tile(pillow.new("RGB", (1, 1), colour).getpixel((0, 0)), (size[1], size[0], 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    noisy = np.clip(0.6 * grid + rng.normal(50, 60, grid.shape), 0, 255)
    pillow.fromarray(noisy.astype(np.uint8)).save(path)


@pytest.fixture
def photos(tmp_path):
    """Twelve images, six of them red, three lime and three blue, in folders that are called so."""
    rng = np.random.default_rng(0)
    for i, colour in enumerate(["red"] * 6 + ["lime"] * 3 + ["blue"] * 3):
        _paint(tmp_path / "photos" / colour / f"{i:02d}.png", colour, rng)
    return tmp_path / "photos"


@pytest.fixture
def paint():
    return _paint


@pytest.fixture
def colours():
    """The classes, as arguments of a command."""
    return ("--classes", ",".join(COLOURS), "--encoder", "colour")


@pytest.fixture
def rows_of():
    def read(path):
        with open(path, newline="") as handle:
            return list(csv.DictReader(handle))

    return read
