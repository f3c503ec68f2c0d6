"""Models as graphs: capture, blocks, stages."""

from vpipe.graph.blocks import Block
from vpipe.graph.capture import capture
from vpipe.graph.materialise import stable_seed
from vpipe.graph.model_graph import ModelGraph, TensorInfo
from vpipe.graph.stages import StageGraph, edges, tied
from vpipe.graph.targets import target_count

__all__ = [
    "Block",
    "ModelGraph",
    "StageGraph",
    "TensorInfo",
    "capture",
    "edges",
    "stable_seed",
    "target_count",
    "tied",
]
