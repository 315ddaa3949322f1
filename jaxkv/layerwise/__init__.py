"""Layer by layer, beside the forward pass.

A layer's pages are gathered and sent to the host while the next layer computes; a layer's chunks are sent to the
device a few layers before it needs them. The copies are plain `device_put`s, which ride streams of their own; what
is inside a program rides the program's stream and overlaps with nothing. Nothing here keeps state between calls.
"""

from .fetch import fetch_layers
from .staged import Staged, write
from .store import LayerPart, join_layers, store_layer

__all__ = [
    "LayerPart",
    "Staged",
    "fetch_layers",
    "join_layers",
    "store_layer",
    "write",
]
