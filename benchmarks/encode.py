"""Speed of encoding images, compared with the usual recipe: a torch DataLoader with one process per core.

    scripts/bench encode [--images 32768] [--rounds 1] [--device cuda] [--model base|small] [--kinds default]
                        [--out encode.json]

Everything is made here: JPEG files of 500 x 375 (smooth noise with grain, about 70 kB), and a CLIP ViT-B/16 with random
weights, which computes as much as a trained one. Each round runs the recipe, the default and, on a GPU, `--fast`, one
after the other, so that all see the same machine; the model alone runs before and after each. Each of them encodes a
quarter of the images first, n' in t' seconds, then all of them, n in t seconds:

    steady   images per second of what is more in the long pass: (n - n') / (t - t')
    start    seconds that any pass takes besides: processes, pinned memory, the first batch, the last one

Neither depends on what is decoded ahead: a DataLoader of 16 processes brings 16 batches at once, so that the speed in a
window of a short pass says nothing. The numbers of images are whole multiples of that on a GPU. On a CPU, whose cores
others may want too, the share of the model's own speed is the median over rounds, and the same of CPU time, which
does not depend on other programs: the CPU time of the model alone for an image over that of the pass, all processes.

The recipe is what a careful user writes: a Dataset that opens, converts, resizes and crops with Pillow and returns
8-bit pixels, a DataLoader with pinned memory, and the model in half precision on a GPU.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from moontide.encoders.base import TorchEncoder, cores
from moontide.encoders.pipeline import default_workers, encode_files
from moontide.encoders.places import ImageFile
from moontide.encoders.runtimes import settle
from moontide.encoders.steps import BICUBIC, Steps, photographs
from moontide.encoders.timing import measure as measure_parts
from moontide.encoders.timing import prepared, run_model

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
ALONE = 3.0  # seconds that the model runs alone
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


def run_recipe(encoder: RandomCLIP, images: list[ImageFile], batch: int) -> None:
    """Embed images as the recipe does."""
    device, half = encoder.device, torch.float16 if encoder.device == "cuda" else torch.float32
    model = encoder._half if device == "cuda" else encoder.model
    mean, std = (torch.tensor(v, device=device, dtype=half)[:, None, None] for v in (MEAN, STD))
    loader = torch.utils.data.DataLoader(
        Recipe([image.path for image in images]),
        batch,
        num_workers=default_workers(device),
        pin_memory=device == "cuda",
    )
    with torch.inference_mode():
        for pixels in loader:
            moved = pixels.to(device, non_blocking=True).permute(0, 3, 1, 2).to(half) / 255
            with torch.autocast(device, torch.bfloat16, enabled=encoder.precision == "bfloat16"):
                rows = model.get_image_features(pixel_values=(moved - mean) / std).pooler_output
            torch.nn.functional.normalize(rows.float()).cpu()


class Pass(NamedTuple):
    """What a pass over images took."""

    images: int
    seconds: float
    cpu: float  # seconds, of this process and those that it started


def timed(images: int, run: Callable[[], Any]) -> Pass:
    def cpu() -> float:
        return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

    before, start = cpu(), time.perf_counter()
    run()
    return Pass(images, time.perf_counter() - start, cpu() - before)


class Alone(NamedTuple):
    """The model without anything else, on images that are prepared already."""

    images_per_second: float
    cpu: float  # seconds an image


def run_alone(encoder: RandomCLIP, batch: list[Any]) -> Alone:
    done: list[int] = []
    encoder.launch(batch)()
    found = timed(0, lambda: done.append(run_model(encoder, batch, ALONE)))
    return Alone(done[0] / found.seconds, found.cpu / done[0])


def measure(kind: str, encoder: RandomCLIP, images: list[ImageFile], given: argparse.Namespace) -> dict[str, Any]:
    """Run one kind over a quarter of the images and over all of them, with the model alone before and after."""
    batch = given.batch or encoder.batch_size
    how: dict[str, Any] = {"batch_size": batch, "workers": given.workers, "fast": kind == "fast"}

    def run(some: list[ImageFile]) -> None:
        if kind == "recipe":
            run_recipe(encoder, some, batch)
        else:
            deque(encode_files(encoder, some, **how), maxlen=0)

    quarter = images[: len(images) // 4]
    whole = prepared(encoder, images, batch)
    alone = [run_alone(encoder, whole)]
    short, long = (timed(len(some), partial(run, some)) for some in (quarter, images))
    alone.append(run_alone(encoder, whole))
    model = 2 / sum(1 / one.images_per_second for one in alone)
    more, seconds = long.images - short.images, max(long.seconds - short.seconds, 1e-9)
    steady = more / seconds
    return {
        "kind": kind, "steady": steady, "start": short.seconds - short.images / steady, "model": model,
        "share": steady / model, "cpu_share": min(one.cpu for one in alone) * more / (long.cpu - short.cpu),
        "passes": [short._asdict(), long._asdict()],
    }  # fmt: skip


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
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=list(SIZES), default="base")
    parser.add_argument("--kinds", nargs="+", choices=["recipe", "default", "fast"])
    parser.add_argument("--workers", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    given.images = given.images or (32_768 if on_gpu else 128)
    encoder = RandomCLIP(given.model, given.device)
    print(settle(encoder) or f"images are embedded in {encoder.precision}")
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{name}, {cores()} cores, {given.model}, torch {torch.__version__}")
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        images = make_images(Path(folder), given.images)
        kinds = ["recipe", "default", *(["fast"] if encoder.decodes_jpeg else [])]
        kinds = [kind for kind in kinds if kind in (given.kinds or kinds)]
        if on_gpu and not encoder.decodes_jpeg:
            print("torchvision has no nvjpeg here: --fast decodes as the default does")
        for number in range(given.rounds or (1 if on_gpu else 3)):
            for kind in kinds:
                lines.append({"round": number, **(found := measure(kind, encoder, images, given))})
                passes = ", ".join(f"{one['images']} in {one['seconds']:.2f} s" for one in found["passes"])
                print(
                    f"{kind}: {found['steady']:.1f} images/s steady, start {found['start']:.2f} s ({passes}); "
                    f"model alone {found['model']:.1f} images/s, share {found['share']:.2f}, "
                    f"in CPU time {found['cpu_share']:.2f}",
                    flush=True,
                )
        parts = measure_parts(
            encoder, images[: max(len(images) // 4, 1)], batch_size=given.batch, workers=given.workers
        )
        print(parts.table())
        print("smallest cosine to float32 and Pillow:", close := closeness(encoder, Path(folder), "fast" in kinds))
    print_table(lines, kinds)
    if given.out is not None:
        about = {"device": name, "cores": cores(), "model": given.model, "precision": encoder.precision}
        given.out.write_text(json.dumps({**about, "cosines": close, "runs": lines}, indent=1))


def print_table(lines: list[dict[str, Any]], kinds: list[str]) -> None:
    """Print the medians over the rounds."""

    def median(kind: str, name: str) -> float:
        return float(np.median([line[name] for line in lines if line["kind"] == kind]))

    def ratio(kind: str) -> str:
        """Return the speed over that of the recipe in the same round."""
        speeds = [{line["round"]: line["steady"] for line in lines if line["kind"] == k} for k in (kind, "recipe")]
        return f"{np.median([speeds[0][i] / speeds[1][i] for i in speeds[0]]):.2f}" if speeds[1] else ""

    few, many = (one["images"] for one in lines[0]["passes"])
    print(f"\n| what | images/s, steady | start, s | {few} images, s | {many} images, s | of the recipe | of the model "
          "alone | the same in CPU time |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for kind in kinds:
        short, long = (np.median([o["passes"][i]["seconds"] for o in lines if o["kind"] == kind]) for i in (0, 1))
        print(
            f"| {kind} | {median(kind, 'steady'):.1f} | {median(kind, 'start'):.2f} | {short:.2f} | {long:.2f} | "
            f"{ratio(kind)} | {median(kind, 'share'):.2f} | {median(kind, 'cpu_share'):.2f} |"
        )
    print(f"| model alone | {np.median([line['model'] for line in lines]):.1f} | | | | | 1.00 | |")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
