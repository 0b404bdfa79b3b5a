"""The table of processes that ``serve`` starts (pure); :mod:`router.launcher.supervisor` runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.tree import Tree

from coordinator.config import CoordinatorConfig, endpoint
from coordinator.messages import Settings
from coordinator.process import process
from coordinator.rpc import own_key
from coordinator.settings.flags import secrets_of, to_argv
from engine.config import SHIPPED_MODEL, EngineConfig, InstanceConfig
from engine.host.forked import thread_environment
from parallel.devices import (
    SHARERS_VARIABLE,
    devices_of_instance,
    sharers_of_device,
    visible_variable,
)
from parallel.topology import threads_per_worker, workers_of_node
from router.config import RouterConfig, ServeConfig


class Doors(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that routers inherit: bound sockets, directory of counts, file of secrets."""

    http: int
    """Descriptor of the endpoint's listening socket."""
    admin: int | None = None
    counts_directory: str | None = None
    secrets: int | None = None
    """Descriptor of a file for ``--config``, with what must not be on a command line."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        return tuple(fd for fd in (self.http, self.admin, self.secrets) if fd is not None)


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the process table."""

    name: str
    role: str
    """coordinator, engine or router: the package that is run."""
    argv: tuple[str, ...]
    address: str
    threads: int
    rank: int | None = None
    module: str = ""
    """Module to run, if it is not the role's own package."""
    descriptors: tuple[int, ...] = ()
    """Sockets and files that it inherits."""
    workers: tuple[str, ...] = ()
    """Names of the worker processes that an instance starts itself, as ``PP0_TP1``.

    Empty: it computes by itself.
    """
    number: int = 0
    """Number of an instance within its launcher; a restarted instance keeps it."""
    devices: tuple[str, ...] = ()
    """CUDA devices that it sees, named as in ``CUDA_VISIBLE_DEVICES``; none: those that its launcher sees."""
    sharers: int = 1
    """Instances that compute on each of its devices."""
    mesh: str = ""
    """Port and model of the mesh, for the titles of this process and its workers."""

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", self.module or self.role, *self.argv]

    def environment(self) -> dict[str, str]:
        """This process's environment, with the child's threads, devices and parent pid.

        The child ends when the process of that pid dies.
        """
        return {
            **os.environ,
            **thread_environment(self.threads),
            **({visible_variable(): ",".join(self.devices)} if self.devices else {}),
            **({SHARERS_VARIABLE: str(self.sharers)} if self.sharers > 1 else {}),
            process.PARENT_VARIABLE: str(os.getpid()),
            process.MESH_VARIABLE: self.mesh,
        }

    @property
    def is_instance(self) -> bool:
        """Whether a view of the mesh contains it.

        The workers on another host of an instance are none.
        """
        return self.role == "engine" and self.module != "engine.executor.nodes"

    @property
    def main_module(self) -> str:
        """Module with its ``main``; a fork server that has loaded it can fork this process."""
        return f"{self.module or self.role}.__main__"


def process_table(
    config: ServeConfig,
    settings: Settings | None,
    cores: int,
    mesh_name: str = "",
    doors: Doors | None = None,
    *,
    devices: Sequence[str] = (),
    listen_fd: int | None = None,
    with_router: bool = True,
) -> list[ProcessSpec]:
    """Make the process table of a ``serve``, in order of start.

    ``settings`` are those of the model, when this side knows it; ``mesh_name`` is the coordinator's, so that
    its launcher tells it from another mesh's; ``devices`` are the CUDA devices of this machine; ``listen_fd``
    is the coordinator's socket, when the launcher holds it. Without ``doors`` each router would bind the
    ports itself; API keys need them.
    """
    mesh = config.mesh
    title = mesh_title(config, has_endpoint=with_router)
    table: list[ProcessSpec] = []
    if not mesh.headless:
        table.append(_coordinator(config, settings, mesh_name, listen_fd))
    threads = config.engine.device.cpu_threads or threads_per_worker(mesh.instances_here, cores)
    first = mesh.data_parallel_start_rank
    if first is None and not mesh.headless:
        first = 0
    for number in range(mesh.local_size):
        rank = None if first is None else first + number
        table.append(engine_spec(config, rank, threads, number, devices))
    if with_router and not mesh.headless:
        table += [_router(config, number, doors) for number in range(config.api_server_count)]
    return [msgspec.structs.replace(spec, mesh=title) for spec in table]


def mesh_title(config: ServeConfig, *, has_endpoint: bool = True) -> str:
    """Port and model that tell meshes of one host apart, as ``:8000 qwen3``.

    The port is the endpoint's, else the one at which these processes find the mesh. A model's name is its
    last part; a headless launcher may not know it.
    """
    nodes, mesh = config.engine.nodes, config.mesh
    if nodes.node_rank:
        where = f":{nodes.master_port}"
    elif mesh.headless or not has_endpoint:
        where = f":{mesh.data_parallel_rpc_port}"
    else:
        where = f":{config.http.port}" if config.http.uds is None else f"unix:{config.http.uds}"
    model = config.engine.model if mesh.headless else _with_model(config.engine).model
    name = next(iter(model.served_model_name), model.model or "")
    return " ".join(filter(None, (where, name.rstrip("/").rpartition("/")[2])))


def _coordinator(
    config: ServeConfig, settings: Settings | None, mesh_name: str, listen_fd: int | None
) -> ProcessSpec:
    return ProcessSpec(
        name="Coordinator",
        role="coordinator",
        argv=tuple(
            to_argv(
                CoordinatorConfig(
                    mesh=msgspec.structs.replace(
                        config.mesh,
                        data_parallel_size=config.mesh.data_parallel_size or 1,
                        data_parallel_size_local=config.mesh.local_size,
                    ),
                    mesh_name=mesh_name,
                    settings=msgspec.json.encode(settings).decode() if settings else None,
                    listen_fd=listen_fd,
                    log_level=config.log_level,
                )
            )
        ),
        address=config.mesh.coordinator_endpoint,
        threads=1,
        descriptors=(*(() if listen_fd is None else (listen_fd,)), *own_key.descriptors(config.mesh)),
    )


def engine_spec(
    config: ServeConfig, rank: int | None, threads: int, number: int = 0, devices: Sequence[str] = ()
) -> ProcessSpec:
    """Make the table entry of one instance; ranks beyond ``-dp`` were added later.

    ``number``: among those of ``serve``; ``devices``: CUDA devices of this machine.
    """
    size = config.mesh.data_parallel_size
    on_ray = config.data_parallel_backend == "ray"
    handed_down = own_key.descriptors(config.mesh)
    arguments = InstanceConfig(
        mesh=msgspec.structs.replace(
            config.mesh,
            # An actor inherits nothing: it finds the key as any other process of this user does.
            mesh_key_file=None if on_ray and handed_down else config.mesh.mesh_key_file,
            data_parallel_size=None if rank is not None and size is not None and rank >= size else size,
            data_parallel_start_rank=rank,
            data_parallel_size_local=None,
            headless=False,
        ),
        engine=_engine_of(config, number),
        log_level=config.log_level,
    )
    return ProcessSpec(
        name="Engine" if rank is None else f"Engine_{rank}",
        role="engine",
        argv=tuple(to_argv(arguments)),
        address="in the Ray cluster" if on_ray else f"{config.mesh.instance_address or 'tcp'}:*",
        threads=config.engine.device.cpu_threads or config.engine.device.num_workers if on_ray else threads,
        rank=rank,
        module="engine.executor.cluster" if on_ray else "",
        descriptors=() if on_ray else handed_down,
        workers=_workers(config.engine),
        number=number,
        devices=_devices(config, number, devices),
        sharers=_sharers(config, len(devices)),
        mesh=mesh_title(config),
    )


def node_specs(config: ServeConfig, cores: int, devices: Sequence[str] = ()) -> list[ProcessSpec]:
    """Make the table of a host with ``--node-rank`` above 0: workers of instances.

    ``devices``: the CUDA devices of that host.
    """
    nodes = config.engine.nodes
    workers = config.engine.num_local_workers
    instances = config.mesh.local_size
    threads = config.engine.device.cpu_threads or cores // max(1, instances)
    return [
        ProcessSpec(
            name=f"Node_{nodes.node_rank}",
            role="engine",
            module="engine.executor.nodes",
            argv=tuple(
                to_argv(
                    InstanceConfig(
                        mesh=config.mesh, engine=_engine_of(config, number), log_level=config.log_level
                    )
                )
            ),
            address=f"for {endpoint(nodes.master_addr, nodes.master_port + number)}",
            threads=max(threads, workers),
            descriptors=own_key.descriptors(config.mesh),
            workers=_workers(config.engine, nodes.node_rank),
            number=number,
            devices=_devices(config, number, devices),
            sharers=_sharers(config, len(devices)),
            mesh=mesh_title(config),
        )
        for number in range(instances)
    ]


def _devices(config: ServeConfig, number: int, devices: Sequence[str]) -> tuple[str, ...]:
    """Devices of the instance with this number.

    Instances of one machine that are started one by one, each with its rank, get devices of their own, too.
    Ray assigns devices to its actors.
    """
    engine, mesh = config.engine, config.mesh
    if engine.device.device == "cpu" or config.ray_flag is not None:
        return ()
    learns = mesh.headless and engine.model.model is None
    return devices_of_instance(
        devices,
        (mesh.data_parallel_start_rank or 0) + number,
        None if learns else engine.num_local_workers,
        mesh.instances_here,
    )


def _sharers(config: ServeConfig, devices: int) -> int:
    """Instances on each of this machine's devices."""
    engine, mesh = config.engine, config.mesh
    if engine.device.device == "cpu" or config.ray_flag is not None:
        return 1
    learns = mesh.headless and engine.model.model is None
    return sharers_of_device(devices, None if learns else engine.num_local_workers, mesh.instances_here)


def _engine_of(config: ServeConfig, number: int) -> EngineConfig:
    """Settings of the instance with this number among those of one ``serve``.

    Each waits for its hosts at a port of its own.
    """
    engine = config.engine if config.mesh.headless else _with_model(config.engine)
    if engine.nodes.nnodes == 1:
        return engine
    port = engine.nodes.master_port + number
    return msgspec.structs.replace(engine, nodes=msgspec.structs.replace(engine.nodes, master_port=port))


def _workers(engine: EngineConfig, node: int = 0) -> tuple[str, ...]:
    """Names of the workers that run on this host, for the table."""
    device, nnodes = engine.device, engine.nodes.nnodes
    if not device.uses_processes:
        return ()
    stages, ranks = device.pipeline_parallel_size, device.tensor_parallel_size
    workers = [f"PP{stage}_TP{rank}" for stage in range(stages) for rank in range(ranks)]
    return tuple(workers[index] for index in workers_of_node(len(workers), node, nnodes))


def _with_model(engine: EngineConfig) -> EngineConfig:
    """Engine settings with the model that the head decided on.

    Only headless instances learn it from the mesh.
    """
    model = msgspec.structs.replace(engine.model, model=engine.model.model or SHIPPED_MODEL)
    return msgspec.structs.replace(engine, model=model)


def _router(config: ServeConfig, number: int, doors: Doors | None) -> ProcessSpec:
    arguments = RouterConfig(
        mesh=msgspec.structs.replace(
            config.mesh,
            data_parallel_size=None,
            data_parallel_size_local=None,
            data_parallel_start_rank=None,
        ),
        http=config.http,
        http_descriptor=doors.http if doors else None,
        admin_descriptor=doors.admin if doors else None,
        front_end=number,
        front_ends=config.api_server_count,
        counts_directory=doors.counts_directory if doors else None,
        log_level=config.log_level,
    )
    secrets = None if doors is None else doors.secrets
    assert secrets is not None or not secrets_of(arguments)
    file = () if secrets is None else (f"--config=/proc/self/fd/{secrets}",)
    return ProcessSpec(
        name="Router" if config.api_server_count == 1 else f"Router_{number}",
        role="router",
        argv=(*to_argv(arguments), *file),
        address=config.http.address,
        threads=1,
        descriptors=(*(doors.descriptors if doors else ()), *own_key.descriptors(config.mesh)),
    )


def print_table(title: str, table: list[ProcessSpec]) -> None:
    """Print the process tree, before anything is started."""
    tree = Tree(title, highlight=False)
    for spec in table:
        rank = ("any free rank" if spec.rank is None else f"rank {spec.rank}") if spec.is_instance else ""
        most = "up to " if spec.rank is None and spec.is_instance else ""
        share = f"{most}{spec.threads} thread{'s' * (spec.threads > 1)}"
        share += f", CUDA {','.join(spec.devices)}" if spec.devices else ""
        branch = tree.add(f"{spec.name:<12} {rank:<14} {spec.address:<28} {share}", highlight=False)
        for worker in spec.workers:
            branch.add(f"Worker_{'*' if spec.rank is None else spec.rank}_{worker}", highlight=False)
    Console(soft_wrap=True, markup=False, emoji=False).print(tree)  # an address like [fd00::a:1] is neither
