from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.config import CoordinatorConfig
from coordinator.process import process
from coordinator.settings import flags
from engine.config import InstanceConfig
from router.config import RouterConfig, ServeConfig
from router.launcher.launch import Doors, ProcessSpec, engine_spec, node_specs, print_table, process_table
from router.launcher.preflight import ignored_when_headless
from router.launcher.serve import secret_file


def table(
    *argv: str, cores: int = 4, devices: Sequence[str] = (), doors: Doors | None = None
) -> list[ProcessSpec]:
    config = flags.parse(ServeConfig, argv, prog="serve", description="")
    return process_table(config, None, cores, "", doors, devices=devices)


def test_the_whole_mesh() -> None:
    specs = table("/m", "-dp", "2", "--port", "81", "-dpp", "82")
    assert [(spec.name, spec.role, spec.rank, spec.threads) for spec in specs] == [
        ("Coordinator", "coordinator", None, 1),
        ("Engine_0", "engine", 0, 2),
        ("Engine_1", "engine", 1, 2),
        ("Router", "router", None, 1),
    ]
    assert specs[0].address == "tcp://127.0.0.1:82"
    assert specs[3].address == "http://127.0.0.1:81"


@pytest.mark.parametrize(
    ("argv", "title"),
    [
        (["/models/qwen3/", "--port", "81", "-asc", "2"], ":81 qwen3"),
        (["Qwen/Qwen3-0.6B", "--served-model-name", "team/small", "qwen3"], ":8000 small"),
        (["--uds", "/run/a.sock"], "unix:/run/a.sock lockstep-moe"),
        (["--headless", "-dpp", "82"], ":82"),
        (["/m", "--headless", "-dpp", "82"], ":82 m"),
        (["/m", "--nnodes", "2", "-tp", "2", "--master-port", "83"], ":8000 m"),
    ],
)
def test_every_child_gets_port_and_model_for_its_title(argv: list[str], title: str) -> None:
    assert {spec.environment()[process.MESH_VARIABLE] for spec in table(*argv)} == {title}


def test_titles_without_an_endpoint_of_this_host_have_another_port() -> None:
    def parse(*argv: str) -> ServeConfig:
        return flags.parse(ServeConfig, argv, prog="serve", description="")

    offline = process_table(parse("/m", "-dpp", "82"), None, 4, with_router=False)
    assert {spec.mesh for spec in offline} == {":82 m"}
    node = node_specs(parse("/m", "--nnodes", "2", "-tp", "2", "--node-rank", "1", "--master-port", "83"), 4)
    assert [spec.mesh for spec in node] == [":83 m"]
    assert engine_spec(parse("/m", "--port", "81"), 7, 1).mesh == ":81 m", "one that comes later"


def test_head_alone_and_headless() -> None:
    assert [spec.role for spec in table("/m", "-dp", "2", "-dpl", "0")] == ["coordinator", "router"]
    assert [spec.rank for spec in table("--headless", "-dp", "4", "-dpl", "2", "-dpr", "2")] == [2, 3]
    assert [spec.rank for spec in table("--headless")] == [None]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["-dpr", "1"],
            "--data-parallel-rank 1 without -dp: add --headless where the mesh is started elsewhere",
        ),
        (["-dpr", "1", "-dpl", "0"], "how many instances it has in all (at least 2)"),
        (["-dpr", "1", "-dpl", "2"], "how many instances it has in all (at least 3)"),
        (["-dpr", "0", "-dpl", "2"], "--data-parallel-rank 0 without -dp"),
        (["-dpl", "2"], "-dpl 2 without -dp: say with -dp how many instances the mesh has in all (-dp 2 for"),
    ],
)
def test_a_head_of_unknown_size_is_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        table(*argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


OF_A_MESH = [
    ["-dp 1", "-dp 3", ""],
    ["-dpl 0", "-dpl 1", "-dpl 2", ""],
    ["-dpr 0", "-dpr 1", "-dpr 5", ""],
    ["--headless", ""],
    ["-asc 2", ""],
    ["--nnodes 2 -tp 2", "--nnodes 2 -tp 2 --node-rank 1", "--nnodes 1 --node-rank 1", ""],
    ["-dpb ray", "--distributed-executor-backend ray", ""],
]


def test_flags_of_the_mesh_make_a_table_or_a_message() -> None:
    made = 0
    for chosen in itertools.product(*OF_A_MESH):
        with contextlib.suppress(SystemExit):
            assert table(*" ".join(chosen).split())
            made += 1
    assert made > 300


def test_headless_instances_have_no_endpoint_to_set_up() -> None:
    flags_of_front_ends = ("--port", "81", "--api-key", "k", "--shadow-rate", "0.1", "-asc", "2")

    def ignored(*argv: str) -> list[str]:
        return ignored_when_headless(flags.parse(ServeConfig, argv, prog="serve", description=""))

    assert ignored("--headless", *flags_of_front_ends) == [
        "--port",
        "--api-key",
        "--shadow-rate",
        "--api-server-count",
    ]
    assert ignored(*flags_of_front_ends) == []
    assert ignored("/m", "--headless", "-dp", "2", "-dpr", "1", "--restart", "--log-level", "debug") == []


def test_instances_of_a_loopback_mesh_share_the_cores_also_when_started_one_by_one() -> None:
    (spec,) = table("--headless", "-dp", "2", "-dpr", "0", cores=2)
    assert spec.threads == 1
    assert spec.environment()["OMP_NUM_THREADS"] == "1"
    assert process.PARENT_VARIABLE in spec.environment()


def test_every_child_gets_the_key_of_the_mesh() -> None:
    specs = table("/m", "-dpa", "10.0.0.1", "--mesh-key-file", "/etc/mesh.key")
    assert [spec.role for spec in specs] == ["coordinator", "engine", "router"]
    for spec in specs:
        assert "--mesh-key-file=/etc/mesh.key" in spec.argv


def test_children_understand_their_flags() -> None:
    configs = {"coordinator": CoordinatorConfig, "engine": InstanceConfig, "router": RouterConfig}
    for spec in table(
        "/m",
        "-dp",
        "4",
        "-dpl",
        "2",
        "-dpr",
        "2",
        "--seed",
        "7",
        "--dtype",
        "float32",
        "--log-level",
        "debug",
    ):
        config = flags.parse(configs[spec.role], spec.argv, prog=spec.role, description="")
        assert config.log_level == "debug"
        assert spec.command()[:4] == [sys.executable, "-P", "-m", spec.role]
        if isinstance(config, InstanceConfig):
            assert config.mesh.data_parallel_start_rank == spec.rank
            assert config.engine.model.dtype == "float32"
        if isinstance(config, RouterConfig):
            assert config.http.seed == 7


def test_front_ends_share_the_sockets_of_their_launcher() -> None:
    config = flags.parse(ServeConfig, ["/m", "-asc", "2"], prog="serve", description="")
    doors = Doors(http=11, admin=12, counts_directory="/counts")
    routers = [spec for spec in process_table(config, None, 4, "", doors) if spec.role == "router"]
    assert [spec.name for spec in routers] == ["Router_0", "Router_1"]
    for number, spec in enumerate(routers):
        told = flags.parse(RouterConfig, spec.argv, prog="router", description="")
        assert (told.http_descriptor, told.admin_descriptor) == spec.descriptors == (11, 12)
        assert (told.front_end, told.front_ends, told.counts_directory) == (number, 2, "/counts")


KEYS = ("k-one", 'k two: "#\\', "12345", "k-root")


def test_keys_are_on_no_command_line(tmp_path: Path) -> None:
    """Keys of a settings file neither; ``--admin-host`` shows that checks see them."""
    file = tmp_path / "mesh.json"
    file.write_text(json.dumps({"api-key": KEYS[:3], "admin-api-key": KEYS[3:]}))
    argv = ["/m", "-asc", "2", "--config", str(file), "--admin-port", "1", "--admin-host", "0.0.0.0"]
    descriptor = secret_file(flags.parse(ServeConfig, argv, prog="serve", description=""))
    assert descriptor is not None
    try:
        specs = table(*argv, doors=Doors(http=11, admin=12, secrets=descriptor))
        assert not [key for spec in specs for key in KEYS if key in " ".join(spec.command())]
        routers = [spec for spec in specs if spec.role == "router"]
        for spec in routers * 2:  # as often as it is started
            told = flags.parse(RouterConfig, spec.argv, prog="router", description="")
            assert (told.http.api_key, told.http.admin_api_key) == (KEYS[:3], KEYS[3:])
            assert spec.descriptors == (11, 12, descriptor)
    finally:
        os.close(descriptor)
    with pytest.raises(AssertionError):
        table(*argv)
    assert secret_file(flags.parse(ServeConfig, ["/m"], prog="serve", description="")) is None


def test_an_instance_beyond_the_size_does_not_claim_that_size() -> None:
    config = flags.parse(ServeConfig, ["/m", "-dp", "2"], prog="serve", description="")
    for rank, size in ((1, 2), (2, None)):
        told = flags.parse(InstanceConfig, engine_spec(config, rank, 1).argv, prog="engine", description="")
        assert (told.mesh.data_parallel_start_rank, told.mesh.data_parallel_size) == (rank, size)


@pytest.mark.parametrize(
    ("argv", "seen"),
    [
        (["/m", "-dp", "2"], ["4", "5"]),
        (["/m", "-dp", "2", "-tp", "2"], ["4,5", "6,7"]),
        (["/m", "-dp", "3", "-tp", "2"], ["4,5", "6,7", "4,5"]),
        (["/m", "-dp", "2", "--device", "cpu"], [None, None]),
        (["/m", "-dp", "2", "--distributed-executor-backend", "ray"], [None, None]),
        (["/m", "--headless", "-dp", "4", "-dpl", "1", "-dpr", "2"], ["6"]),
        (["/m", "-dp", "2", "-tp", "4"], [None, None]),
        (["--headless", "-dp", "2", "-dpl", "2"], [None, "6,7,4,5"]),
    ],
)
def test_instances_of_a_machine_have_devices_of_their_own(argv: list[str], seen: list[str | None]) -> None:
    """Those without a model of their own learn from the mesh how many they need."""
    name = "CUDA_VISIBLE_DEVICES"
    specs = table(*argv, devices=("4", "5", "6", "7"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(name, raising=False)
        assert [spec.environment().get(name) for spec in specs if spec.role == "engine"] == seen
        assert not any(name in spec.environment() for spec in specs if spec.role != "engine")
        assert not any(name in spec.environment() for spec in table(*argv))


@pytest.mark.parametrize(
    ("argv", "devices", "sharers"),
    [
        (["/m", "-dp", "2"], ("0",), ["2", "2"]),
        (["/m", "-dp", "2"], ("0", "1"), [None, None]),
        (["/m", "-dp", "3", "-tp", "2"], ("0", "1", "2", "3"), ["2", "2", "2"]),
        (["/m", "-dp", "2", "--device", "cpu"], ("0",), [None, None]),
        (["/m", "-dp", "2"], (), [None, None]),
        (["/m", "-dp", "2", "--distributed-executor-backend", "ray"], ("0",), [None, None]),
    ],
)
def test_instances_know_how_many_share_their_devices(
    argv: list[str], devices: tuple[str, ...], sharers: list[str | None]
) -> None:
    specs = [spec for spec in table(*argv, devices=devices) if spec.role == "engine"]
    assert [spec.environment().get("LOCKSTEP_DEVICE_SHARERS") for spec in specs] == sharers


def test_an_instance_that_comes_later_has_the_devices_of_its_number() -> None:
    config = flags.parse(ServeConfig, ["/m", "-dp", "2"], prog="serve", description="")
    spec = engine_spec(config, 7, 1, 1, ("GPU-a", "GPU-b"))
    assert (spec.rank, spec.number, spec.devices) == (7, 1, ("GPU-b",))


def test_addresses_of_ipv6_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("serve m", table("/m", "--host", "fd00::1", "-dpa", "fd00:a::b:1", "--insecure-mesh"))
    printed = capsys.readouterr().out
    assert "http://[fd00::1]:8000" in printed
    assert "tcp://[fd00:a::b:1]:29550" in printed


def test_the_tree_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("serve m", table("/m", "-dp", "2", devices=("4", "5")))
    printed = capsys.readouterr().out
    for word in (
        "serve m",
        "Coordinator",
        "Engine_1",
        "rank 1",
        "tcp://127.0.0.1:29550",
        "2 threads, CUDA 5",
        "Router",
    ):
        assert word in printed
