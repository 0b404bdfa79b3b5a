"""Which kernels an instance computes with, how they are chosen, and the class that follows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.numerics import Arithmetic, Numerics
from coordinator.settings.flags import parse
from engine.config import CacheConfig, DeviceConfig, EngineConfig, InstanceConfig, ModelConfig
from engine.executor.uni import UniExecutor
from engine.kernels.core import library
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.model.weight_digest import whole_digest
from engine.model.weight_set import weight_files
from engine.numerics import check_kind, kind_problem, native_kind, numerics_of
from engine.sampling import SamplingParams
from engine.settings import resolve
from engine.step import Admit, Step
from parallel import compiler
from parallel.kernel_kinds import KINDS, Kind
from tests.engine.kernels.emulation import TILES
from tests.engine.native_families import make_family
from tests.engine.tiny_models import make_tiny_model

HERE = [kind for kind in KINDS if library.why_not(kind) is None and library.load() is not None]
"""Kinds of kernels that this machine has."""
OLD = frozenset({"sse4_2", "avx", "avx2", "fma"})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Kernels are loaded anew for each test, and for the tests after these.

    AMX is a switch of the library, which the kinds amx and avx512 share.
    """
    library._load.cache_clear()
    yield
    library.choose(None)
    library._load.cache_clear()
    library.load()


def engine(
    directory: Path, dtype: str = "bfloat16", block_size: int = 16, kept: Any = "auto", **device: Any
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(directory), dtype=dtype),  # type: ignore[arg-type]
        cache=CacheConfig(block_size=block_size, kv_cache_dtype=kept),
        device=DeviceConfig(device="cpu", **device),
    )


def loaded(config: EngineConfig) -> UniExecutor:
    assert config.model.model is not None
    executor = UniExecutor(config, read_model_info(Path(config.model.model)), 1)
    executor.load(lambda phase: None)
    executor.allocate(8)
    return executor


def class_with(config: EngineConfig) -> Numerics:
    info, settings = resolve(config)
    return numerics_of(settings, config.model, info.directory, loaded(config).arithmetic())


# ---- which kinds there are


@pytest.mark.parametrize("kind", ["amx", "avx512"])
def test_kernels_that_the_cpu_has_not_are_refused_with_what_it_has(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "cpu_flags", lambda: OLD)
    problem = kind_problem(DeviceConfig(numerics=kind)) or ""  # type: ignore[arg-type]
    assert problem.startswith(f"--numerics {kind}: this CPU lacks ")
    assert "avx512_bf16" in problem
    assert problem.endswith("use avx2, torch or auto")
    with pytest.raises(CheckpointError, match="this CPU lacks"):
        check_kind(DeviceConfig(numerics=kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("numerics", ["auto", "avx2", "torch"])
def test_kernels_that_the_cpu_has_are_no_problem(numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "cpu_flags", lambda: OLD)
    assert kind_problem(DeviceConfig(numerics=numerics)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--numerics", "avx2", "--device", "cuda"), "--device cuda rules out"),
        (("--numerics", "amx", "--attention-backend", "TORCH_SDPA"), "--attention-backend TORCH_SDPA"),
    ],
)
def test_native_kernels_and_torchs_operators_exclude_each_other(
    flags: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(InstanceConfig, flags, prog="engine", description="")
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_the_flag_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.OFF, "0")
    assert library.load() is None
    library.choose(native_kind(DeviceConfig(numerics="avx2")))
    kernels = library.load()
    assert (kernels is not None) == ("avx2" in HERE)
    library.choose(native_kind(DeviceConfig(numerics="auto")))
    assert library.load() is None


# ---- what an instance computes with


@pytest.mark.parametrize("kind", HERE)
def test_the_kernels_that_are_asked_for_compute(kind: Kind, directory: Path) -> None:
    (found,) = loaded(engine(directory, numerics=kind)).arithmetic()
    assert (found.kernels, found.attention) == (kind, "native")


def test_each_kind_is_a_class_of_its_own_and_torch_a_variant_one(directory: Path) -> None:
    classes = []
    for kind in [*HERE, "torch"]:
        library._load.cache_clear()
        classes.append(class_with(engine(directory, numerics=kind)))
    assert [each.kernels for each in classes] == [*HERE, "torch"]
    assert len({each.fingerprint for each in classes}) == len(classes)
    assert [each.invariant for each in classes] == [True] * len(HERE) + [False]


@pytest.mark.skipif(not HERE, reason="no native kernels here")
def test_the_class_follows_the_kernels_and_not_how_they_were_chosen(directory: Path) -> None:
    chosen = class_with(engine(directory))
    library._load.cache_clear()
    assert class_with(engine(directory, numerics=chosen.kernels)) == chosen
    library._load.cache_clear()
    assert class_with(engine(directory, "float32")) != chosen


def test_torchs_operators_compute_where_they_are_asked_for(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    executor = loaded(engine(directory, numerics="torch"))
    (found,) = executor.arithmetic()
    assert (found.kernels, found.attention) == ("torch", "TORCH_SDPA")
    assert "native kernels" not in caplog.text
    executor.begin(
        Step([Admit(0, [5, 6, 7], 3, SamplingParams(temperature=0.0), 0, ())], [0], [0], [3], {0: [2]})
    )
    assert executor.finish().tokens[0] is not None


@pytest.mark.skipif("avx512" not in HERE, reason="no AVX-512 here")
def test_amx_multiplies_bfloat16_only(directory: Path) -> None:
    (found,) = loaded(engine(directory, "float32")).arithmetic()
    assert found.kernels == "avx512"


@pytest.fixture
def amx() -> Iterator[None]:
    """AMX, emulated where the CPU has none."""
    if "amx" in HERE:
        yield
    elif not TILES.is_possible:
        pytest.skip("no AVX-512 here")
    else:
        with TILES.kernels():
            yield


@pytest.mark.usefixtures("amx")
def test_amx_computes_where_it_is_asked_for(directory: Path) -> None:
    (found,) = loaded(engine(directory, numerics="amx")).arithmetic()
    assert (found.kernels, found.attention) == ("amx", "native")


@pytest.mark.usefixtures("amx")
def test_kernels_that_do_not_compute_the_data_type_are_refused(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="--numerics amx: avx512 kernels compute"):
        loaded(engine(directory, "float32", numerics="amx"))


@pytest.mark.skipif("avx2" not in HERE, reason="no AVX2 here")
def test_kernels_that_do_not_compute_the_model_are_refused(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="--numerics avx2: torch's operators compute LlamaForCausalLM"):
        loaded(engine(directory, block_size=8, numerics="avx2"))


def test_random_weights_are_a_class_of_their_own(directory: Path) -> None:
    config = engine(directory)
    info, settings = resolve(config)
    dummy = msgspec.structs.replace(config.model, load_format="dummy")
    arithmetic = loaded(config).arithmetic()
    read, made = (numerics_of(settings, model, info.directory, arithmetic) for model in (config.model, dummy))
    assert read != made
    (found,) = loaded(msgspec.structs.replace(config, model=dummy)).arithmetic()
    assert found.weights == ""


def test_each_worker_names_the_weights_that_it_read(directory: Path) -> None:
    (found,) = loaded(engine(directory, numerics="torch")).arithmetic()
    assert found.weights == whole_digest(weight_files(directory))
    assert class_with(engine(directory, numerics="torch")).weights == found.weights


def test_workers_with_different_weights_are_refused(directory: Path) -> None:
    """They may be on several hosts, with a copy of the model each."""
    config = engine(directory)
    workers = [Arithmetic("amx", "1", "native", weights=weights) for weights in ("0a", "0b")]
    with pytest.raises(CheckpointError, match=r"read different weights \(digests 0a, 0b\)"):
        numerics_of(resolve(config)[1], config.model, str(directory), workers)


def test_codes_of_the_kv_cache_are_a_class_of_their_own(directory: Path) -> None:
    amx = [Arithmetic("amx", "1", "native")]
    classes = {}
    for kept in ("auto", "int8", "int8_per_token_head", "fp8", "fp8_e4m3"):
        config = engine(directory, kept=kept)
        classes[kept] = numerics_of(resolve(config)[1], config.model, str(directory), amx)
    assert len(set(classes.values())) == 3
    assert classes["int8"] == classes["int8_per_token_head"]
    assert classes["fp8"] == classes["fp8_e4m3"]


def class_of_settings(directory: Path, **settings: Any) -> Numerics:
    """Class of an AMX instance with these settings of the mesh."""
    config = engine(directory)
    _, found = resolve(config)
    amx = Arithmetic("amx", "1", "native")
    return numerics_of(msgspec.structs.replace(found, **settings), config.model, str(directory), [amx])


def test_ranks_with_whole_experts_are_a_class_of_their_own(tmp_path: Path) -> None:
    """A part of each expert, and whole ones, are added up in other orders."""
    directory = make_tiny_model(tmp_path, "qwen3_moe")
    for ranks in (1, 2):
        cut, whole = (
            class_of_settings(directory, tensor_parallel_size=ranks, enable_expert_parallel=spread)
            for spread in (False, True)
        )
        assert (cut == whole) == (ranks == 1)


@pytest.mark.parametrize(("family", "follow"), [("llama_longrope", True), ("llama_dynamic", True),
                                                ("llama_yarn", False), ("llama", False)])  # fmt: skip
def test_the_longest_request_is_a_fact_where_angles_follow_it(
    family: str, follow: bool, tmp_path: Path
) -> None:
    directory = make_family(tmp_path, family)
    long, short = (class_of_settings(directory, max_model_len=tokens) for tokens in (512, 60))
    assert (long != short) == follow


@pytest.mark.skipif(not HERE, reason="no native kernels here")
def test_the_version_of_the_kernels_is_that_of_their_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernels = library.load()
    assert kernels is not None
    source = library.SOURCE
    opened = source.open(*KINDS[kernels.kind(bfloat16=False)].options(compiler.cpu_flags()))
    assert library.KernelLibrary(opened).version == kernels.version
    changed = tmp_path / "vectors.hpp"
    changed.write_text("// another sum\n")
    monkeypatch.setattr(library, "SOURCE", replace(source, headers=(*source.headers, changed)))
    again = library.KernelLibrary(
        opened
    )  # not compiled anew: what names the file of that is tested elsewhere
    assert again.version != kernels.version
