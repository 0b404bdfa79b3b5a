"""``--kv-transfer-config``: vLLM's spelling of roles, and what is refused."""

from __future__ import annotations

from typing import get_args

import pytest

from coordinator.messages import Role
from engine.config import CacheConfig
from engine.config.kv_transfer import Connector, read_config


@pytest.mark.parametrize(
    ("kv_role", "role"),
    [("kv_producer", Role.PREFILL), ("kv_consumer", Role.DECODE), ("kv_both", Role.MIXED)],
)
def test_roles_of_vllm_are_roles_here(kv_role: str, role: Role) -> None:
    for connector in ("", *get_args(Connector)):
        named = f', "kv_connector": "{connector}"' if connector else ""
        text = f'{{"kv_role": "{kv_role}"{named}}}'
        assert CacheConfig(kv_transfer_config=text).role is role
        assert read_config(text).without_effect == (("kv_connector",) if connector else ())


def test_what_changes_nothing_here_is_named() -> None:
    text = (
        '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": "a", "kv_port": 14579, '
        '"kv_buffer_device": "cuda", "kv_connector_extra_config": {"kv_lease_duration": 30}, '
        '"kv_load_failure_policy": "recompute", "enable_permute_local_kv": true}'
    )
    assert read_config(text).without_effect == (
        "kv_connector", "engine_id", "kv_buffer_device", "kv_port", "kv_connector_extra_config",
        "enable_permute_local_kv",
    )  # fmt: skip
    assert CacheConfig(kv_transfer_config="{}").role is Role.MIXED


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("5", "Expected `object`"),
        ("{", "truncated"),
        ('{"kv_rolle": "kv_both"}', "unknown field `kv_rolle`"),
        ('{"kv_role": "prefill"}', "kv_role: Invalid enum value 'prefill'"),
        ('{"kv_connector": "PyNccl"}', "kv_connector: Invalid enum value 'PyNccl'; vLLM has .*NixlConnector"),
        ('{"kv_connector": "NixlConnector"}', "kv_connector without kv_role: give kv_producer, kv_consumer"),
        ('{"kv_load_failure_policy": "fail"}', "no request fails for them: leave it out"),
        ('{"kv_connector_module_path": "x.py"}', "kv_connector_module_path: no code of others runs"),
    ],
)
def test_what_means_nothing_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as raised:
        CacheConfig(kv_transfer_config=text)
    assert str(raised.value).startswith("--kv-transfer-config: ")


def test_two_spellings_must_agree() -> None:
    producer = '{"kv_role": "kv_producer"}'
    agreed = CacheConfig(disaggregation_mode="prefill", kv_transfer_config=producer)
    assert agreed.role is Role.PREFILL
    assert CacheConfig(disaggregation_mode="decode", kv_transfer_config="{}").role is Role.DECODE
    for text in ('{"kv_role": "kv_consumer"}', '{"kv_role": "kv_both"}'):
        with pytest.raises(ValueError, match=r"--disaggregation-mode prefill and .* are two roles"):
            CacheConfig(disaggregation_mode="prefill", kv_transfer_config=text)


@pytest.mark.parametrize("off", ["enable_prefix_caching", "enable_kv_transfer"])
def test_a_connector_needs_blocks_that_move(off: str) -> None:
    text = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    named = off.removeprefix("enable_").replace("_", "-")
    with pytest.raises(ValueError, match=f"does nothing with --no-enable-{named}: drop one of the two"):
        CacheConfig(kv_transfer_config=text, **{off: False})
