"""Draw the diagrams of the guides, docs/images/*.png, from their words: python docs/make_diagrams.py."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OUT = Path(__file__).parent / "images"
INK, PAPER, ACCENT = "#1b2430", "#eef2f7", "#d7e5f8"

# Each is columns of boxes, from left to right; every box of a column has an arrow to every box of the next.
DIAGRAMS = {
    "encoders": [
        ["photographs", "class names"],
        ["CLIP, SigLIP,\nOpenCLIP, ONNX"],
        ["store\n(encode once)"],
        ["classify\nadapt\nserve"],
    ],
    "scale": [
        ["shard 1", "shard 2", "shard n"],
        ["E-step on\neach shard"],
        ["one sum of\nK x d numbers"],
        ["labels, one\nfile per shard"],
    ],
    "integrations": [
        ["Label Studio\nannotations", "FiftyOne\nlabels", "Hugging Face\ndatasets"],
        ["Moontide\n(a batch at once)"],
        ["COCO,\nMegaDetector", "Label Studio,\nFiftyOne", "Parquet for\nLanceDB", "cleanlab"],
    ],
    "embeddings": [
        ["image embeddings\n(N, d)", "text embeddings\n(K, d)"],
        ["TIDE: how many of the\nclasses are there?"],
        ["labels, confidence,\nunknown"],
    ],
}


def draw(name: str, columns: list[list[str]]) -> None:
    """Draw one diagram."""
    rows = max(map(len, columns))
    figure, axes = plt.subplots(figsize=(2.6 * len(columns), 0.9 * rows + 0.3), layout="constrained")
    places = [[(x, (rows - len(column)) / 2 + i) for i in range(len(column))] for x, column in enumerate(columns)]
    for x, column in enumerate(columns):
        for text, (_, y) in zip(column, places[x], strict=True):
            fill = ACCENT if 0 < x < len(columns) - 1 else PAPER
            box = {"boxstyle": "round,pad=0.5", "facecolor": fill, "edgecolor": INK, "linewidth": 0.8}
            axes.text(x, -y, text, ha="center", va="center", fontsize=10, color=INK, bbox=box, zorder=2)
        for _, y in places[x]:
            for _, to in places[x + 1] if x + 1 < len(columns) else ():
                ends = {"xy": (x + 0.66, -to), "xytext": (x + 0.34, -y)}
                axes.annotate("", **ends, arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 0.8})
    axes.set_xlim(-0.55, len(columns) - 0.45)
    axes.set_ylim(-rows + 0.4, 0.6)
    axes.axis("off")
    figure.savefig(OUT / f"{name}.png", dpi=110, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    for name, columns in DIAGRAMS.items():
        draw(name, columns)
