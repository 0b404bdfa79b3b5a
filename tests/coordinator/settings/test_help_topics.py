"""``--help=TOPIC``: parts of the help, as vLLM's users ask for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.settings import flags
from coordinator.settings.foreign import ForeignFlags
from router.config import ServeConfig
from router.epp.command import EppConfig
from router.launcher.foreign_flags import FOREIGN
from router.tools.autoscale.command import AutoscaleConfig
from router.tools.operate import DrainConfig, RoleConfig, ScaleConfig
from router.tools.status import StatusConfig

Shown = Callable[[str], str]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """What ``serve`` prints for a topic, with status 0."""

    def of(topic: str) -> str:
        with pytest.raises(SystemExit) as ended:
            flags.parse(
                ServeConfig, [f"--help={topic}"], prog="serve", description="", foreign=ForeignFlags(FOREIGN)
            )
        assert ended.value.code == 0
        return capsys.readouterr().out

    return of


def test_the_whole_help_with_and_without_a_pager(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    paged: list[str] = []
    monkeypatch.setattr("pydoc.pager", paged.append)
    whole = shown("all")
    assert "--max-model-len" in whole
    assert "--help=listgroup" in whole.split("options:")[1]
    assert shown("page") == ""
    assert paged == [whole]


def test_groups_are_listed_and_shown_by_name_or_title(shown: Shown) -> None:
    listed = shown("listgroup")
    assert "  CacheConfig" in listed
    assert "The paged KV cache" in listed
    assert "--block-size" not in listed
    cache = shown("CacheConfig")
    assert cache.startswith("The paged KV cache:\n  --block-size int")
    assert "--max-model-len" not in cache
    assert {shown(each) for each in ("cacheconfig", "cache", "cache_config", "The paged KV cache")} == {cache}


def test_groups_of_vllm_show_what_is_there_under_another_name(shown: Shown) -> None:
    parallel = shown("ParallelConfig")
    assert all(name in parallel for name in ("--data-parallel-size", "--tensor-parallel-size", "--nnodes"))
    assert "--api-key" in shown("Frontend")


def test_flags_are_shown_by_name_or_by_a_part_of_it(shown: Shown) -> None:
    assert shown("max-model-len").splitlines()[1].startswith("  --max-model-len int")
    assert "--max-num-seqs" not in shown("--max_model_len")
    assert {"--max-num-seqs", "--max-num-queued-reqs"} <= set(shown("max-num").split())
    assert shown("dp").splitlines()[1].startswith("  -dp int"), (
        "the exact name, not all that have it as a part"
    )
    assert shown("fully-sharded-loras") == (
        "--fully-sharded-loras is not there: adapters are given by --enable-lora --lora-modules "
        "NAME=DIRECTORY: leave it out\n"
    )
    assert shown("context-length") == "--context-length is --max-model-len here\n"


def test_what_there_is_not_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for topic in ("nonsense", ""):
        with pytest.raises(SystemExit) as ended:
            flags.parse(ServeConfig, [f"--help={topic}"], prog="serve", description="")
        assert ended.value.code == 2
        assert f"--help={topic} names no group and no flag; --help=listgroup" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config", [AutoscaleConfig, DrainConfig, EppConfig, RoleConfig, ScaleConfig, StatusConfig]
)
def test_commands_that_ask_a_mesh_list_no_flags_of_those_that_start_one(config: type[StatusConfig]) -> None:
    listed = {field.long_name for field in flags.fields_of(config)}
    assert {"--data-parallel-address", "--data-parallel-rpc-port", "--mesh-key-file"} <= listed
    meaningless = {
        "--data-parallel-size", "--data-parallel-size-local", "--data-parallel-start-rank", "--headless",
        "--instance-address", "--require-same-numerics", "--startup-timeout", "--otlp-traces-endpoint",
        "--disable-log-stats",
    }  # fmt: skip
    assert not listed & meaningless
