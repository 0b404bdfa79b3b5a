"""The tower of other weights, read beside steps and used from one of them on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.model.tensors_again import default_type_of_this_thread
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


def reader_of(images: EncodedImages, served: Path) -> Callable[[Path], OtherTower]:
    """Function that reads the tower of another version; ``served``: the model's own directory."""

    def read(directory: Path) -> OtherTower:
        tower = images.tower
        with default_type_of_this_thread():
            return OtherTower(images, load_tower(served, tower.dtype, tower.device, directory))

    return read
