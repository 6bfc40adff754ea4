"""Time of the towers of CLIP, for the runtime table; the weights are random, as they do not affect the time.

    scripts/bench clip_forward --device cuda
    scripts/bench clip_forward --device cuda --out forward.csv    # for `scripts/bench paper --forward forward.csv`

The images are noise of the right shape, on the device already; the texts are 77 tokens for each of 1000 classes. Images
are not read and decoded in that time.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

CLASSES, TOKENS, PART = 1000, 77, 256


def seconds(call: Any, device: str) -> float:
    """Return the least time of three calls after a first one."""
    import torch

    best = float("inf")
    for repeat in range(4):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat:
            best = min(best, time.perf_counter() - start)
    return best


def main() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 1000, 50000])
    parser.add_argument("--patch", type=int, choices=[16, 32], default=16, help="16 for ViT-B/16, 32 for ViT-B/32")
    parser.add_argument("--out", type=Path, help="a .csv file for `scripts/bench paper --forward`")
    args = parser.parse_args()
    try:
        import torch
        from transformers import CLIPConfig, CLIPModel
    except ImportError:
        return "It needs torch and transformers: pip install 'moontide[hf]'."
    model = CLIPModel(CLIPConfig(vision_config={"patch_size": args.patch})).to(args.device).eval()
    images = torch.rand(PART, 3, 224, 224, device=args.device)
    tokens = torch.randint(1, 40_000, (CLASSES, TOKENS), device=args.device)

    def texts() -> None:
        for start in range(0, CLASSES, PART):
            model.get_text_features(input_ids=tokens[start : start + PART])

    print("| N | images s | 1000 texts s | together s |\n| --- | --- | --- | --- |")
    lines = ["images,seconds"]
    half = torch.float16 if args.device == "cuda" else torch.bfloat16
    with torch.inference_mode(), torch.autocast(args.device, half, enabled=args.device == "cuda"):
        written = seconds(texts, args.device)
        for n in args.sizes:

            def pictures(n: int = n) -> None:
                for start in range(0, n, PART):
                    model.get_image_features(pixel_values=images[: min(PART, n - start)])

            seen = seconds(pictures, args.device)
            print(f"| {n:,} | {seen:.3f} | {written:.3f} | {seen + written:.3f} |", flush=True)
            lines.append(f"{n},{seen + written:.6f}")
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    sys.exit(main())
