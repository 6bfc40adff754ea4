"""Hundreds of command lines that cannot work: each ends at once with status 2 and one sentence, and writes nothing."""

import itertools
import os
import signal

import numpy as np
import pytest

FILE, BATCHED = ("adapt", "{features}"), ("--shuffle", "--batch-size", "8")
PHOTOS = ("classify", "{photos}", "--classes", "cat,dog", "--encoder", "tiny")
SHARDS = ("adapt", "{features}", "--text", "{features}", "--out", "out", "--engine", "ray")
ENCODE = ("encode", "{photos}", "--out", "store", "--encoder", "tiny")
BENCH = ("bench", "run", "batch-64", "--data", "{features}")
LONG = "x" * 300

WHOLE = [
    (FILE, "--batch-size"),
    ((*FILE, *BATCHED), "--seed"),
    (SHARDS, "--workers"),
    (("stream", "{features}"), "--batch-size"),
    (("compare", "{features}"), "--batch-size"),
    (PHOTOS, "--batch-size"),
    (PHOTOS, "--encode-batch"),
    (PHOTOS, "--workers"),
    (ENCODE, "--shard-size"),
    (ENCODE, "--encode-batch"),
    (BENCH, "--runs"),
    (BENCH, "--jobs"),
    (("demo",), "--batches"),
    (("serve",), "--port"),
]
NO_WHOLE = ["", " ", "many", "1.5", "1e3", "nan", "0x10", "1_000", "½", "-7", "9" * 19, "9" * 5000]

CHOICES = [
    (FILE, "--dtype"),
    (FILE, "--device"),
    (SHARDS, "--engine"),
    (SHARDS, "--graph"),
    (FILE, "--method"),
    ((*FILE, "--method", "moon"), "--preset"),
    (FILE, "--set"),
    (PHOTOS, "--device"),
    (PHOTOS, "--template"),
    (("serve",), "--fsync"),
    (("serve",), "--log-format"),
    (("serve", "--new-token", "a"), "--scope"),
    (("serve", "--new-token", "a"), "--expires"),
    (BENCH, "--methods"),
    (("compare", "{features}"), "--methods"),
]
NO_CHOICE = ["", "no-such", "CPU;", "\N{SNOWMAN}"]

INPUTS = [
    (("adapt",), None),
    (("stream",), None),
    (("compare", "--methods", "zero_shot"), None),
    (FILE, "--text"),
    (FILE, "--labels"),
    (FILE, "--known"),
    (FILE, "--class-prior"),
    (FILE, "--negatives"),
    (("stream", "{features}"), "--resume"),
    (PHOTOS, "--known"),
    (PHOTOS, "--class-prior"),
    (("bench", "run", "batch-64"), "--data"),
    (("classify", "--classes", "cat,dog", "--encoder", "tiny"), None),
]
INPUTS += [
    (("export-labels", "--to", "coco", "--out", "x.json"), None),
    (("import-labels", "--from", "label-studio", "--out", "x.csv"), None),
    (("undo",), None),
]
NO_INPUT = ["", "nowhere.npz", "loop.npz", LONG, "features.npz/x.npz", "locked/x.npz", "/dev/zero", "bad.npz"]

OUTPUTS = [
    (FILE, "--out"),
    (("stream", "{features}"), "--out"),
    (("stream", "{features}"), "--save-state"),
    (("compare", "{features}", "--methods", "zero_shot"), "--out"),
    (PHOTOS, "--out"),
    (PHOTOS, "--report"),
]
OUTPUTS += [
    (("export-labels", "labels.csv", "--to", "coco"), "--out"),
    (("import-labels", "label.json", "--from", "label-studio"), "--out"),
]
NO_OUTPUT = ["", "nowhere/x{}", "loop.npz/x{}", LONG + "{}", "features.npz/x{}", "/dev/full{}", "/proc/x{}", "x.pdf"]
KIND = {"--save-state": ".safetensors", "--report": ".html"}

FOLDERS = [
    (BENCH, "--out"),
    (("demo",), "--out"),
    (("serve",), "--data"),
    (("serve",), "--restore"),
    (("serve",), "--samples"),
]
NO_FOLDER = ["", "features.npz/x", "loop.npz/x", "/proc/x/y", LONG]

URLS = ["quux://x/*.npy", "s3://x/*.npy", "https://x/*.npy", "ftp://u:secret@x/*.npy", "simplecache::https://x/*.npy"]
URLS += ["data:,x/*.npy", "reference://x/*.npy"]

OTHERS = [
    (*FILE, "--classes", LONG),
    (*FILE, "--classes", "loop.npz"),
    (*FILE, "--labels", "minus.txt"),
    (*FILE, "--labels", "huge.txt"),
    (*FILE, "--logit-scale", "nan"),
    (*FILE, "--logit-scale", "inf"),
    (*FILE, "--logit-scale", "0"),
    (*FILE, "--logit-scale", "1e999"),
    (*FILE, "--set", "=1"),
    (*FILE, "--set", "x"),
    (*FILE, "--group-by", "nothing"),
    (*FILE, "--allow-remote", "https"),
    (*FILE, "--workers", "2"),
    (*FILE, "extra", "words"),
    (*FILE, "--no-such-flag"),
    ("no-such-command",),
    ("methods", "no-such"),
    ("adapt",),
    ("methods", "moon", "stata"),
    ("bench", "run", "no-such-suite", "--data", "{features}"),
    ("bench", "run", "batch-64"),
    (*BENCH, "--device", "no-such"),
    ("bench", "report", "foreign"),
    ("encode", "--into", "pipe", "--verify"),
    ("encode", "--into", "features.npz", "--verify"),
    ("encode", "photos", "--encoder", "onnx:photos", "--out", "store"),
    ("bench", "report", "nowhere"),
    ("bench", "no-such"),
    ("serve", "--port", "65536"),
    ("serve", "--classes", "a,b"),
    ("serve", "--samples", "photos"),
    ("serve", "--host", "no.such.host.invalid"),
    ("serve", "--revoke-token", "nobody"),
    ("serve", "--scope", "read"),
    ("serve", "--host", "0.0.0.0", "--port", "0"),
    ("export",),
    ("export", "--out", "photos"),
    ("encode", "{photos}"),
    ("encode", "nowhere", "--out", "store"),
    (*PHOTOS[:2],),
    ("classify", "nowhere/*.jpg", *PHOTOS[2:]),
    *((*PHOTOS, "--frame-step", value) for value in ("0", "-1", "nan", "inf")),
    *((*PHOTOS, "--sort-into", value) for value in ("photos", "features.npz/x", "/proc/x", LONG)),
    ("serve", "--verify", "nowhere"),
    ("serve", "--new-token", "a", "--stream", "b", "--expires", "-1d"),
    ("serve", "--new-token", "a", "--expires", "0s"),
]


def lines():
    for (words, option), value in itertools.product(WHOLE, NO_WHOLE):
        yield (*words, f"{option}={value}")
    for (words, option), value in itertools.product(CHOICES, NO_CHOICE):
        yield (*words, f"{option}={value}")
    for (words, option), value in itertools.product(INPUTS, NO_INPUT):
        yield (*words, value) if option is None else (*words, f"{option}={value}")
    for (words, option), value in itertools.product(OUTPUTS, NO_OUTPUT):
        yield (*words, f"{option}={value.format(KIND.get(option, '.csv'))}")
    for (words, option), value in itertools.product(FOLDERS, NO_FOLDER):
        yield (*words, f"{option}={value}")
    for url in URLS:
        yield ("adapt", url, "--text", "{features}", "--out", "out")
        yield ("adapt", "*.npy", "--text", "{features}", "--out", url)
    yield from OTHERS


LINES = list(lines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from PIL import Image

    here = tmp_path_factory.mktemp("bad")
    rng = np.random.default_rng(0)
    arrays = {"image_features": rng.normal(size=(8, 4)), "text_features": rng.normal(size=(3, 4))}
    np.savez(here / "features.npz", labels=rng.integers(3, size=8), **arrays)
    np.save(here / "shard.npy", arrays["image_features"])
    (here / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(here / "photos" / "a.png")
    (here / "loop.npz").symlink_to("loop.npz")
    (here / "locked").write_text("")
    (here / "foreign").mkdir()
    (here / "foreign" / "a.jsonl").write_text('{"id": 1}\n')
    (here / "pipe").mkdir()
    os.mkfifo(here / "pipe" / "manifest.json")
    (here / "bad.npz").write_bytes(b"PK\x03\x04 rubbish")
    (here / "labels.csv").write_text("id,label,confidence\na.jpg,cat,0.5\n")
    (here / "label.json").write_text("[]")
    (here / "minus.txt").write_text("--1\n" * 8)
    (here / "huge.txt").write_text(f"{10**30}\n" * 8)
    return here


def listed(folder):
    made = {path for path in folder.rglob("*") if "moontide-data" not in path.parts}  # which a server may make
    return sorted(made)


@pytest.mark.parametrize("number", range(len(LINES)), ids=lambda number: " ".join(LINES[number])[:100])
def test_a_bad_command_line_is_one_sentence(number, folder, moontide, monkeypatch):
    def too_long(*_):
        raise AssertionError("the command hangs")

    monkeypatch.chdir(folder)
    before = listed(folder)
    words = [word.replace("{features}", "features.npz").replace("{photos}", "photos") for word in LINES[number]]
    old = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(20)
    try:
        status, out, err = moontide(*words)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    assert (status, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert len(err) <= 500
    assert "Traceback" not in err
    assert "secret" not in err
    assert listed(folder) == before


def test_there_are_many_of_them():
    assert len(LINES) == len(set(LINES)) >= 350
