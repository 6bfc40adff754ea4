"""Which files are taken, which are left out by rule, and which are named as skipped."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from moontide.encoders.places import ImageFile
from moontide.encoders.sources import list_images
from moontide.errors import FileError, ImageError


def make(path: Path, colour: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)
    return path


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder 'photos', with the working directory beside it."""
    monkeypatch.chdir(tmp_path)
    for name in ("b.jpg", "cats/a.png", "cats/deep/c.JPEG", ".hidden.jpg", ".git/d.jpg", "cats/.thumbs/e.jpg"):
        make(Path("photos") / name)
    Path("photos/notes.txt").write_text("b.jpg")
    return Path("photos")


def ids(*paths: str | Path, **options: object) -> list[str]:
    return [image.id for image in list_images(paths, **options).images]


def skips(*paths: str | Path, **options: object) -> dict[str, str]:
    return {skip.id: skip.reason for skip in list_images(paths, **options).skipped}


def test_a_folder_is_walked_without_hidden_and_other_files(photos: Path) -> None:
    assert ids(photos) == ["photos/b.jpg", "photos/cats/a.png", "photos/cats/deep/c.JPEG"]
    assert ids("./photos/") == ids(photos)
    assert not skips(photos)
    assert list_images([photos]).images[0].read().getpixel((0, 0))[0] > 200


def test_links_that_leave_the_folder_are_named_and_not_followed(photos: Path) -> None:
    make(Path("outside/secret.jpg"))
    (photos / "inside.jpg").symlink_to("b.jpg")
    (photos / "leaves.jpg").symlink_to(Path("../outside/secret.jpg"))
    (photos / "folder").symlink_to(Path("outside").resolve())
    (photos / "loop").symlink_to(".")
    (photos / "self.jpg").symlink_to("self.jpg")
    found = ["photos/b.jpg", "photos/inside.jpg", "photos/self.jpg", "photos/cats/a.png", "photos/cats/deep/c.JPEG"]
    assert ids(photos) == found
    assert skips(photos) == {
        "photos/folder": "it is a link to a folder, which is not followed",
        "photos/loop": "it is a link to a folder, which is not followed",
        "photos/leaves.jpg": "it is a link that leaves photos",
    }
    with pytest.raises(ImageError, match="it cannot be read"):
        list_images([photos]).images[2].read()
    assert skips("photos/*.jpg") == {"photos/leaves.jpg": "it is a link that leaves photos"}
    Path("album").symlink_to("photos")
    assert "album/b.jpg" in ids("album")  # what the user names may itself be a link


def test_patterns_single_files_and_duplicates(photos: Path) -> None:
    assert ids("photos/*.jpg") == ["photos/b.jpg"]
    assert ids("photos/**/*.png") == ["photos/cats/a.png"]
    assert ids("photos/c*") == ["photos/cats/a.png", "photos/cats/deep/c.JPEG"]
    assert ids("photos/b.jpg", "photos", "photos/*.jpg") == ids("photos")
    with pytest.raises(FileError, match=r"Nothing matches photos/\*\.bmp"):
        list_images(["photos/*.bmp"])
    with pytest.raises(FileError, match="There is no file or folder nowhere"):
        list_images(["nowhere"])
    os.mkdir("empty")
    with pytest.raises(FileError, match="There are no images in empty"):
        list_images(["empty"])


@pytest.mark.parametrize("kind", ["txt", "csv", "parquet"])
def test_lists_of_paths_stay_in_their_folder(photos: Path, kind: str) -> None:
    make(Path("secret.jpg"))
    paths = ["b.jpg", "cats/a.png", "../secret.jpg", str(Path("secret.jpg").resolve()), "missing.jpg",
             str((photos / "cats/deep/c.JPEG").resolve())]  # fmt: skip
    where = photos / f"list.{kind}"
    if kind == "txt":
        where.write_text("# a comment\n\n" + "\n".join(paths) + "\n")
    elif kind == "csv":
        where.write_text("label,path\n" + "".join(f'cat,"{path}"\n' for path in paths))
    else:
        pq = pytest.importorskip("pyarrow.parquet")
        import pyarrow as pa

        pq.write_table(pa.table({"label": ["cat"] * len(paths), "path": paths}), where)
    found = ids(where)
    assert found[:3] == ["photos/b.jpg", "photos/cats/a.png", "photos/missing.jpg"]
    assert found[3].endswith("/photos/cats/deep/c.JPEG")
    assert list(skips(where)) == ["secret.jpg", str(Path("secret.jpg").resolve())]
    assert all(reason == "it leaves the folder photos; name another with --root" for reason in skips(where).values())
    with pytest.raises(ImageError, match="No such file"):
        list_images([where]).images[2].read()
    assert "secret.jpg" not in skips(where, root=".")  # the user names the folder that paths may not leave
    assert ids(where, root=".")[0] == "b.jpg"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("list.csv", "file,label\na.jpg,cat\n", r"must have a column 'path'. It has 'file', 'label'"),
        ("list.csv", "", "must have a column 'path'. It has none"),
        ("list.csv", 'path\n"a.jpg\n', "cannot be read as .csv"),
        ("list.parquet", "PAR1 no", "cannot be read as .parquet"),
        ("list.tar", "no tar", "damaged, truncated or not a plain .tar"),
        ("list.tar.gz", "x", "compressed archive; unpack it"),
        ("list.zip", "x", "compressed archive; unpack it"),
    ],
)
def test_a_broken_list_is_a_sentence(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FileError, match=why):
        list_images([tmp_path / name])


def test_a_tar_is_read_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = make(tmp_path / "x.png", "blue").read_bytes()
    with tarfile.open("shard.tar", "w") as archive:
        for name in ("0001.png", "0001.cls", "cats/0002.png", "../../leaves.png", "/abs.png", "._0001.png", ".h/3.png"):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    found, skipped = list_images(["shard.tar"])
    assert [image.id for image in found] == ["shard.tar/0001.png", "shard.tar/cats/0002.png"]
    assert all(image.read().getpixel((3, 3)) == (0, 0, 255) for image in found)
    assert [tuple(skip) for skip in skipped] == [
        ("shard.tar: ../../leaves.png", "its path leaves the archive"),
        ("shard.tar: /abs.png", "its path leaves the archive"),
        ("shard.tar/link.png", "it is not a regular file of the archive"),
    ]
    cut = Path("shard.tar").read_bytes()
    Path("cut.tar").write_bytes(cut[:700])
    assert [image.id for image in list_images(["shard.tar"]).images] == [image.id for image in found]
    with pytest.raises(FileError, match="damaged, truncated"):
        list_images(["cut.tar"])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (image,) = list_images([tmp_path]).images
    with pytest.raises(ImageError, match="it is not a regular file"):
        image.read()


def test_a_file_of_many_bytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "big.jpg", "wb") as handle:
        handle.truncate(2**30)  # takes no space
    with pytest.raises(ImageError, match="1024 MiB, more than the 512"):
        ImageFile("big.jpg", tmp_path / "big.jpg").read()


def test_names_that_are_no_text_can_still_be_written(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/caf\xe9.png"
    with open(odd, "wb") as handle:
        handle.write(make(tmp_path / "a.png").read_bytes())
    found = list_images([tmp_path]).images
    assert [image.id.rpartition("/")[2] for image in found] == ["a.png", "caf\\xe9.png"]
    "".join(image.id for image in found).encode("utf-8")
    assert found[1].read().size == (8, 8)
