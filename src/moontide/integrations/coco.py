"""COCO Camera Traps JSON: the images, the classes, and one annotation per image, without boxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moontide.integrations.labels import Labels, write_json


def coco(labels: Labels) -> dict[str, Any]:
    """Return labels in the format of COCO; `score` is the confidence.

    >>> made = coco(Labels(["a.jpg"], ["dog"], [0.75], [[("dog", 0.75)]], ["cat", "dog"]))
    >>> made["categories"], made["annotations"]
    ([{'id': 0, 'name': 'cat'}, {'id': 1, 'name': 'dog'}], [{'id': 0, 'image_id': 0, 'category_id': 1, 'score': 0.75}])
    """
    number = {name: k for k, name in reversed(list(enumerate(labels.class_names)))}
    annotations: list[dict[str, Any]] = [
        {"id": i, "image_id": i, "category_id": number[label], "score": sure}
        for i, (label, sure) in enumerate(zip(labels.labels, labels.confidence, strict=True))
    ]
    for annotation, unknown in zip(annotations, labels.unknown or (), strict=False):
        annotation["unknown"] = unknown
    return {
        "info": {"description": "labels by Moontide", "version": "1.0"},
        "images": [{"id": i, "file_name": one} for i, one in enumerate(labels.ids)],
        "categories": [{"id": k, "name": name} for k, name in enumerate(labels.class_names)],
        "annotations": annotations,
    }


def write_coco(labels: Labels, path: str | Path) -> None:
    """Write a .json file that pycocotools and tools for camera traps read."""
    write_json(path, coco(labels))
