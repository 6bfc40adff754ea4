"""`moontide export`: the two towers of an encoder as ONNX files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moontide.cli.common import note
from moontide.cli.output import emit
from moontide.encoders.base import DEFAULT


def export(
    *,
    encoder: Annotated[
        str,
        Parameter(help="A hub id or folder, openclip:ARCH/TAG or openclip:ARCH/CHECKPOINT."),
    ] = DEFAULT,
    out: Annotated[Path, Parameter(help="A new folder.")],
) -> None:
    """Write an encoder as ONNX files, which then run without torch as --encoder onnx:FOLDER.

    The export is compared with the model before it is kept: its vectors differ by 1e-4 at most. For example:

        moontide export --encoder openai/clip-vit-base-patch32 --out clip-b32/
        moontide encode photos/ --out store/ --encoder onnx:clip-b32/
    """
    from moontide.encoders import encoder as make
    from moontide.encoders import onnx

    made = onnx.export(make(encoder), out)
    emit(out=out, encoder=made.id, dim=made.dim)
    note(f"wrote {out}: {made.id}, {made.dim} dimensions")
