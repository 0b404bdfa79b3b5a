"""API keys in environment variables: the endpoint's, and what ``lockstep chat`` and ``bench`` present."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from router.config import HttpConfig, check_keys_of_clients

OF_ENDPOINT = ("LOCKSTEP_API_KEY", "VLLM_API_KEY")
OF_CLIENTS = ("LOCKSTEP_API_KEY", "OPENAI_API_KEY", "VLLM_API_KEY")


def with_key(config: HttpConfig, variables: Mapping[str, str]) -> tuple[HttpConfig, str]:
    """The endpoint's settings with a key from the environment, and the variable that held it.

    Unchanged, with an empty name, if --api-key is given or no variable is set.

    Raises:
        ValueError: the variable is empty, or holds what no client could send.
    """
    if config.api_key:
        return config, ""
    for name in OF_ENDPOINT:
        if name in variables:
            check_keys_of_clients(name, [variables[name]])
            return msgspec.structs.replace(config, api_key=(variables[name],)), name
    return config, ""


def key_of_client(variables: Mapping[str, str]) -> str | None:
    """API key from the environment, for a client that was given none."""
    return next((variables[name] for name in OF_CLIENTS if variables.get(name)), None)
