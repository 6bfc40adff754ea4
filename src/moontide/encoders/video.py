"""Frames of video files, every so many seconds; decoded by PyAV, the extra `video`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moontide.encoders.images import upright_rgb
from moontide.encoders.places import FrameImage, ImageFile, Skip, path_id
from moontide.errors import FileError, ImageError, missing_extra

if TYPE_CHECKING:
    from PIL.Image import Image

KINDS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg")
BEHIND = 5.0  # seconds that are rather decoded than jumped over


def frames_of(path: Path, step: float) -> Iterator[ImageFile | Skip]:
    """List the frames of a video, `step` seconds apart from 0 on; the id is the path and the time, clip.mp4#t=2.000."""
    seconds = _duration(path)
    for number in range(max(1, math.ceil(seconds / step - 1e-9))):
        time = number * step
        yield FrameImage(f"{path_id(path)}#t={time:.3f}", path, round(1000 * time))


def _duration(path: Path) -> float:
    with _open(path) as container:
        stream = container.streams.video[0]
        if stream.duration is not None:
            return float(stream.duration * stream.time_base)
        return 0.0 if container.duration is None else container.duration / 1e6


def _open(path: Path) -> Any:
    try:
        import av
    except ImportError:
        raise missing_extra("av", "video", "Reading video files") from None
    try:
        container = av.open(str(path))
    except (av.FFmpegError, OSError) as error:
        raise FileError(f"{path} cannot be read as a video ({error}).") from error
    if not container.streams.video:
        container.close()
        raise FileError(f"{path} has no pictures, only sound.")
    return container


class _Player:
    """A video that is read forwards; it jumps where the next frame is far ahead, or behind."""

    def __init__(self, path: Path) -> None:
        self.path, self.container = path, _open(path)
        self.stream = self.container.streams.video[0]
        self.stream.thread_type = "AUTO"
        self.frames = self.container.decode(self.stream)
        self.frame: Any = None  # the last one, which is shown until the next

    def at(self, seconds: float) -> Image:
        """Return the frame that is shown at a time."""
        now = -math.inf if self.frame is None else self.frame.time
        if (self.frame is not None and seconds < now) or seconds > max(now, 0) + BEHIND:
            self.container.seek(int(seconds / self.stream.time_base), stream=self.stream)
            self.frames, self.frame = self.container.decode(self.stream), None
        for frame in self.frames:
            if frame.time is not None and frame.time > seconds + 1e-6 and self.frame is not None:
                shown, self.frame = self.frame, frame
                return upright_rgb(shown.to_image())
            self.frame = frame
            if frame.time is not None and frame.time >= seconds - 1e-6:
                break
        if self.frame is None:
            raise ImageError("the video has no frame at that time")
        return upright_rgb(self.frame.to_image())


_last: list[_Player] = []  # of this process


def read_frame(path: Path, milliseconds: int) -> Image:
    """Return the frame of a video that is shown at a time."""
    import av

    try:
        if not _last or _last[0].path != path:
            _last[:] = [_Player(path)]
        return _last[0].at(milliseconds / 1000)
    except (av.FFmpegError, OSError, FileError) as error:
        _last.clear()
        if isinstance(error, ImageError):
            raise
        raise ImageError(f"its video cannot be decoded ({error})") from error
