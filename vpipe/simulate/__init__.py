"""What a plan would take, known before anything runs: time, bubbles, memory over time."""

from vpipe.simulate.memory import Memory
from vpipe.simulate.simulation import RankFigures, Simulation, Timeline, simulate

__all__ = ["Memory", "RankFigures", "Simulation", "Timeline", "simulate"]
