"""Dependencies between actions of one minibatch, numbered: the rules as tables, for fast lookup.

A dependency joins an action to one that needs it: F of stage 0 to F of stage 1, F of stage 0 to its own I. Each has
exactly one reader. Which of them cross to another rank may differ from minibatch to minibatch where replicas sit on
the ranks of other stages: there is a table for each phase.
"""

from __future__ import annotations

from typing import NamedTuple

from vpipe.schedule.action import COMPUTE, Op
from vpipe.schedule.rules import Need, Rules


class OpDependencies(NamedTuple):
    """Those of one operation of one stage."""

    needs: tuple[int, ...]
    makes: tuple[int, ...]
    sends: tuple[tuple[int, int], ...]
    """Those that lead to another rank without a message in the programs, each with the stage there."""
    computes: bool


class DependencyTables:
    """`phases[minibatch % period][stage][operation]`, and the number of each dependency."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.numbers: dict[tuple[Need, Need], int] = {}
        self.phases = [self._table(phase) for phase in range(rules.period)]

    def number(self, made: Need, reader: Need) -> int | None:
        """Of the dependency from what is made to who needs it; a whole backward needs what I does."""
        op, stage = reader
        return self.numbers.get((made, (Op.I if op is Op.B else op, stage)))

    def _table(self, phase: int) -> list[dict[Op, OpDependencies]]:
        needs: dict[Need, list[int]] = {}
        makes: dict[Need, list[int]] = {}
        sends: dict[Need, list[tuple[int, int]]] = {}
        schedule = self.rules.schedule
        for stage in range(schedule.num_stages):
            for op in self.rules.operations(stage, phase):
                for made, source in self.rules.needs(stage, op, phase):
                    dependency = self.numbers.setdefault(((made, source), (op, stage)), len(self.numbers))
                    needs.setdefault((op, stage), []).append(dependency)
                    # A whole backward makes what I makes, for all but the W that it is itself.
                    for maker in (Op.I, Op.B) if made is Op.I and op is not Op.W else (made,):
                        if schedule.lowered or self.rules.local(stage, source, phase):
                            makes.setdefault((maker, source), []).append(dependency)
                        else:
                            sends.setdefault((maker, source), []).append((dependency, stage))
        return [
            {
                op: OpDependencies(
                    tuple(needs.get((Op.I if op is Op.B else op, stage), ())),
                    tuple(makes.get((op, stage), ())),
                    tuple(sends.get((op, stage), ())),
                    op in COMPUTE,
                )
                for op in Op
            }
            for stage in range(schedule.num_stages)
        ]
