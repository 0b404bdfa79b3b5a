"""The process that prepares images, and what it prepared lately."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path

import msgspec

from router.errors import ApiError, refuse
from router.images.messages import LENGTH_BYTES, FromPreparer, NoProcessor, Prepared, ProcessorRead, Refused
from router.images.parts import SentImage

logger = logging.getLogger(__name__)

MOST_SECONDS = 20.0
"""For one image."""
SECONDS_TO_OPEN = 120.0
MOST_BYTES = 4 << 30
"""Memory of the process."""
MOST_KEPT = 64 << 20
"""Bytes of prepared images that are kept."""
MOST_ANSWER = 1 << 30
"""Bytes of a prepared image."""
ENDED = Refused("cannot be decoded: it ended the process that tried to")
PASSED_ON = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "HOME", "TMPDIR", "LD_LIBRARY_PATH")
"""Variables of the environment that the process has: none with secrets."""


class ImagePreparation:
    """Prepares one image after the other; callers wait in threads."""

    def __init__(self, directory: Path, most_pixels: int) -> None:
        """``directory``: with the model's processor. The process is started by the first image."""
        self._directory = directory
        self._most_pixels = most_pixels
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._kept: OrderedDict[bytes, Prepared] = OrderedDict()
        self._bytes = 0
        self.mark = ""
        """Text that chat templates write for an image; known once the process runs."""
        self.placeholder = ""
        """Text of the token that stands for a row of one; known then, too."""

    def __repr__(self) -> str:
        state = "idle" if self._child is None else f"pid {self._child.pid}"
        return f"<ImagePreparation {state}, {len(self._kept)} kept>"

    def prepare(self, image: SentImage) -> Prepared:
        """An image as the model takes it.

        Raises:
            ApiError: it cannot be taken (400), or none can be at the moment (503).
        """
        name = blake2b(image.data, digest_size=16).digest()
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
                return found
            answer: Prepared | Refused = ENDED
            for _ in range(2):  # the process may have been killed for another reason than this image
                if answer is ENDED:
                    self._start()
                    answer = self._ask(image)
            if isinstance(answer, Refused):
                refuse(f"{image.path} {answer.problem}.", image.path)
            self._keep(name, answer)
            return answer

    def open(self) -> None:
        """Start the process if it does not run, so that :attr:`mark` is known."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, image: SentImage) -> Prepared | Refused:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        deadline = time.monotonic() + MOST_SECONDS
        try:
            child.stdin.write(len(image.data).to_bytes(LENGTH_BYTES, "little") + image.data)
            child.stdin.flush()
            answer = self._read(deadline)
        except TimeoutError:
            self._end()
            return Refused(f"takes more than {MOST_SECONDS:.0f} s to decode and prepare")
        except OSError:
            self._end()
            return ENDED
        assert isinstance(answer, Prepared | Refused)
        return answer

    def _start(self) -> None:
        if self._child is not None and self._child.poll() is None:
            return
        self._end()
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "router.images.preparer", str(self._directory)]
        self._child = subprocess.Popen(
            [*command, str(self._most_pixels), str(MOST_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            first = self._read(time.monotonic() + SECONDS_TO_OPEN)
        except OSError as error:  # a TimeoutError is one
            self._end()
            raise ApiError(503, "Images cannot be prepared now; try again.") from error
        if isinstance(first, NoProcessor):
            self._end()
            logger.error("images are refused: the model's processor cannot be used: %s", first.problem)
            raise ApiError(500, "The model's processor of images cannot be used; the router's log says why.")
        assert isinstance(first, ProcessorRead)
        self.mark, self.placeholder = first.mark, first.placeholder
        logger.info("images are prepared by process %d with %s", self._child.pid, first.packages)

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was still to be written
                    pipe.close()

    def _read(self, deadline: float) -> FromPreparer:
        length = int.from_bytes(self._bytes_of(LENGTH_BYTES, deadline), "little")
        if length > MOST_ANSWER:
            raise OSError("the answer is too long")
        found: FromPreparer = msgspec.msgpack.decode(self._bytes_of(length, deadline), type=FromPreparer)
        return found

    def _bytes_of(self, count: int, deadline: float) -> bytes:
        child = self._child
        assert child is not None
        assert child.stdout is not None
        found = bytearray()
        while len(found) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([child.stdout], [], [], left)[0]:
                raise TimeoutError
            some = os.read(child.stdout.fileno(), min(count - len(found), 1 << 20))
            if not some:
                raise OSError("the process has ended")
            found += some
        return bytes(found)

    def _keep(self, name: bytes, prepared: Prepared) -> None:
        self._kept[name] = prepared
        self._bytes += _size(prepared)
        while self._bytes > MOST_KEPT and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1])


def _size(prepared: Prepared) -> int:
    own = sum(len(each.data) for each in prepared.tensors)
    return own if prepared.beside_others is None else own + _size(prepared.beside_others)
