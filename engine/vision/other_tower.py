"""The tower of other weights, read beside steps and used from one of them on."""

from __future__ import annotations

from pathlib import Path

from engine.model.tensors_again import default_type_of_this_thread
from engine.model.weight_files import OpenFile
from engine.vision.encoded_images import EncodedImages
from engine.vision.tower import ImageTower, load_tower


class OtherTower:
    """A :class:`engine.kernels.other_weights.PreparedWeights` of an encoder of images."""

    def __init__(self, images: EncodedImages, tower: ImageTower) -> None:
        self._images = images
        self._tower = tower

    def __repr__(self) -> str:
        return f"<OtherTower for {self._images!r}>"

    def switch(self) -> None:
        """Encode by it from the next step on."""
        self._images.use(self._tower)

    def discard(self) -> None:
        """Nothing has it but this."""


class TowerReader:
    """A :class:`engine.weight_versions.shard_weights.PartBeside`: the encoder of images."""

    def __init__(self, images: EncodedImages, served: Path) -> None:
        """``served``: the model's own directory."""
        self._images = images
        self._served = served

    def __repr__(self) -> str:
        return f"<TowerReader for {self._images!r}>"

    @property
    def bytes_again(self) -> int:
        """Bytes that a second tower takes."""
        return self._images.tower.num_bytes

    def prepare(self, directory: Path, open_file: OpenFile) -> OtherTower:
        """Read the tower of another version."""
        tower = self._images.tower
        with default_type_of_this_thread():
            other = load_tower(
                self._served, tower.dtype, tower.computes, tower.device, weights=(directory, open_file)
            )
        other.share_weights()
        return OtherTower(self._images, other)
