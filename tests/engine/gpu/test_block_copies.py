"""Copies of KV blocks on a pretended device, by the kernel and by torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.executor.cache_staging import CacheStaging
from engine.gpu import block_copies, copy_stream
from engine.gpu.block_copies import BlockCopies
from engine.gpu.copy_stream import CudaCopyStream
from engine.step import StepResult
from engine.transfers import staged_memory
from engine.transfers.block_memory import CacheGone
from engine.transfers.staged_memory import StagedMemory
from tests.engine.copying_device import CopyingDevice
from tests.parallel.other_device import DEVICE, OtherDevice

NUM_BLOCKS = 11
WIDTHS = [[64, 64, 256, 40], [5000, 4100], [7, 33, 1], [16]]


def tensors(widths: list[int]) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, 256, (NUM_BLOCKS, width), dtype=torch.uint8, generator=numbers) for width in widths
    ]


def rows_of(parts: list[torch.Tensor], blocks: list[int]) -> np.ndarray:
    return torch.cat([part[blocks] for part in parts], dim=1).numpy()


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("by_kernel", [True, False])
def test_blocks_come_whole_and_touch_no_others(
    widths: list[int], by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_copies, "STAGE_BYTES", 3 * sum(widths))
    monkeypatch.setattr(block_copies, "has_triton", lambda: by_kernel)
    parts = tensors(widths)
    before = [part.clone() for part in parts]
    memory = StagedMemory(BlockCopies(parts, CopyingDevice()))
    assert ("by a kernel" in repr(memory)) == by_kernel
    assert all(bool((a == b).all()) for a, b in zip(parts, before, strict=True)), "the trial leaves nothing"
    assert (memory.num_blocks, memory.layout, memory.block_bytes) == (NUM_BLOCKS, tuple(widths), sum(widths))
    wanted = [10, 0, 3, 3, 7, 9, 1]
    assert (memory.read(wanted) == rows_of(parts, wanted)).all()
    data = np.random.default_rng(2).integers(0, 256, (2, sum(widths)), dtype=np.uint8)
    memory.write(4, data[0].data)
    with memory.filling(10) as (part,):
        part[:] = data[1].data
    assert (rows_of(parts, [4, 10]) == data).all()
    assert bytes(memory.parts_of(10)[0]) == data[1].tobytes()
    others = [block for block in range(NUM_BLOCKS) if block not in (4, 10)]
    assert all(bool((a[others] == b[others]).all()) for a, b in zip(parts, before, strict=True))


def test_parts_are_copied_where_tensors_are_on_another_device() -> None:
    """Nothing takes memory of the device for the host's."""

    class ThereToo(CopyingDevice):
        def run(self, work: Callable[[], None]) -> None:
            with OtherDevice():
                work()

    with OtherDevice():
        parts = [each.to(DEVICE) for each in tensors([64, 32])]
        copies = BlockCopies(parts, ThereToo())
    memory = StagedMemory(copies)
    assert "part by part" in repr(memory)
    data = np.random.default_rng(2).integers(0, 256, 96, dtype=np.uint8)
    memory.write(4, data.data)
    assert (memory.read([4, 5])[0] == data).all()
    assert (memory.read([5])[0] == rows_of(tensors([64, 32]), [5])[0]).all()


def test_a_kernel_that_copies_wrongly_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy = block_copies._KernelCopies.copy

    def off_by_one(self, blocks: list[int], rows: torch.Tensor, *, gathers: bool) -> None:
        copy(self, [1 + block - gathers for block in blocks], rows, gathers=gathers)

    monkeypatch.setattr(block_copies._KernelCopies, "copy", off_by_one)
    parts = [torch.cat([part, part[:1]]) for part in tensors([64, 32])]  # what is behind it is ours, too
    copies = BlockCopies([part[:NUM_BLOCKS] for part in parts], CopyingDevice())
    assert "part by part" in repr(copies)
    assert "slower: the kernel copies wrongly" in caplog.text


def test_memory_that_cannot_be_locked_is_slower_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    parts = tensors([64, 32])
    memory = StagedMemory(BlockCopies(parts, CopyingDevice(most_locked=100)))
    assert "through ordinary memory, which is slower: 393216 bytes cannot be page-locked" in caplog.text
    assert "OS call failed" in caplog.text
    assert (memory.read([2, 9]) == rows_of(parts, [2, 9])).all()


def test_a_device_without_memory_for_rows_copies_part_by_part(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_arguments: object, **_fields: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    monkeypatch.setattr(block_copies._KernelCopies, "__init__", full)
    parts = tensors([64, 32])
    memory = StagedMemory(BlockCopies(parts, CopyingDevice()))
    assert "part by part, which is slower: CUDA out of memory" in caplog.text
    assert (memory.read([2, 9]) == rows_of(parts, [2, 9])).all()


def test_a_copy_waits_for_the_step_that_wrote_its_blocks_and_for_no_later_one() -> None:
    device, parts = CopyingDevice(), tensors([64])
    memory = StagedMemory(BlockCopies(parts, device))
    writes, goes_on, later = threading.Event(), threading.Event(), threading.Event()

    def step() -> None:
        writes.set()
        assert goes_on.wait(60)
        parts[0][3] = 77

    device.steps.submit(step)
    end = device.mark()
    device.steps.submit(later.wait, 60)
    device.mark()  # of a step that does not end
    end()  # as if its results were here before it wrote the last layer
    assert writes.wait(60)
    found: list[np.ndarray] = []
    reader = threading.Thread(target=lambda: found.append(memory.read([3])))
    reader.start()
    reader.join(0.05)
    assert not found
    goes_on.set()
    reader.join(60)
    assert (found[0] == 77).all()
    later.set()


def test_a_device_that_is_lost_is_out_of_reach_from_then_on() -> None:
    device, parts = CopyingDevice(), tensors([64])
    memory = StagedMemory(BlockCopies(parts, device))
    device.lost = "CUDA error: GPU has fallen off the bus\nmore of it"
    with pytest.raises(CacheGone, match=r"out of reach: CUDA error: GPU has fallen off the bus$"):
        memory.read([1])
    count, device.lost = device.num_copies, ""
    with pytest.raises(CacheGone, match="fallen off"), memory.filling(2):
        pass
    assert device.num_copies == count, "the stage may still be written to: no copy follows"


def test_a_copy_that_hangs_keeps_others_no_longer_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_memory, "TURN_TIMEOUT", 0.05)
    device, parts = CopyingDevice(), tensors([64])
    memory = StagedMemory(BlockCopies(parts, device))
    with device.held_up():
        hanging = threading.Thread(target=lambda: memory.read([1]))
        hanging.start()
        assert device.is_waited_for.wait(60)
        with pytest.raises(CacheGone, match="hang"):
            memory.read([2])
    hanging.join(60)
    assert (memory.read([2]) == rows_of(parts, [2])).all()


def test_copies_of_several_threads_take_turns() -> None:
    parts = tensors([64, 256])
    memory = StagedMemory(BlockCopies(parts, CopyingDevice()))
    expected = rows_of(parts, list(range(NUM_BLOCKS)))
    wrong: list[int] = []

    def look(block: int) -> None:
        for _ in range(5):
            memory.write(block, memory.read([block])[0].data)
            if not (memory.read([block])[0] == expected[block]).all():
                wrong.append(block)

    threads = [threading.Thread(target=look, args=(block,)) for block in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert wrong == []
    assert (rows_of(parts, list(range(NUM_BLOCKS))) == expected).all()


class FakeCuda:
    """Stand-ins for torch's streams and events, which note what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[tuple[str, object]] = []
        self.is_done = True
        notes, cuda = self.notes, self

        class Stream:
            def __init__(self, _device: torch.device) -> None:
                pass

            def wait_event(self, event: Event) -> None:
                notes.append(("waits", event))

        class Event:
            def record(self, stream: object) -> None:
                notes.append(("records", stream))

            def query(self) -> bool:
                return cuda.is_done

        for name, stand_in in (("Stream", Stream), ("Event", Event)):
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "steps")


def test_copies_on_cuda_wait_for_the_mark_of_the_last_step_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    stream = CudaCopyStream(torch.device("cuda", 0))

    def copy() -> None:
        cuda.notes.append(("copies", None))

    stream.run(copy)
    assert cuda.notes == [("copies", None), ("records", stream._stream)]
    ends = [stream.mark(), stream.mark()]
    assert cuda.notes[2:] == [("records", "steps")] * 2
    waited = []
    for end in ends:
        end()
        cuda.notes.clear()
        stream.run(copy)
        assert [what for what, _ in cuda.notes] == ["waits", "copies", "records"]
        waited.append(cuda.notes[0][1])
    assert waited[0] is not waited[1]
    cuda.is_done = False
    monkeypatch.setattr(copy_stream, "COPY_TIMEOUT", 0.01)
    with pytest.raises(TimeoutError, match="a copy of KV blocks takes more than"):
        stream.run(copy)


def test_a_step_is_marked_when_it_is_launched_and_ends_with_its_result() -> None:
    device = CopyingDevice()
    staging = CacheStaging(device, tensors([64]))
    launched, goes_on = threading.Event(), threading.Event()
    device.steps.submit(lambda: (launched.set(), goes_on.wait(60)))
    finish = staging.marked(lambda: StepResult([5]))
    assert launched.wait(60)
    assert device._ended is None
    assert finish().tokens == [5]
    assert device._ended is not None
    assert not device._ended.is_set(), "its mark is behind what was launched before"
    goes_on.set()
    assert (staging.memory.read([3]) == rows_of(tensors([64]), [3])).all()
