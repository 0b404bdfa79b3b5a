"""Engine core: takes requests in, runs steps, gives out tokens and reports (no sockets)."""

from engine.core.engine_core import EngineCore
from engine.core.model_place import ModelPlace

__all__ = ["EngineCore", "ModelPlace"]
