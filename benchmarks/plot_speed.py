"""Draw docs/images/speed.png from the rows of `speed.py --json`: python benchmarks/plot_speed.py ROWS.json ..."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs/images/speed.png"))
    args = parser.parse_args()
    rows = [row for path in args.rows for row in json.loads(path.read_text()) if row["K"] == 1000]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    styles = iter(["o-", "s--", "^-.", "d:"])
    for name in dict.fromkeys((row["machine"], row["precision"]) for row in rows):
        own = sorted((row for row in rows if (row["machine"], row["precision"]) == name), key=lambda row: row["N"])
        label = name[0] if name[1] == "full" and "NVIDIA" not in name[0] else f"{name[0]}, {name[1]}"
        axes.plot([row["N"] for row in own], [1e3 * row["seconds"] for row in own], next(styles), label=label)
    dense = sorted((row for row in rows if row["precision"] == "full" and row["reference"]), key=lambda row: row["N"])
    for machine, grey in zip(dict.fromkeys(row["machine"] for row in dense), ("silver", "dimgrey"), strict=False):
        own = [row for row in dense if row["machine"] == machine]
        axes.plot(
            [row["N"] for row in own],
            [1e3 * row["reference"] for row in own],
            ":",
            color=grey,
            label=f"{machine}, equations as they read",
        )
    axes.set(xscale="log", yscale="log", xlabel="samples N", ylabel="milliseconds, graph included",
             title="MOON, K = 1000 classes, d = 512, ten iterations")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(args.out, dpi=120)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
