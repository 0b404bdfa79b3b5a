"""``--kv-events-config``: vLLM's settings, and what is refused."""

from __future__ import annotations

import pytest

from engine.config import CacheConfig
from engine.config.kv_events import endpoint_of, read_config

ON = '{"enable_kv_cache_events": true'


def test_all_settings_of_vllm_are_taken() -> None:
    text = (
        ON + ', "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", '
        '"buffer_steps": 10000, "hwm": 100000, "max_queue_size": 100000, "topic": ""}'
    )
    assert read_config(text) == read_config(ON + ', "replay_endpoint": "tcp://*:5558", "publisher": "zmq"}')
    assert CacheConfig(kv_events_config=text).kv_events == read_config(text)
    for off in ("{}", ON + ', "publisher": "null"}', '{"enable_kv_cache_events": false}'):
        assert CacheConfig(kv_events_config=off).kv_events is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("5", "Expected `object`"),
        ("{", "truncated"),
        (ON + ', "endpoints": ""}', "unknown field `endpoints`"),
        (ON + ', "publisher": "kafka"}', "publisher: Invalid enum value 'kafka'"),
        (ON + ', "hwm": 0}', "hwm: Expected `int` >= 1"),
        (ON + ', "buffer_steps": 20000000}', "buffer_steps: Expected `int` <= 10000000"),
        (ON + ', "endpoint": "5557"}', "endpoint: give tcp://HOST:PORT"),
        (ON + ', "endpoint": "tcp://*"}', "endpoint: give tcp://HOST:PORT with a port from 1 to 65535"),
        (ON + ', "endpoint": "tcp://*:0"}', "with a port from 1 to 65535"),
        (ON + ', "endpoint": "tcp://*:70000"}', "with a port from 1 to 65535"),
        (ON + ', "endpoint": "inproc://kv"}', "nobody outside the process could hear it"),
        (ON + ', "endpoint": "ipc://"}', "ipc:// needs a path"),
        (ON + ', "replay_endpoint": "tcp://*:5557"}', "are both tcp://\\*:5557: give two ports"),
        ('{"publisher": "zmq"}', "publishes nothing without enable_kv_cache_events"),
    ],
)
def test_what_means_nothing_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as raised:
        CacheConfig(kv_events_config=text)
    assert str(raised.value).startswith("--kv-events-config: ")


def test_events_need_a_prefix_cache() -> None:
    with pytest.raises(ValueError, match="--kv-events-config does nothing with --no-enable-prefix-caching"):
        CacheConfig(kv_events_config=ON + "}", enable_prefix_caching=False)


def test_each_instance_has_endpoints_of_its_own() -> None:
    assert [endpoint_of("tcp://*:5557", rank) for rank in (0, 1, 7)] == [
        "tcp://*:5557", "tcp://*:5558", "tcp://*:5564",
    ]  # fmt: skip
    assert endpoint_of("tcp://[::1]:5557", 2) == "tcp://[::1]:5559"
    assert endpoint_of("ipc:///tmp/kv", 1) == "ipc:///tmp/kv_dp1"
    with pytest.raises(ValueError, match="instance 2 would need port 65537: give a lower port"):
        endpoint_of("tcp://*:65535", 2)
