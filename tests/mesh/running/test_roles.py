"""Roles of real instances that change while they serve, and outlive processes."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from pathlib import Path

import pytest

from coordinator.messages import Role
from engine.kernels.core import library
from router.tools.operate import main_role
from tests.mesh.clients.test_clients import metrics
from tests.mesh.faults.test_transfers import FLAGS, LONG, SHORT, of, streams
from tests.mesh.harness import Ports, free_port, serve, wait_until

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]

TRANSFER = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'


def roles(ports: Ports) -> list[Role]:
    """Roles of instances that are ready, by rank, as the coordinator knows them."""
    return [member.role for member in ports.view().members if member.state == "ready"]


def generated(ports: Ports) -> float:
    """Tokens that instance 1 generated."""
    return of(ports, "vllm:generation_tokens_total", 1)


def router_sees(ports: Ports) -> bool:
    """Whether the router answers, and knows both roles."""
    try:
        found = metrics(ports)
    except OSError:
        return False
    names = ('{engine="0",role="decode"}', '{engine="1",role="prefill"}')
    return all(found.get(f"lockstep:instance_role{name}") for name in names)


def test_streams_go_on_while_roles_change_and_roles_outlive_processes(tmp_path: Path) -> None:
    ports = Ports()
    admin = free_port()
    flags = [*FLAGS, "--num-gpu-blocks-override", "1200", "--restart", "--kv-transfer-config", TRANSFER]
    prompts = [[4 + (90 * each + 7 * index) % 4000 for index in range(600)] for each in range(6)]

    def set_role(rank: int, role: Role) -> None:
        body = json.dumps({"rank": rank, "role": role}).encode()
        url = f"http://127.0.0.1:{admin}/admin/role"
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.status == 202

    async def disturbed() -> list[tuple[list[int], list[str]]]:
        begun = asyncio.Event()
        running = asyncio.create_task(streams(ports, prompts, tokens=LONG, all_have_begun=begun))
        await asyncio.wait_for(begun.wait(), 60)
        for role in (Role.PREFILL, Role.DECODE, Role.PREFILL):
            await asyncio.to_thread(set_role, 1, role)
            await asyncio.to_thread(wait_until, lambda wanted=role: roles(ports)[1] == wanted, 10)
            await asyncio.to_thread(command.wait_for, "requests move")
        return await running

    with serve(tmp_path / "log", "-dp", "2", *ports.head(), "--admin-port", str(admin), *flags) as command:
        command.wait_for("2 instances ready")
        assert "KV blocks move in our own way: kv_connector of --kv-transfer-config" in command.log
        alone = asyncio.run(streams(ports, prompts, tokens=LONG))
        wait_until(lambda: generated(ports) == 3 * LONG, 10, "both are mixed")
        fresh = [[7, *prompt] for prompt in prompts]  # cached nowhere
        expected = asyncio.run(streams(ports, fresh, tokens=LONG))

        assert asyncio.run(disturbed()) == alone
        assert "2 requests move" in command.log or "3 requests move" in command.log, command.log
        assert roles(ports) == [Role.MIXED, Role.PREFILL]
        wait_until(lambda: of(ports, "vllm:kv_cache_usage_perc", 1) == 0, 10, "nothing is held")

        before = generated(ports)
        assert asyncio.run(streams(ports, fresh, tokens=LONG)) == expected
        time.sleep(0.5)  # its last report has come by then
        assert generated(ports) - before < 3 * LONG * 0.9, "those that begin there go on at the other one"
        assert main_role(["0", "decode", *ports.join()]) == 0

        command.child("Engine_1").kill()
        wait_until(lambda: roles(ports) == [Role.DECODE], 20, "it is away")
        wait_until(lambda: roles(ports) == [Role.DECODE, Role.PREFILL], 200, "it has the role that was set")
        command.child("Coordinator").kill()
        wait_until(lambda: ports.view().complete and roles(ports) == [Role.DECODE, Role.PREFILL], 200)
        router = command.child("Router")
        router.kill()
        wait_until(lambda: command.child("Router").pid != router.pid and router_sees(ports), 20)
        begun = [(ids[:SHORT], logprobs[:SHORT]) for ids, logprobs in expected]
        assert asyncio.run(streams(ports, fresh, tokens=SHORT)) == begun
        assert "Traceback" not in command.log
        command.stop()
