from __future__ import annotations

import pytest

from coordinator.settings.flags import parse
from engine.config import DeviceConfig, EngineConfig
from engine.config.expert_balancing import EplbConfig, read_config
from engine.settings import _flags_of


def test_vllms_settings_are_read() -> None:
    text = '{"window_size": 100, "step_interval": 300, "num_redundant_experts": 4, "log_balancedness": true}'
    config, remarks = read_config(text)
    assert remarks == []
    assert config == EplbConfig(
        window_size=100, step_interval=300, num_redundant_experts=4, log_balancedness=True
    )
    assert (config.balancing(1).windows, config.balancing(1).log_every, config.balancing(1).survive) == (
        3,
        1,
        1,
    )
    assert read_config("{}")[0] == EplbConfig()


def test_what_means_nothing_here_is_named() -> None:
    _, remarks = read_config('{"use_async": true, "communicator": "torch_nccl", "policy": "default"}')
    assert [remark.split()[0] for remark in remarks] == ["use_async", "communicator"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "--eplb-config: Expected `object`"),
        ('{"windowsize": 1}', "--eplb-config: Object contains unknown field `windowsize`"),
        ('{"window_size": 0}', "--eplb-config: window_size: Expected `int` >= 1"),
        (
            '{"window_size": 10, "step_interval": 5}',
            r"step_interval \(5\) must be at least window_size \(10\)",
        ),
        ('{"policy": "other"}', "there is only 'default', not 'other'"),
    ],
)
def test_mistakes_are_named(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_config(text)


def test_parts_may_be_given_one_by_one() -> None:
    words = ["--enable-eplb", "--eplb-config.window_size", "50", "--eplb-config.step_interval=100"]
    eplb = parse(EngineConfig, [*words, "--eplb-survive", "1"], prog="p", description="d").device.eplb
    assert eplb == EplbConfig(window_size=50, step_interval=100)


def test_flags_that_do_nothing_alone_are_refused() -> None:
    for flags in ({"eplb_config": "{}"}, {"eplb_survive": 1}):
        with pytest.raises(ValueError, match="does nothing without --enable-eplb"):
            DeviceConfig(**flags)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not built for pipeline stages"):
        DeviceConfig(enable_eplb=True, pipeline_parallel_size=2)
    with pytest.raises(ValueError, match="drop --no-enable-expert-parallel"):
        DeviceConfig(enable_eplb=True, enable_expert_parallel=False)
    assert DeviceConfig().eplb is None
    assert DeviceConfig(enable_eplb=True).eplb == EplbConfig()
    assert DeviceConfig(enable_eplb=True, device="cuda").eplb == EplbConfig()


def test_an_instance_that_joins_takes_the_settings_of_the_mesh() -> None:
    config = EplbConfig(window_size=40, step_interval=120, num_redundant_experts=3, log_balancedness=True)
    device = DeviceConfig(**_flags_of(config.balancing(1)))
    assert device.eplb == config
    assert device.eplb_survive == 1
    assert DeviceConfig(**_flags_of(None)) == DeviceConfig()
