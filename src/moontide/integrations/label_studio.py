"""Tasks with predictions for Label Studio, and its annotations as known labels.

Predictions are imported as a file. Label Studio can also query a model live, but for one task at a time, and nothing
can be learnt from a batch of one image.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from moontide.errors import FileError
from moontide.integrations.labels import Labels, write_json
from moontide.store.disk import read_json

IMAGE, CHOICE = "image", "label"  # names of the two parts of the labelling interface
LOCAL = "/data/local-files/?d="  # what local storage calls files by


def label_config(class_names: list[str]) -> str:
    """Return the labelling interface of a project: one image, one of the classes.

    >>> print(label_config(["cat"]))
    <View>
      <Image name="image" value="$image"/>
      <Choices name="label" toName="image" choice="single" showInLine="true">
        <Choice value="cat"/>
      </Choices>
    </View>
    """
    choices = "\n".join(f"    <Choice value={quoteattr(name)}/>" for name in class_names)
    return (
        f'<View>\n  <Image name="{IMAGE}" value="${IMAGE}"/>\n'
        f'  <Choices name="{CHOICE}" toName="{IMAGE}" choice="single" showInLine="true">\n'
        f"{choices}\n  </Choices>\n</View>"
    )


def tasks(labels: Labels, prefix: str = LOCAL) -> list[dict[str, Any]]:
    """Return one task per image with its label as a prediction; `prefix` and the id make the address of the image.

    >>> task = tasks(Labels(["a b.jpg"], ["dog"], [0.75], [[("dog", 0.75)]], ["dog"]))[0]
    >>> task["data"]["image"], task["predictions"][0]["score"]
    ('/data/local-files/?d=a%20b.jpg', 0.75)
    """
    made = []
    for i, (one, label, sure) in enumerate(zip(labels.ids, labels.labels, labels.confidence, strict=True)):
        choice = {"from_name": CHOICE, "to_name": IMAGE, "type": "choices", "value": {"choices": [label]}}
        data: dict[str, Any] = {IMAGE: prefix + quote(one), "id": one}
        if labels.unknown is not None:
            data["unknown"] = labels.unknown[i]
        prediction = {"model_version": "moontide", "score": sure, "result": [{"id": f"m{i}", **choice}]}
        made.append({"data": data, "predictions": [prediction]})
    return made


def write_tasks(labels: Labels, path: str | Path, prefix: str = LOCAL) -> None:
    """Write a .json file to import into a project whose labelling interface is `label_config`."""
    write_json(path, tasks(labels, prefix))


def read_annotations(path: str | Path) -> dict[str, str]:
    """Return the labels of annotated images by id, from an export of the project as JSON.

    If an image has several annotations, the last one counts. Annotations that were cancelled or have no choice are
    ignored.

    >>> import tempfile
    >>> task = {"data": {"id": "a.jpg"}, "annotations": [{"result": [{"value": {"choices": ["dog"]}}]}]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json(Path(folder) / "export.json", [task])
    ...     read_annotations(Path(folder) / "export.json")
    {'a.jpg': 'dog'}
    """
    known = {}
    try:
        for task in read_json(path):
            for annotation in task.get("annotations", ()):
                chosen = [part["value"]["choices"] for part in annotation["result"] if "choices" in part["value"]]
                if chosen and chosen[-1] and not annotation.get("was_cancelled"):
                    known[str(task["data"]["id"])] = str(chosen[-1][0])
    except (TypeError, AttributeError, KeyError, IndexError):
        raise FileError(f"{path} must be a JSON export of Label Studio, with tasks made by 'write_tasks'.") from None
    return known
