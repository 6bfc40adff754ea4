import numpy as np
import pytest

from moontide.bench.data import find_data, identify, read_pack
from moontide.errors import FileError
from moontide.store.features import FeatureStore, Origin


def test_a_folder_holds_files_and_stores(features):
    text = np.eye(3, dtype=np.float32)
    store = FeatureStore.create(features / "pets", Origin("openai/clip-vit-base-patch16", "none", ("{}",)), "abc", text)
    store.append(["1", "2"], text[:2], [0, 1])
    (features / "notes.txt").write_text("left out")
    assert [path.name for path in find_data(features)] == ["pets", "toy_vitb32.npz"]
    assert find_data(features / "pets") == [features / "pets"]
    pets, toy = map(read_pack, find_data(features))
    assert (pets.dataset, pets.backbone) == ("oxford_pets", "clip_vit_b16")
    assert (toy.dataset, toy.backbone, toy.logit_scale) == ("toy", "clip_vit_b32", 10.0)
    assert np.array_equal(pets.task(np.asarray([1, 0])).features, text[[1, 0]])
    assert toy.task(np.asarray([5])).n == 1


def test_the_hash_is_of_the_contents_not_of_the_file(features, tmp_path):
    path = features / "toy_vitb32.npz"
    held = dict(np.load(path))
    np.savez_compressed(tmp_path / "other_name.npz", **held)
    changed = {**held, "labels": held["labels"][::-1]}
    np.savez(tmp_path / "changed.npz", **changed)
    hashes = [read_pack(p).hash for p in (path, tmp_path / "other_name.npz", tmp_path / "changed.npz")]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("stem", "found"),
    [
        ("imagenet_clip_vit_l14", ("imagenet", "clip_vit_l14")),
        ("imagenet_clip_vitb16", ("imagenet", "clip_vit_b16")),
        ("DTD_RN50", ("dtd", "clip_rn50")),
        ("pets24_vitb32", ("oxford_pets", "clip_vit_b32")),  # 24 of its classes
        ("fgvc_aircraft", ("fgvc_aircraft", None)),
        ("food-101_siglip", ("food101", "siglip")),
    ],
)
def test_file_names_say_dataset_and_backbone(stem, found):
    assert identify(stem) == found


def test_features_without_labels_cannot_be_scored(tmp_path):
    np.savez(tmp_path / "a.npz", image_features=np.eye(2), text_features=np.eye(2))
    with pytest.raises(FileError, match=r"a\.npz has no labels to score with"):
        read_pack(tmp_path / "a.npz")


def test_a_folder_without_features_is_refused(tmp_path):
    with pytest.raises(FileError, match="It holds none"):
        find_data(tmp_path)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(b"")
    with pytest.raises(FileError, match="encode them into a store first"):
        find_data(tmp_path)
