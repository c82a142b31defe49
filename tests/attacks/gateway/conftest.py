"""A real gateway before stand-ins for engines, and what attackers send it."""

from tests.unit.gateway.conftest import short, world

__all__ = ["short", "world"]
