"""Turn the tables of the MOON paper into TOML: python benchmarks/paper/transcribe.py moon.tex [--out FOLDER].

The argument is the LaTeX source of "Von Mises-Fisher Mixture Model with Dynamic Shrinkage for Realistic Test-Time
Transduction", which is not part of this repository; README.md says what the files hold. On the way every printed
average, and every printed change against zero-shot, is computed again; those off by more than rounding are printed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Table = list[list[str]]

DATASETS = {
    "ImageNet": "imagenet", "SUN397": "sun397", "Aircraft": "fgvc_aircraft", "EuroSAT": "eurosat",
    "StanfordCars": "stanford_cars", "Food101": "food101", "Pets": "oxford_pets", "Flowers102": "oxford_flowers",
    "Caltech101": "caltech101", "DTD": "dtd", "UCF101": "ucf101",
}  # fmt: skip
METHODS = {
    "CLIP": "zero_shot", "OpenCLIP": "zero_shot", "SigLIP": "zero_shot", "EVA-CLIP": "zero_shot", "MTA": "mta",
    "Dirichlet": "em_dirichlet", "ZLaP": "zlap", "GDA-CLIP": "gda_clip", "TransCLIP": "transclip", "ADAPT": "adapt",
    "StatA": "stata", "MOON": "moon", "TENT": "tent", "TDA": "tda", "DMN": "dmn", "OGA": "oga",
    "StatA_vMF": "stata_vmf", "MOON_Gaussian": "moon_gaussian", "MOON^†": "moon_samplewise",
    "CLIP forward": "clip_forward", "Zero-shot": "zero_shot", "Ours": "moon",
}  # fmt: skip
BACKBONES = {
    "ResNet-50": "clip_rn50", "ResNet-101": "clip_rn101", "ViT-B/32": "clip_vit_b32", "ViT-L/14": "clip_vit_l14",
    "CLIP RN50": "clip_rn50", "CLIP RN101": "clip_rn101", "CLIP ViT-B/32": "clip_vit_b32",
    "CLIP ViT-L/14": "clip_vit_l14", "OpenCLIP": "openclip", "SigLIP": "siglip", "EVA-CLIP": "eva_clip",
    "clip-resnet50 / RN50": "clip_rn50", "clip-resnet101 / RN101": "clip_rn101",
    "clip-vit-base-patch16 / ViT-B/16": "clip_vit_b16", "clip-vit-base-patch32 / ViT-B/32": "clip_vit_b32",
    "clip-vit-large-patch14 / ViT-L/14": "clip_vit_l14", "ViT-B-16": "openclip", "ViT-SO400M-14-SigLIP-384": "siglip",
    "EVA01-g-14": "eva_clip",
}  # fmt: skip
SCENARIOS: dict[str, dict[str, Row]] = {  # as tab:main-batch and tab:main-online define them
    "batch": {
        "very_low": {"effective_classes": [1, 4]}, "low": {"effective_classes": [2, 10]},
        "medium": {"effective_classes": [5, 25]}, "high": {"effective_classes": [25, 50]},
        "very_high": {"effective_classes": [50, 100]}, "random": {"effective_classes": "random"}, "all": {},
    },
    "online": {"low": {"xi": 0.1}, "medium": {"xi": 0.01}, "high": {"xi": 0.001}, "separate": {}},
}  # fmt: skip
CONFIDENCE = {
    "Geo. mean (ours)": "geometric", "Ari. mean": "arithmetic", "Harm. mean": "harmonic", "Average only": "average",
    "Max only": "max",
}  # fmt: skip
ALPHA = {r"1/\lambda_k (ours)": "1/lambda", r"\lambda_k": "lambda", r"\exp(-\lambda_k)": "exp(-lambda)"}
ABLATED = {"alpha": 1.0, "gamma": "off", "update_mu": False, "update_kappa": False}  # in the order of the columns

BATCH: Row = {"backbone": "clip_vit_b16", "setting": "batch", "runs": 1000}
ONLINE: Row = {"backbone": "clip_vit_b16", "setting": "online", "runs": 100, "batch_size": 128}

RULES = r"\\(?:midrule|cmidrule\(lr\)\{[\d-]+\}|rowcolor\{\w+\}|ca\b)"
STYLES = (
    r"\\(?:rotatebox\{45\}|multirow\{\d+\}\{\*\}|multicolumn\{\d+\}\{[^}]*\}"
    r"|(?:textbf|textit|texttt|text|underline|centering|boldsymbol)\b)"
)
SIGNS = {"pos": 1, "negval": -1, "zeroval": 0}


def plain(cell: str) -> str:
    """Return a cell without markup and braces; a change stays behind its value as in 69.3\\pos2.7."""
    for command, text in {r"\method{}": "MOON", r"\dagger": "†", r"\_": "_", r"\#": "#"}.items():
        cell = cell.replace(command, text)
    return " ".join(re.sub(r"[{}$]", "", re.sub(STYLES, "", cell)).split())


def tabulars(tex: str, label: str) -> Iterator[tuple[str, Table]]:
    """Give, for every tabular of a table, the words before it and its rows of plain cells."""
    at = tex.index(rf"\label{{{label}}}")
    table = tex[tex.rindex(r"\begin{table", 0, at) : tex.index(r"\end{table", at)]
    done = 0
    for found in re.finditer(r"\\begin\{tabular\}.*?\\toprule(.*?)\\bottomrule", table, re.DOTALL):
        body = re.sub(r"\\shortstack\{(.*?)\}", lambda stack: stack[1].replace(r"\\", " "), found[1])
        rows = [[plain(cell) for cell in row.split("&")] for row in re.sub(RULES, "", body).split(r"\\")]
        yield table[done : found.start()], [row for row in rows if any(row)]
        done = found.end()


def number(cell: str) -> tuple[float, float]:
    """Return a printed value and the printed change against zero-shot (0 where there is none)."""
    found = re.fullmatch(r"([\d.]+) ?(?:\\(pos|negval|zeroval)([\d.]+))?", cell)
    if not found:
        raise ValueError(f"not a number: {cell!r}")
    return float(found[1]), SIGNS[found[2]] * float(found[3]) if found[2] else 0.0


def count(cell: str) -> int:
    return int(cell.replace(",", ""))


def scenario(setting: str, printed: str) -> Row:
    """Return what a printed scenario ("Very Low (1--4)", "All") stands for."""
    name = printed.split("(")[0].strip().lower().replace(" ", "_")
    facts = SCENARIOS[setting][name]
    numbers = [float(found) for found in re.findall(r"[\d.]+", printed)]
    if numbers and numbers not in (facts.get("effective_classes"), [facts.get("xi")]):
        raise ValueError(f"{printed!r} is not {facts}")
    return {"scenario": name} | facts


def setting_of(words: str) -> Row:
    """Return the batch size and the backbone that the words before a tabular name."""
    sizes = re.findall(r"batch size(?: is| of|:)? ([\d,]*\d)", words, re.IGNORECASE)
    backbone = re.search(r"\([a-d]\) ((?:ResNet|ViT)\S+)\.\\par", words)
    facts: Row = {"batch_size": count(sizes[-1])} if sizes else {}
    return facts | ({"backbone": BACKBONES[backbone[1]]} if backbone else {})


def results(tex: str, label: str, facts: Row, changes: bool = True) -> Iterator[Row]:
    """Give the rows of a table of methods by datasets; `facts` hold for all, `changes` says if changes are printed."""
    for words, (header, *body) in tabulars(tex, label):
        facts = facts | setting_of(words)
        current: Row = {}
        zero: dict[str, float] = {}
        for cells in body:
            cell = dict(zip(header, cells, strict=True))
            if header[0] != "Method" and cells[0]:
                current = scenario(facts["setting"], cells[0])
            row = facts | current | {"method": METHODS[cell["Method"]]}
            printed = {DATASETS.get(c, "avg"): number(cell[c]) for c in header if c in DATASETS or c == "Avg."}
            values = {column: value for column, (value, _) in printed.items()}
            zero = zero or values  # the first row
            if changes:
                for column, (value, change) in printed.items():
                    check(label, row, f"change of {column}", change, value - zero[column])
            yield row | averaged(label, row, values)


def averaged(label: str, row: Row, values: dict[str, float]) -> Row:
    """Return values and their printed average apart, the average checked."""
    values = dict(values)
    avg = values.pop("avg", None)
    if avg is None:
        return {"values": values}
    check(label, row, "average", avg, sum(values.values()) / len(values))
    return {"values": values, "avg": avg}


def check(label: str, row: Row, what: str, printed: float, computed: float) -> None:
    if abs(printed - computed) > 0.1 + 1e-9:
        facts = " ".join(str(row[key]) for key in ("backbone", "batch_size", "scenario", "method") if key in row)
        print(f"{label}: {facts}: {what} printed {printed:+.1f}, computed {computed:+.1f}")


def by_scenario(tex: str, label: str) -> Iterator[Row]:
    for words, (header, *body) in tabulars(tex, label):
        facts = (ONLINE if "Online" in words else BATCH) | setting_of(words) | {"method": "moon"}
        for name, *cells in body:
            row = facts | {"options": {"beta": "soft" if "soft" in name else "hard"}}
            columns = [column.lower().replace(" ", "_").replace("avg.", "avg") for column in header[1:]]
            yield row | averaged(label, row, {c: float(v) for c, v in zip(columns, cells, strict=True)})


def confidences(tex: str, label: str) -> Iterator[Row]:
    ((_, (_, *body)),) = tabulars(tex, label)
    imbalance = ""
    for name, *cells in body:
        if not cells:
            imbalance = name.split()[0].lower()
            continue
        row: Row = {"backbone": "clip_vit_b16", "imbalance": imbalance, "method": "moon"}
        row["options"] = {"confidence": CONFIDENCE[name]}
        values = {c: float(v) for c, v in zip(("task_1", "task_2", "task_3", "avg"), cells, strict=True)}
        yield row | averaged(label, row, values)


def alphas(tex: str, label: str) -> Iterator[Row]:
    ((_, (header, imagenet, average)),) = tabulars(tex, label)
    facts = BATCH | {"batch_size": 1000} | scenario("batch", "Medium") | {"method": "moon"}
    for name, value, avg in zip(header[1:], imagenet[1:], average[1:], strict=True):
        yield facts | {"options": {"alpha": ALPHA[name]}, "values": {"imagenet": float(value)}, "avg": float(avg)}


def ablation(tex: str, label: str) -> Iterator[Row]:
    ((_, (_, *body)),) = tabulars(tex, label)
    for *marks, small, large in body:
        options = {name: ABLATED[name] for name, mark in zip(ABLATED, marks, strict=True) if mark == r"\ding55"}
        for size, avg in ((64, small), (1000, large)):
            yield BATCH | {"batch_size": size, "method": "moon", "options": options, "avg": float(avg)}


def variants(tex: str, label: str) -> Iterator[Row]:
    ((_, (_, _, *body)),) = tabulars(tex, label)
    for name, *cells in body:
        for facts, avg in zip((BATCH | {"batch_size": 64}, BATCH | {"batch_size": 1000}, ONLINE), cells, strict=True):
            yield facts | {"method": METHODS[name], "avg": float(avg)}


def scaling(tex: str, label: str) -> Iterator[Row]:
    ((_, (_, (_, _, *methods), *body)),) = tabulars(tex, label)
    for name, _, *cells in body:
        (zero, _), (ours, change), (zero_avg, _), (ours_avg, change_avg) = map(number, cells)
        row = BATCH | {"backbone": BACKBONES[name], "batch_size": 1000}
        check(label, row, "change of imagenet", change, ours - zero)
        check(label, row, "change of avg", change_avg, ours_avg - zero_avg)
        for method, value, avg in ((methods[0], zero, zero_avg), (methods[1], ours, ours_avg)):
            yield row | {"method": METHODS[method], "values": {"imagenet": value}, "avg": avg}


def runtime(tex: str, label: str) -> Iterator[Row]:
    ((_, (header, iterations, *body)),) = tabulars(tex, label)
    for size, *cells in body:
        for name, rounds, seconds in zip(header[1:], iterations[1:], cells, strict=True):
            row = {"dataset": "imagenet", "batch_size": count(size), "method": METHODS[name]}
            yield row | ({"iterations": int(rounds)} if rounds else {}) | {"seconds": float(seconds)}


def models(tex: str, label: str) -> Iterator[Row]:
    ((_, (_, *body)),) = tabulars(tex, label)
    for family, name, _, parameters, flops, resolution, data in body:
        yield {
            "backbone": BACKBONES[name],
            "family": family,
            "name": name,
            "parameters": count(parameters),
            "gflops": float(flops),
            "resolution": int(resolution.split("x")[0]),
            "pretrained": data,
        }


def datasets(tex: str, label: str) -> Iterator[Row]:
    ((_, (_, *body)),) = tabulars(tex, label)
    for name, other, classes, samples, description, template in body:
        yield {
            "dataset": DATASETS[name],
            "name": name,
            "other_name": other,
            "classes": count(classes),
            "samples": count(samples),
            "description": description,
            "template": template.strip('"').replace("[ ]", "{}"),
        }


def tables(tex: str) -> Iterator[tuple[str, str, list[Row]]]:
    """Give the file name, the title and the rows of every table."""
    means = "mean over datasets and scenarios"
    clips = [
        *results(tex, "tab:app-more-clip-batch-64", BATCH | {"batch_size": 64}),
        *results(tex, "tab:app-more-clip-batch-1000", BATCH | {"batch_size": 1000}),
        *results(tex, "tab:app-more-clip-online", ONLINE),
    ]
    vlms = [
        row
        for name, label in (("openclip", "openclip"), ("siglip", "siglip"), ("eva_clip", "evalip"))
        for row in results(tex, f"tab:app-more-vlm-{label}", BATCH | {"backbone": name})
    ]
    every_class = {"backbone": "clip_vit_b16", "setting": "batch"}
    random = BATCH | scenario("batch", "Random")
    sample_wise = ONLINE | scenario("online", "Medium")
    yield "main-batch", "Batch adaptation", list(results(tex, "tab:main-batch", BATCH))
    yield "main-online", "Online adaptation", list(results(tex, "tab:main-online", ONLINE))
    yield "batch-sizes", "Batch adaptation at other batch sizes", list(results(tex, "tab:app-more-bs", BATCH))
    yield "backbones", "Four more CLIP backbones", clips
    yield "vlms", "Three more vision-language models", vlms
    yield "scaling", "All backbones, mean over scenarios", list(scaling(tex, "tab:vlm-scaling"))
    yield "models", "The vision-language models", list(models(tex, "tab:app-vlm-arch"))
    yield "all-classes", "The whole test set at once", list(results(tex, "tab:app-all-dataset", every_class))
    yield "random-classes", "Any number of classes", list(results(tex, "tab:app-random-classes", random))
    yield "ablation", f"MOON without one of its parts, {means}", list(ablation(tex, "tab:ablation"))
    yield "alpha-design", "MOON's anchor weight alpha_k", list(alphas(tex, "tab:alpha-design"))
    yield "lambda-design", "MOON's class confidence lambda_k", list(confidences(tex, "tab:lambda-design"))
    yield "beta", "MOON's counts in beta_k", list(by_scenario(tex, "tab:beta_k"))
    yield "variants", f"Gaussian against von Mises-Fisher, {means}", list(variants(tex, "tab:gmm"))
    yield "sample-wise", "MOON one sample at a time", list(results(tex, "tab:sample-wise", sample_wise, False))
    yield "runtime", "Seconds per batch", list(runtime(tex, "tab:runtime"))
    yield "datasets", "The datasets", list(datasets(tex, "tab:dataset"))


def toml(value: Any) -> str:
    """Return a value as TOML; a dictionary becomes an inline table."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }" if value else "{}"
    return json.dumps(value, ensure_ascii=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn the tables of the MOON paper into TOML.")
    parser.add_argument("tex", type=Path, help="the LaTeX source of the paper")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    options = parser.parse_args()
    for name, title, rows in tables(options.tex.read_text(encoding="utf-8")):
        lines = ["# Written by transcribe.py; do not edit.", f"title = {toml(title)}"]
        for row in rows:
            lines += ["", "[[row]]", *(f"{key} = {toml(value)}" for key, value in row.items())]
        path = options.out / f"{name}.toml"
        draft = path.with_suffix(".tmp")
        draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
        draft.replace(path)


if __name__ == "__main__":
    main()
