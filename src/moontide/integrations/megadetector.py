"""JSON of MegaDetector (which Timelapse reads) and of SpeciesNet, for camera traps.

Both are made for boxes. Labels here are those of whole images, so each image has one box that covers it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moontide.integrations.labels import Labels, write_json

WHOLE = (0.0, 0.0, 1.0, 1.0)  # x, y, width and height of a box, as shares of the image
TAXONOMY = 7  # parts of a name in SpeciesNet: id; class; order; family; genus; species; common name


def megadetector(labels: Labels, detector: str = "moontide") -> dict[str, Any]:
    """Return labels as batch output of MegaDetector, format 1.5; a detection has the confidence of its label.

    >>> made = megadetector(Labels(["a.jpg"], ["dog"], [0.75], [[("dog", 0.75), ("cat", 0.25)]], ["cat", "dog"]))
    >>> made["classification_categories"], made["images"][0]["detections"][0]["classifications"]
    ({'0': 'cat', '1': 'dog'}, [['1', 0.75], ['0', 0.25]])
    """
    number = {name: str(k) for k, name in reversed(list(enumerate(labels.class_names)))}
    images = []
    for one, sure, top in zip(labels.ids, labels.confidence, labels.top, strict=True):
        classes = [[number[name], p] for name, p in top]
        detection = {"category": "1", "conf": float(sure), "bbox": list(WHOLE), "classifications": classes}
        images.append({"file": one, "detections": [detection]})
    return {
        "info": {"format_version": "1.5", "detector": detector, "classifier": "moontide"},
        "detection_categories": {"1": "whole image"},
        "classification_categories": {str(k): name for k, name in enumerate(labels.class_names)},
        "images": images,
    }


def speciesnet(labels: Labels) -> dict[str, Any]:
    """Return labels as SpeciesNet's predictions of whole images, format 20261015.

    A class that is named in the seven parts of SpeciesNet's taxonomy keeps them; any other is a common name.

    >>> made = speciesnet(Labels(["a.jpg"], ["dog"], [0.75], [[("dog", 0.75)]], ["dog"]))
    >>> made["predictions"][0]["detections"][0]["raw_classifications"]
    {'classes': [';;;;;;dog'], 'scores': [0.75]}
    """
    predictions = []
    for one, top in zip(labels.ids, labels.top, strict=True):
        found = {"classes": [taxon(name) for name, _ in top], "scores": [p for _, p in top]}
        detection = {
            "category": "0", "label": "whole_image_classification", "conf": 1.0, "bbox": list(WHOLE),
            "raw_classifications": found,
        }  # fmt: skip
        predictions.append({"filepath": one, "detections": [detection], "model_version": "moontide"})
    return {"info": {"format_version": "20261015"}, "predictions": predictions}


def taxon(name: str) -> str:
    """Return a class name in seven parts.

    >>> taxon("Red fox"), taxon("1;mammalia;carnivora;canidae;vulpes;vulpes;red fox")
    (';;;;;;red fox', '1;mammalia;carnivora;canidae;vulpes;vulpes;red fox')
    """
    return name if name.count(";") == TAXONOMY - 1 else ";" * (TAXONOMY - 1) + name.replace(";", ",").lower()


def write_megadetector(labels: Labels, path: str | Path) -> None:
    """Write a .json file that Timelapse and the tools of MegaDetector read."""
    write_json(path, megadetector(labels))


def write_speciesnet(labels: Labels, path: str | Path) -> None:
    """Write a .json file as SpeciesNet writes its predictions."""
    write_json(path, speciesnet(labels))
