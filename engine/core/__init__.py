"""Step loop of one instance without sockets: requests in, steps of the executor, tokens and reports out."""

from engine.core.engine_core import EngineCore
from engine.core.model_place import ModelPlace

__all__ = ["EngineCore", "ModelPlace"]
