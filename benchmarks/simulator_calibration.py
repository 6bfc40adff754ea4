"""Comparison of simulated features (`moontide.simulate`) with real ones: statistics of a pack and of a similar draw.

    python benchmarks/simulator_calibration.py --pack ../shared/features/imagenet1k_vitb32.npz

The constants of the simulator were fitted to the statistics of the ImageNet-1k pack. The last rows, MOON on both, were
not part of the fit, but were considered when choosing what makes some classes harder than others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from moontide import MOON
from moontide.samplers import BatchSampler
from moontide.simulate import Simulated, simulate


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def read_pack(path: Path) -> Simulated:
    with np.load(path) as pack:
        features, text = (unit(pack[name].astype(np.float32)) for name in ("image_features", "text_features"))
        return Simulated(features, text, pack["labels"].astype(np.int64), tuple(map(str, pack["classnames"])))


def spectrum(residuals: np.ndarray) -> tuple[float, list[float]]:
    """The effective rank (sum of eigenvalues)^2 / (sum of squares), and the share of the first 1, 10 and 50."""
    values = np.linalg.svd(residuals, compute_uv=False) ** 2
    return values.sum() ** 2 / np.sum(values**2), [values[:n].sum() / values.sum() for n in (1, 10, 50)]


def statistics(data: Simulated) -> dict[str, float]:
    f, t, y = data.features, data.text, data.labels
    rows, k = np.arange(len(f)), len(t)
    cosines = f @ t.T  # (N, K)
    true = cosines[rows, y]  # (N,)
    others = np.ma.masked_array(cosines, np.arange(k) == y[:, None])
    margin = true - others.max(axis=1)
    probs = np.exp(data.logit_scale * (cosines - cosines.max(axis=1, keepdims=True)))
    images = f @ f.T  # (N, N)
    same = y[:, None] == y
    between = images[~same]
    np.fill_diagonal(same, False)
    within = images[same]
    np.fill_diagonal(images, -1)
    texts = (t @ t.T)[~np.eye(k, dtype=bool)].reshape(k, k - 1)
    counts = np.bincount(y, minlength=k)
    class_margins = np.bincount(y, margin, k)[counts > 0] / counts[counts > 0]
    image_mean, text_mean = f.mean(axis=0), t.mean(axis=0)
    return {
        "zero-shot accuracy, %": 100 * np.mean(cosines.argmax(axis=1) == y),
        "zero-shot top-5 accuracy, %": 100 * np.mean(np.sum(cosines > true[:, None], axis=1) < 5),
        "mean largest zero-shot probability": np.mean(1 / probs.sum(axis=1)),
        "image-text cosine, true class": true.mean(),
        "image-text cosine, true class: spread": true.std(),
        "image-text cosine, other classes": others.mean(),
        "image-text cosine, other classes: spread": others.std(axis=1).mean(),
        "image-text cosine, best other class": others.max(axis=1).mean(),
        "margin: spread over images": margin.std(),
        "margin: spread over class means": class_margins.std(),
        "image-image cosine within a class": within.mean(),
        "image-image cosine within a class: spread": within.std(),
        "image-image cosine between classes": between.mean(),
        "image-image cosine between classes: spread": between.std(),
        "text-text cosine": texts.mean(),
        "text-text cosine: spread": texts.std(),
        "text-text cosine, nearest": texts.max(axis=1).mean(),
        "norm of the mean image": np.linalg.norm(image_mean),
        "norm of the mean text": np.linalg.norm(text_mean),
        "cosine of mean image and mean text": unit(image_mean) @ unit(text_mean),
        "image-image cosine, nearest": images.max(axis=1).mean(),
        "nearest image of the same class, %": 100 * np.mean(y[images.argmax(axis=1)] == y),
        **variances(f, t, y),
    }


def variances(f: np.ndarray, t: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return how features f (N, d) of classes y (N,) and texts t (K, d) vary, and in how many dimensions."""
    counts = np.bincount(y, minlength=len(t))
    sums = np.zeros_like(t)
    np.add.at(sums, y, f)
    centres = sums / np.maximum(counts, 1)[:, None]  # (K, d)
    seen = centres[counts > 0]
    residuals = f - centres[y]
    within_rank, within_shares = spectrum(residuals)
    centre_rank, centre_shares = spectrum(seen - seen.mean(axis=0))
    text_rank, text_shares = spectrum(t - t.mean(axis=0))
    # effective rank inside one class, from differences of two disjoint pairs of its images
    quads = np.array([f[np.flatnonzero(y == c)[:4]] for c in np.flatnonzero(counts >= 4)])  # (C, 4, d)
    first, second = quads[:, 0] - quads[:, 1], quads[:, 2] - quads[:, 3]
    class_rank = np.mean(np.sum(first**2, axis=1)) ** 2 / np.mean(np.sum(first * second, axis=1) ** 2)
    result = {
        "variance within classes": np.sum(residuals**2) / (len(f) - len(seen)),
        "effective rank within one class": class_rank,
        "effective rank within classes": within_rank,
        "effective rank of class centres": centre_rank,
        "effective rank of texts": text_rank,
    }
    for name, shares in (("within classes", within_shares), ("centres", centre_shares), ("texts", text_shares)):
        for top, share in zip((1, 10, 50), shares, strict=True):
            result[f"variance in the first {top}, {name}"] = share
    return result


def transduction(data: Simulated, batches: int) -> dict[str, float]:
    few = BatchSampler(64, effective_classes=(1, min(4, len(data.text))))
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(len(data.labels))
    one_each = shuffled[np.unique(data.labels[shuffled], return_index=True)[1]]
    protocols = {
        "64 images of 1-4 classes": [few.draw(data.labels, rng) for _ in range(batches)],
        "one image of every class": [one_each],
    }
    result = {}
    for name, drawn in protocols.items():
        scores = []
        for i in drawn:
            got = MOON().fit_predict(data.features[i], data.text, logit_scale=data.logit_scale)
            scores.append([100 * np.mean(x == data.labels[i]) for x in (got.zero_shot_labels, got.labels)])
        result[f"{name}: zero-shot, %"], result[f"{name}: MOON, %"] = np.mean(scores, axis=0)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parents[2] / "shared/features/imagenet1k_vitb32.npz"
    parser.add_argument(
        "--pack", type=Path, default=default, help="npz with image_features, text_features, labels, classnames"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the simulated draw")
    parser.add_argument("--batches", type=int, default=100, help="batches MOON runs on")
    args = parser.parse_args()
    if not args.pack.exists():
        raise SystemExit(f"There is no feature pack at {args.pack}; name one with --pack.")
    real = read_pack(args.pack)
    drawn = simulate(len(real.labels), len(real.text), dim=real.text.shape[1], seed=args.seed)
    columns = [statistics(data) | transduction(data, args.batches) for data in (real, drawn)]
    print(f"{'statistic':44}{'real':>10}{'simulated':>12}")
    for name in columns[0]:
        print(f"{name:44}{columns[0][name]:>10.4g}{columns[1][name]:>12.4g}")


if __name__ == "__main__":
    main()
