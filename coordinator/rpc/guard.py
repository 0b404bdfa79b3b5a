"""Admission of peers to a listener by the mesh's keys, in a thread.

ZeroMQ asks a handler of its context about each client key (ZAP, https://rfc.zeromq.org/spec/27); this one
knows one. It also reads the socket's monitor, which tells of peers that do not come as far as that: without
a key, or with one made for another listener. A thread, since a step loop may compute for seconds and peers
must not wait that long; one for each listener, of which a process has one.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from coordinator.rpc.complaints import Complaints
from coordinator.rpc.keys import MeshKeys

logger = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
DOMAIN = b"lockstep"

REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Guard:
    """Makes a socket, before it binds, let in only peers with the mesh's client key."""

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[Any], keys: MeshKeys, name: str) -> None:
        """A context can have one guarded socket."""
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler, nobody is let in
        self._client_key = z85.decode(keys.client_public)
        self._asked = context.socket(zmq.REP, socket_class=zmq.Socket)
        self._asked.setsockopt(zmq.LINGER, 0)
        self._asked.bind(ZAP_ENDPOINT)
        monitor = f"inproc://guard-{id(self)}"
        socket.monitor(monitor, REFUSALS | zmq.EVENT_MONITOR_STOPPED)
        self._events = context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(monitor)
        self._complaints = Complaints(logger, f"{name}: refused a connection without the key of this mesh")
        threading.Thread(target=self._run, name=f"guard-{name}", daemon=True).start()

    @property
    def refused_peers(self) -> int:
        """Number of connections refused so far."""
        return self._complaints.count

    def _run(self) -> None:
        """Admission thread: runs until the guarded socket or its context is closed."""
        poller = zmq.Poller()
        poller.register(self._asked, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._asked in ready:
                    self._answer(self._asked.recv_multipart())
                if self._events in ready:
                    event = parse_monitor_message(self._events.recv_multipart())["event"]
                    if event == zmq.EVENT_MONITOR_STOPPED:
                        return
                    self._complaints.add()
        except zmq.ContextTerminated:
            return
        finally:
            self._asked.close()
            self._events.close()

    def _answer(self, question: list[bytes]) -> None:
        """Answer an authentication request: only the mesh's client key is admitted."""
        request_id = question[1] if len(question) > 1 else b""
        mechanism_and_key = question[5:]
        welcome = mechanism_and_key == [b"CURVE", self._client_key]
        status, text = (b"200", b"OK") if welcome else (b"400", b"not a member of this mesh")
        self._asked.send_multipart(
            [ZAP_VERSION, request_id, status, text, b"member" if welcome else b"", b""]
        )
