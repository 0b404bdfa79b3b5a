"""The launcher's connection to the coordinator.

Follows the view for its supervisor, and carries out scale commands.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict

from coordinator.member_connection import Watcher
from coordinator.membership.operations import ACCEPTED, CONFLICT, FAILED, UNAVAILABLE
from coordinator.messages import Exited, Member, OperatorAnswer, Scale, State, View
from coordinator.rpc.codec import OtherProtocol
from coordinator.rpc.handshakes import KeyRefused
from coordinator.rpc.keys import MeshKeys
from coordinator.views import ViewNews
from router.faults import FaultEvent
from router.launcher.scaling import MachineCapacity, ScalingRefused, plan
from router.launcher.supervisor import Supervisor

logger = logging.getLogger(__name__)

REMEMBERED_ANSWERS = 100
"""Answers kept, since a command is repeated until its answer arrives."""


class Overseer:
    """Follows the mesh's view for a :class:`Supervisor`, and carries out scale commands."""

    def __init__(
        self,
        endpoint: str,
        mesh_name: str,
        supervisor: Supervisor,
        machine: MachineCapacity,
        keys: MeshKeys | None = None,
    ) -> None:
        """``mesh_name`` is that of our coordinator; empty for headless instances, which obey the mesh of
        ``endpoint``, whatever its name, and are not asked to scale."""
        self._mesh_name = mesh_name
        self._supervisor = supervisor
        self._machine = machine
        self._watcher = Watcher(endpoint, "serve", keys=keys, launcher=mesh_name, on_scale=self._on_scale)
        supervisor.on_lost = self._on_lost
        self._answers: OrderedDict[str, tuple[OperatorAnswer, int]] = OrderedDict()
        """The answer to each command, and the losses of instances before it."""
        self._members: dict[str, Member] = {}
        self.changed = asyncio.Event()
        """Set whenever a view arrives."""
        self.refused: KeyRefused | None = None
        """Refusal by the coordinator for a missing or different mesh key."""

    def __repr__(self) -> str:
        return f"<Overseer of {self._supervisor!r}>"

    @property
    def view(self) -> View | None:
        """Newest view of the launcher's own mesh; None before the first.

        Another mesh may hold the port, and then our coordinator says so.
        """
        head = self._watcher.head
        return self._watcher.view if head is not None and self._is_ours(head) else None

    async def run(self) -> None:
        """Follow the coordinator until cancelled."""
        try:
            await self._watcher.run(self._on_news)
        except OtherProtocol as error:
            logger.error("the coordinator is of another version: %s", error)
        except KeyRefused as error:
            self.refused = error
            self.changed.set()

    def _on_lost(self, instance: str, how: str) -> None:
        """Report a dead process to the coordinator, which then need not time it out.

        Should it be away, it learns nothing of that instance when it is back.
        """
        self._watcher.send(Exited(instance, how))

    def _is_ours(self, view: View) -> bool:
        return not self._mesh_name or view.mesh == self._mesh_name

    def _on_news(self, _: ViewNews) -> None:
        self.changed.set()
        view = self.view
        if view is None:
            return
        members = {member.instance: member for member in view.members}
        for name, member in self._members.items():
            is_gone = view.complete and name not in members
            if self._mesh_name and is_gone and member.state is State.READY:
                text = f"instance {member.rank} of {member.host} (pid {member.pid}) is out of the world"
                self._supervisor.faults.record(FaultEvent.DETECTION, "removed", text, time.time())
        self._members = members if view.complete else self._members | members
        self._supervisor.learn(view)

    async def _on_scale(self, wish: Scale) -> OperatorAnswer:
        """Answer to a scale command; it becomes a failure if an instance is lost."""
        losses = self._supervisor.losses
        if wish.command not in self._answers:
            before = losses.count
            self._answers[wish.command] = await self._scale(wish), before
            while len(self._answers) > REMEMBERED_ANSWERS:
                self._answers.popitem(last=False)
        answer, before = self._answers[wish.command]
        lost = losses.since(before) if answer.status == ACCEPTED else ""
        return _answer(wish, FAILED, lost) if lost else answer

    async def _scale(self, wish: Scale) -> OperatorAnswer:
        view = self.view
        if view is None or not view.complete or not self._supervisor.ready:
            return _answer(wish, UNAVAILABLE, "the mesh is still starting: try again when it is ready")
        try:
            ours, leaving = self._supervisor.children.ranks, self._supervisor.children.leaving
            way = plan(wish.size, view.members, ours, self._machine, wish.force, leaving)
        except ScalingRefused as refusal:
            return _answer(wish, CONFLICT, str(refusal))
        if way.warning:
            logger.warning("%s", way.warning)
        self._supervisor.retire(way.drain)
        try:
            await self._supervisor.grow(way.start, self._machine.room)
        except OSError as error:  # those that were started before stay: asked again, the rest follows
            return _answer(wish, UNAVAILABLE, f"not all instances could be started: {error}")
        parts = [
            f"starting instance {', '.join(map(str, way.start))}" if way.start else "",
            f"draining instance {', '.join(map(str, way.drain))}" if way.drain else "",
            way.warning,
        ]
        text = "; ".join(part for part in parts if part)
        return _answer(wish, ACCEPTED, text or "there is nothing to do")


def _answer(wish: Scale, status: int, text: str) -> OperatorAnswer:
    return OperatorAnswer(command=wish.command, status=status, text=text)
