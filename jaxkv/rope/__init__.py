"""Rope: how a model rotates its keys, and the correction for a key that is used at another position."""

from .difference import explain_difference
from .rope import ANGLE_POSITION_LIMIT, Rope
from .stacked import stacked_deltas
from .tables import RopeTables

__all__ = ["ANGLE_POSITION_LIMIT", "Rope", "RopeTables", "explain_difference", "stacked_deltas"]
