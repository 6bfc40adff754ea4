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
    int8: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Use 8-bit multiplication in the image tower: faster on a CPU; the loss is printed.",
        ),
    ] = False,
) -> None:
    """Export an encoder to ONNX files, which run without torch as --encoder onnx:FOLDER.

    The export is compared with the model before it is kept: its vectors differ by at most 1e-4, except with --int8.
    The speeds of the export and of torch are printed, so that you can use the faster one. For example:

        moontide export --encoder openai/clip-vit-base-patch32 --out clip-b32/
        moontide export --encoder openai/clip-vit-base-patch32 --out clip-b32-int8/ --int8
        moontide encode photos/ --out store/ --encoder onnx:clip-b32/
    """
    from moontide.encoders import encoder as make
    from moontide.encoders import onnx

    about = onnx.export(make(encoder), out, int8)
    emit(out=out, about=str(about))
    note(f"wrote {out}: {about}")
