"""Simulated runs of a plan: time, bubbles, memory over time."""

from vpipe.simulate.memory import RankMemory
from vpipe.simulate.simulation import RankPrediction, Simulation, Timeline, simulate

__all__ = ["RankMemory", "RankPrediction", "Simulation", "Timeline", "simulate"]
