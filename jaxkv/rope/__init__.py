"""Rope: how a model rotates its keys, and the correction for a key that is used at another position."""

from jaxkv.rope.difference import explain_difference
from jaxkv.rope.rope import ANGLE_POSITION_LIMIT, Rope
from jaxkv.rope.tables import RopeTables

__all__ = ["ANGLE_POSITION_LIMIT", "Rope", "RopeTables", "explain_difference"]
