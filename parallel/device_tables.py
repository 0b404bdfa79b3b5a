"""Tables of an expert placement on a device, in memory that stays.

A captured graph reads them, so another placement of the same group needs no capture of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from parallel.replicas import Ints, Replicas


class DeviceTables:
    """Where experts are, by layer, for lookups without the host."""

    def __init__(self, replicas: Replicas, num_layers: int, device: torch.device) -> None:
        """``num_layers``: of the model, also where the placement is the same in all."""
        self._shape = num_layers, replicas.counts.shape[1], replicas.placement.num_ranks
        self._device = device
        self._local, self._held, self._counts, self._ranks = (
            [self._there(of_layer) for of_layer in array] for array in self._arrays(replicas)
        )

    def __repr__(self) -> str:
        return f"<DeviceTables of {self._shape[1]} experts in {self._shape[0]} layers>"

    def fill(self, replicas: Replicas) -> bool:
        """Hold another placement from the next step on; False if its group has another size."""
        if replicas.placement.num_ranks != self._shape[2]:
            return False
        tables = self._local, self._held, self._counts, self._ranks
        with torch.inference_mode():  # as in the step that made them
            for table, array in zip(tables, self._arrays(replicas), strict=True):
                for here, of_layer in zip(table, array, strict=True):
                    here.copy_(self._there(of_layer))
        return True

    def local(self, layer: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Local numbers of experts, and whether each is held here.

        Others get the number behind the last.
        """
        numbers = self._local[layer].index_select(0, ids.reshape(-1)).view(ids.shape)
        return numbers, numbers < self._held[layer]

    def serving(self, layer: int, ids: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`local` of experts [tokens, k], as far as this rank's copies serve them.

        See :mod:`parallel.replicas`; the tokens are those of all members, in a line.
        """
        total, top_k = ids.shape
        flat = ids.reshape(-1)
        places = torch.arange(total * top_k, device=ids.device) // top_k
        counts = self._counts[layer].index_select(0, flat)
        copies = torch.minimum(counts - 1, places * counts // max(total, 1))
        ranks = self._ranks[layer].index_select(0, flat * self._shape[2] + copies)
        is_mine = (ranks == rank).view(ids.shape)
        numbers, _ = self.local(layer, ids)
        return torch.where(is_mine, numbers, self._held[layer]), is_mine

    def _there(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self._device)

    def _arrays(self, replicas: Replicas) -> tuple[Ints, Ints, Ints, Ints]:
        layers, experts, ranks = self._shape
        held: Any = np.array([len(mine) for mine in replicas.mine], dtype=np.int64)[:, None]
        local = np.where(replicas.numbers < 0, held, replicas.numbers)
        missing = ranks - replicas.most_copies
        copies = np.concatenate([replicas.ranks, *[replicas.ranks[:, :, -1:]] * missing], axis=2)
        return (
            np.broadcast_to(local, (layers, experts)),
            np.broadcast_to(held, (layers, 1)),
            np.broadcast_to(replicas.counts, (layers, experts)),
            np.broadcast_to(copies, (layers, experts, ranks)).reshape(layers, -1),
        )
