"""Models as graphs: capture, blocks, stages."""

from vpipe.graph.blocks import Block
from vpipe.graph.capture import capture
from vpipe.graph.model_graph import ModelGraph, TensorInfo
from vpipe.graph.random import RandomContext, stable_seed
from vpipe.graph.stage_module import StageModule
from vpipe.graph.stages import StageGraph, edges, tied

__all__ = [
    "Block",
    "ModelGraph",
    "RandomContext",
    "StageGraph",
    "StageModule",
    "TensorInfo",
    "capture",
    "edges",
    "stable_seed",
    "tied",
]
