"""Settings of ``--eplb-config``: how the load of experts is balanced (pure)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from coordinator.messages import Balancing

MOST_STEPS = 10**7
"""Most steps of a window, and between two checks of the loads."""
MOST_REDUNDANT = 4096
"""Most copies of experts in a layer beyond one of each."""
WITHOUT_EFFECT = {
    "use_async": "experts always come beside the steps",
    "communicator": "experts come from the checkpoint or over --mesh-transport",
}
"""Settings of vLLM that are ignored, with the reason that is logged."""
POLICIES = ("default",)


class EplbConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of expert balancing that have an effect, with vLLM's names and defaults."""

    window_size: Annotated[int, Meta(ge=1, le=MOST_STEPS)] = 1000
    """Steps over which loads are counted."""
    step_interval: Annotated[int, Meta(ge=1, le=MOST_STEPS)] = 3000
    """Steps between two decisions whether moving experts pays."""
    num_redundant_experts: Annotated[int, Meta(ge=0, le=MOST_REDUNDANT)] = 0
    """Copies of experts in each layer beyond one of each."""
    log_balancedness: bool = False
    """Log the balancedness of each window."""
    log_balancedness_interval: Annotated[int, Meta(ge=1, le=MOST_STEPS)] = 1
    """Windows between two such lines."""
    policy: str = "default"

    def __post_init__(self) -> None:
        if self.step_interval < self.window_size:
            raise ValueError(
                f"step_interval ({self.step_interval}) must be at least window_size ({self.window_size})"
            )
        if self.policy not in POLICIES:
            raise ValueError(f"policy: there is only {POLICIES[0]!r}, not {self.policy!r}")

    def balancing(self, survive: int) -> Balancing:
        """The same settings in the form that all instances of a mesh agree on."""
        return Balancing(
            window_size=self.window_size,
            windows=max(1, round(self.step_interval / self.window_size)),
            num_redundant=self.num_redundant_experts,
            survive=survive,
            log_every=self.log_balancedness_interval if self.log_balancedness else 0,
        )


def read_config(text: str) -> tuple[EplbConfig, list[str]]:
    """Parses ``--eplb-config``; returns the settings, and remarks to log about ignored ones.

    Raises:
        ValueError: it is no JSON object with these settings.
    """
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
        given = {name: value for name, value in found.items() if value is not None}
        remarks = [f"{name} is ignored: {why}" for name, why in WITHOUT_EFFECT.items() if name in given]
        known = {name: value for name, value in given.items() if name not in WITHOUT_EFFECT}
        return msgspec.convert(known, EplbConfig), remarks
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`")
        raise ValueError(f"--eplb-config: {name + ': ' if name else ''}{what}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--eplb-config: {error}") from error
