"""How fast images are encoded, beside the usual recipe: a torch DataLoader with one process a core.

    scripts/bench encode [--images 40000] [--rounds 1] [--device cuda] [--model base|small] [--out encode.json]

Everything is made here: JPEG files of 500 x 375 (smooth noise with grain, about 70 kB), and a CLIP ViT-B/16 with random
weights, which computes as much as a trained one. Each round runs the recipe, the default and, on a GPU, `--fast`, one
after the other, so that all see the same machine. Speeds are steady ones, without the first tenth of the images; the
start, of processes above all, is in the other figure. A DataLoader of 16 processes brings 16 batches at once, so that a
few thousand images are too few to see its steady speed.

The recipe is what a careful user writes: a Dataset that opens, converts, resizes and crops with Pillow and returns
8-bit pixels, a DataLoader with pinned memory, and the model in half precision on a GPU.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from moontide.encoders.base import TorchEncoder, cores
from moontide.encoders.pipeline import encode_files
from moontide.encoders.places import ImageFile
from moontide.encoders.steps import BICUBIC, Steps, photographs
from moontide.encoders.timing import measure

try:
    if torch.__version__.endswith("+cpu") and not version("torchvision").endswith("+cpu"):
        # The torchvision of the package index is built for CUDA; beside a CPU build of torch it only lacks these two.
        OPERATORS = torch.library.Library("torchvision", "DEF")
        OPERATORS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        OPERATORS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
except PackageNotFoundError:
    pass

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIZES = {  # width, layers, heads, patch
    "base": (768, 12, 12, 16),
    "small": (384, 12, 6, 32),  # for a quick look on a CPU
}
DISTINCT = 256  # files; the list of images goes through them again and again


class RandomCLIP(TorchEncoder):
    """A CLIP model of random weights, with CLIP's preprocessing."""

    id, preprocessing, logit_scale = "random CLIP", "CLIP's", 100.0
    steps = Steps(224, (224, 224), BICUBIC, MEAN, STD)

    def __init__(self, model: str, device: str, precision: str = "auto") -> None:
        from transformers import CLIPConfig, CLIPModel

        width, layers, heads, patch = SIZES[model]
        vision = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
                  "num_attention_heads": heads, "patch_size": patch, "image_size": 224}  # fmt: skip
        torch.manual_seed(0)
        made = CLIPModel(CLIPConfig(text_config={"num_hidden_layers": 1}, vision_config=vision))
        self.model = made.eval().requires_grad_(False).to(device)
        self.visual, self.dim = self.model.vision_model, int(made.config.projection_dim)
        self.device, self.asked = device, precision

    def embed_images(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run the image tower."""
        pooled: torch.Tensor = model.get_image_features(**inputs).pooler_output
        return pooled

    def _text(self, prompts: Sequence[str]) -> Any:
        raise NotImplementedError("only images are measured")


def make_images(folder: Path, count: int) -> list[ImageFile]:
    rng = np.random.default_rng(0)
    for i in range(min(count, DISTINCT)):
        smooth = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize((500, 375), BICUBIC)
        grain = np.asarray(smooth, dtype=np.float32) + rng.normal(0, 8, (375, 500, 3))
        Image.fromarray(grain.clip(0, 255).astype(np.uint8)).save(folder / f"{i:04d}.jpg", quality=90)
    return [ImageFile(f"{i:06d}", folder / f"{i % DISTINCT:04d}.jpg") for i in range(count)]


class Recipe(torch.utils.data.Dataset):  # type: ignore[misc]
    """Pillow and nothing else."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> torch.Tensor:
        image = Image.open(self.paths[i]).convert("RGB")
        scale = 224 / min(image.size)
        image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BICUBIC)
        left, top = (image.width - 224) // 2, (image.height - 224) // 2
        return torch.from_numpy(np.array(image.crop((left, top, left + 224, top + 224))))


def run_recipe(encoder: RandomCLIP, images: list[ImageFile], batch: int) -> tuple[float, float]:
    """Return images per second in the steady state, and with the start."""
    device, half = encoder.device, torch.float16 if encoder.device == "cuda" else torch.float32
    model = encoder._half if device == "cuda" else encoder.model
    mean, std = (torch.tensor(v, device=device, dtype=half)[:, None, None] for v in (MEAN, STD))
    workers = cores() if device == "cuda" else max(1, cores() // 2)
    begun = time.perf_counter()
    loader = torch.utils.data.DataLoader(
        Recipe([image.path for image in images]), batch, num_workers=workers, pin_memory=device == "cuda"
    )
    arrivals: list[tuple[float, int]] = []
    with torch.inference_mode():
        for pixels in loader:
            moved = pixels.to(device, non_blocking=True).permute(0, 3, 1, 2).to(half) / 255
            rows = model.get_image_features(pixel_values=(moved - mean) / std).pooler_output
            torch.nn.functional.normalize(rows.float()).cpu()
            arrivals.append((time.perf_counter(), len(rows) + (arrivals[-1][1] if arrivals else 0)))
    first = next(i for i, (_, n) in enumerate(arrivals) if n >= arrivals[-1][1] / 10)
    first = min(first, len(arrivals) - 2)
    steady = (arrivals[-1][1] - arrivals[first][1]) / (arrivals[-1][0] - arrivals[first][0])
    return steady, arrivals[-1][1] / (arrivals[-1][0] - begun)


def cosines(a: Any, b: Any) -> float:
    return float((a * b).sum(axis=1).min())


def closeness(encoder: RandomCLIP, folder: Path, fast: bool) -> dict[str, float]:
    """Compare the vectors of files with those of Pillow's resizing in float32, one image at a time."""
    (folder / "photos").mkdir(exist_ok=True)
    files = sorted(folder.glob("*.jpg"))[:32]
    for i, image in enumerate(photographs()):
        image.resize((500, 375)).save(folder / "photos" / f"{i}.jpg", quality=95)
    files += sorted((folder / "photos").glob("*.jpg"))
    pictures = [Image.open(io.BytesIO(path.read_bytes())).convert("RGB") for path in files]
    exact = encoder._unit([encoder._embedded([encoder.prepare(p) for p in pictures], "float32")], "images")
    found = {}
    for name, how in (("default", False), ("fast", True)):
        if fast or not how:
            parts = encode_files(encoder, [ImageFile(str(i), path) for i, path in enumerate(files)], fast=how)
            found[name] = cosines(np.concatenate([part.features for part in parts]), exact)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=list(SIZES), default="base")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.images = given.images or (40_000 if given.device == "cuda" else 400)
    encoder = RandomCLIP(given.model, given.device)
    batch = given.batch or encoder.batch_size
    name = torch.cuda.get_device_name() if given.device == "cuda" else f"{cores()} cores"
    print(f"{name}, {cores()} cores, {given.model}, torch {torch.__version__}, images in {encoder.precision}")
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        images = make_images(Path(folder), given.images)
        kinds = ["recipe", "default", *(["fast"] if encoder.decodes_jpeg else [])]
        if given.device == "cuda" and "fast" not in kinds:
            print("torchvision has no nvjpeg here: --fast decodes as the default does")
        for number in range(given.rounds):
            for kind in kinds:
                if kind == "recipe":
                    steady, whole = run_recipe(encoder, images, batch)
                    told = {}
                else:
                    found = measure(encoder, images, batch_size=batch, workers=given.workers, fast=kind == "fast")
                    steady, whole, told = found.steady, found.images / found.seconds, {"model": found.model}
                    print(found.table())
                lines.append({"round": number, "kind": kind, "steady": steady, "with_start": whole, **told})
                print(f"== {kind}: {steady:.0f} images/s steady, {whole:.0f} with the start", flush=True)
        print("smallest cosine to float32 and Pillow:", close := closeness(encoder, Path(folder), "fast" in kinds))
    best = {kind: max(line["steady"] for line in lines if line["kind"] == kind) for kind in kinds}
    model = max(line.get("model", 0.0) for line in lines)
    print("\n| what | images/s | of the recipe | of the model alone |\n|---|---|---|---|")
    for kind, speed in {**best, "model alone": model}.items():
        print(f"| {kind} | {speed:.0f} | {speed / best['recipe']:.2f} | {speed / model:.2f} |")
    if given.out is not None:
        about = {"device": name, "cores": cores(), "model": given.model, "batch": batch, "precision": encoder.precision}
        given.out.write_text(json.dumps({**about, "cosines": close, "runs": lines}, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
