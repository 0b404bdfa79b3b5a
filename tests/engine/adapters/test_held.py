"""Adapters in a worker's memory: read while it serves, or refused without a trace."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coordinator.messages import AdapterList, AdapterLoad, AdapterSource, StandingOrders
from engine.adapters import adapter_files
from engine.adapters.adapter_settings import WEIGHTS, AdapterError
from engine.adapters.held import HeldAdapters
from engine.adapters.loading import AdapterLoading, AdaptersLost
from engine.config import ModelConfig
from engine.kernels.adapters.sites import AdapterRoom, LowRank
from engine.kernels.core import library
from engine.kernels.decoder import recognise
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.weights import load_model
from parallel.tensor_plan import Cut
from tests.engine.adapters.made_adapters import make_adapter
from tests.engine.native_families import make_family

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no native kernels here")


class Adapted:
    """A model with room for adapters, and directories with some."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        make_family(directory / "model", "llama")
        info = read_model_info(directory / "model")
        self.model = load_model(info, ModelConfig(), dtype=torch.float32, device=torch.device("cpu"))
        assert KERNELS is not None
        decoder = recognise(self.model.module, self.model.layers, self.model.dtype)
        self.program = Program(KERNELS, decoder, adapters=AdapterRoom(2, 16))
        for number, name in enumerate("abc"):
            make_adapter(directory / "model", directory / "adapters" / name, seed=number)

    def held(self, allowed: Path | None = None) -> HeldAdapters:
        assert self.program.sites is not None
        return HeldAdapters(self.model, self.program.sites, None if allowed is None else str(allowed))

    def source(self, name: str, digest: str = "") -> AdapterSource:
        return AdapterSource(name, str(self.directory / "adapters" / name), digest)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"))


def num_held(held: HeldAdapters) -> int:
    return len(held._parts)


def test_an_adapter_is_read_once_and_forgotten(adapted: Adapted) -> None:
    held = adapted.held()
    found = held.read(adapted.source("a"))
    assert found.digest
    assert held.read(found) == found
    assert held.read(adapted.source("b")).digest != found.digest
    assert num_held(held) == 2
    held.drop([found.digest])
    assert num_held(held) == 1


def test_files_outside_the_directory_that_is_allowed(adapted: Adapted, tmp_path: Path) -> None:
    held = adapted.held(tmp_path)
    with pytest.raises(AdapterError, match="--allowed-local-adapter-path"):
        held.read(adapted.source("a"))
    (tmp_path / "link").symlink_to(adapted.source("a").path)
    with pytest.raises(AdapterError, match="--allowed-local-adapter-path"):
        held.read(AdapterSource("a", str(tmp_path / "link")))
    with pytest.raises(AdapterError, match="--allowed-local-adapter-path"):
        held.read(AdapterSource("a", f"{tmp_path}/../{adapted.directory.name}/adapters/a"))
    shutil.copytree(adapted.source("a").path, tmp_path / "copy")
    assert held.read(AdapterSource("a", str(tmp_path / "copy"))).digest
    assert held.read(adapted.held().read(adapted.source("b"))).digest, "one of the mesh's list"


def test_files_that_change_while_they_are_read_are_refused(
    adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest names what is in memory, or nothing is."""
    place = tmp_path / "changing"
    shutil.copytree(adapted.source("a").path, place)
    tensors = adapter_files._tensors

    def changed_first(path: Path) -> dict[str, torch.Tensor]:
        shutil.copy(Path(adapted.source("b").path) / WEIGHTS, place / WEIGHTS)
        return tensors(path)

    monkeypatch.setattr(adapter_files, "_tensors", changed_first)
    held = adapted.held()
    with pytest.raises(AdapterError, match="is not the one that the mesh serves"):
        held.read(AdapterSource("a", str(place)))
    assert num_held(held) == 0


WIDTH, RANK = 8, 3
CUTS = {
    "gate and up": (
        "experts.gate_up_proj",
        [Cut(-2, 16, ((at, at + 4), (8 + at, 12 + at))) for at in (0, 4)],
    ),
    "down": ("experts.down_proj", [Cut(-1, WIDTH, ((at, at + 4),)) for at in (0, 4)]),
    "some experts": ("experts.down_proj", [Cut(0, 4, ((at, at + 2),)) for at in (0, 2)]),
    "tokens": ("embed_tokens.weight", [Cut(0, WIDTH, ((0, 5),)), Cut(0, WIDTH, ((5, 8),))]),
    "the output layer": ("lm_head.weight", [Cut(0, 16, ((0, 10),)), Cut(0, 16, ((10, 16),))]),
}
"""Parameters, and what two ranks keep of each."""


@pytest.mark.parametrize("what", CUTS)
def test_ranks_have_what_an_adapter_changes_of_their_parts(adapted: Adapted, what: str) -> None:
    """Each rank's matrices give its part of what the adapter adds to the weights."""
    parameter, cuts = CUTS[what]
    of_tokens, name = what == "tokens", parameter.removesuffix(".weight")
    experts, outputs = (4,) if "experts" in name else (), 16
    part = LowRank(torch.rand(*experts, RANK, WIDTH), torch.rand(*experts, outputs, RANK), 1.0, of_tokens)
    whole = part.b @ part.a
    for cut in cuts:
        model = SimpleNamespace(module=adapted.model.module, sharded=SimpleNamespace())
        model.sharded.done = SimpleNamespace(cuts={parameter: cut})
        assert adapted.program.sites is not None
        held = HeldAdapters(model, adapted.program.sites)  # type: ignore[arg-type]
        own = held._cut(name, part)
        weight = whole.mT if of_tokens else whole
        given = (own.b @ own.a).mT if of_tokens else own.b @ own.a
        torch.testing.assert_close(given, cut.take(weight, tuple(weight.shape)))


class Turns:
    """The step loop of an instance, as far as adapters are concerned."""

    def __init__(self, held: HeldAdapters) -> None:
        self.woken = threading.Event()
        self.loading = AdapterLoading(held, [], self.woken.set)
        self.in_use: set[str] = set()

    def follow(self, orders: StandingOrders) -> bool:
        for _ in range(3):  # read, look, drop
            self.woken.clear()
            is_in_effect = self.loading.follow(orders, lambda: self.in_use)
            if self.loading._following.reading:
                assert self.woken.wait(60)
        return is_in_effect


@pytest.fixture
def turns(adapted: Adapted) -> Iterator[tuple[HeldAdapters, Turns]]:
    held = adapted.held()
    made = Turns(held)
    yield held, made
    made.loading.close()


def test_orders_are_followed_in_a_thread(adapted: Adapted, turns: tuple[HeldAdapters, Turns]) -> None:
    held, loop = turns
    wanted = StandingOrders(revision=1, adapter_load=AdapterLoad("1", adapted.source("a")))
    assert loop.follow(wanted)
    report = loop.loading.report(wanted)
    assert report.command == "1"
    assert loop.loading.names == {report.digest: "a"}
    listed = AdapterList(1, (adapted.source("a", report.digest),))
    assert loop.follow(StandingOrders(revision=2, adapters=listed))
    assert num_held(held) == 1
    loop.in_use = {report.digest}
    assert loop.follow(StandingOrders(revision=3, adapters=AdapterList(2)))
    assert num_held(held) == 1, "a request has it"
    loop.in_use = set()
    assert loop.follow(StandingOrders(revision=4, adapters=AdapterList(2)))
    assert num_held(held) == 0


def test_a_bad_adapter_is_reported_and_leaves_nothing(
    adapted: Adapted, turns: tuple[HeldAdapters, Turns]
) -> None:
    held, loop = turns
    wanted = StandingOrders(revision=1, adapter_load=AdapterLoad("1", AdapterSource("d", "/none")))
    assert loop.follow(wanted)
    report = loop.loading.report(wanted)
    assert (report.failed, "/none is no adapter" in report.reason) == ("1", True)
    assert num_held(held) == 0
    listed = AdapterList(1, (adapted.source("a", "another digest"),))
    with pytest.raises(AdaptersLost, match="is not the one that the mesh serves as a"):
        loop.follow(StandingOrders(revision=2, adapters=listed))
