"""Simulated runs of a plan: time, bubbles, memory over time."""

from vpipe.simulate.memory import RankMemory
from vpipe.simulate.simulation import RankPrediction, Simulation, Timeline, simulate
from vpipe.system.callable_module import make_callable

__all__ = ["RankMemory", "RankPrediction", "Simulation", "Timeline", "simulate"]

make_callable(__name__)
