"""Whether stale weights slow a run down, by the drift that its ranks have watched, and the keys that help.

The rule comes from runs of an MLP, a ViT and a GPT on 4 stages (docs/convergence.md). Where the gradients of the stage
with the oldest ones overshot by more than OVERSHOOT, runs needed 1.2 to 3 times as many samples as synchronous ones.
The reverse does not hold: a GPT that AdamW did not train at all hardly overshot. So what is known of the optimizer
with such delays (`vpipe.cost.convergence`) counts as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vpipe.cost.convergence import MUCH
from vpipe.observe.action_figures import check_versions
from vpipe.observe.evidence import FINE, NOTICE, UNKNOWN, Evidence, Finding
from vpipe.record.status import StageDrift

OVERSHOOT = 0.08
FEW = 5
"""With fewer samples nothing is said."""


def staleness(evidence: Evidence) -> Finding:
    topic, stages = "staleness", _stages(evidence)
    if not stages:
        *_, stale = check_versions(evidence.ranks)
        if any(stale.values()):
            return Finding(topic, UNKNOWN, "gradients are old, but no drift was noted: the run was too short")
        if not evidence.ranks:
            return Finding(topic, UNKNOWN, "no action was recorded")
        return Finding(topic, FINE, "no stage's gradients are old")
    worst = max(stages, key=lambda each: (each.delay, each.overshoot))
    figures: dict[str, Any] = {"stages": [asdict(each) | {"overshoot": each.overshoot} for each in stages]}
    measured = (
        f"stage {worst.stage}, whose gradients are up to {worst.delay} updates old, repeats {worst.overshoot:.1%} of "
        f"an update that they have not seen, and its weights move by {worst.drift:.2%} meanwhile"
    )
    if worst.samples < FEW:
        return Finding(
            topic, UNKNOWN, f"{worst.samples} samples of the drift are too few: {measured}", figures
        )
    if worst.overshoot < OVERSHOOT and worst.factor < MUCH:
        return Finding(topic, FINE, f"stale weights do little harm: {measured}", figures)
    why = [f"above {OVERSHOOT:.0%} runs are slower"] if worst.overshoot >= OVERSHOOT else []
    if worst.factor >= MUCH:
        how = worst.optimizer + (" with prediction" if worst.predicted else " without prediction")
        why.append(f"with such delays {how} is known to need {worst.factor:.1f} times as many samples")
    text = f"the run is slowed by stale weights: {measured} ({'; '.join(why)}); {_remedy(worst)}"
    return Finding(topic, NOTICE, text, figures)


def _remedy(worst: StageDrift) -> str:
    wanted = []
    if worst.optimizer != "muon":
        wanted.append("optimizer: muon")
    if not worst.predicted:
        wanted.append("staleness: [predict]")
    if wanted:
        return f"set {' and '.join(wanted)}, or schedule: 2bw, or a lower learning_rate (docs/convergence.md)"
    return "set schedule: 2bw, a larger update_interval or a lower learning_rate (docs/convergence.md)"


def _stages(evidence: Evidence) -> Sequence[StageDrift]:
    """From the summary or, while the run goes on, from what its ranks say of themselves."""
    try:
        found = _DRIFTS.validate_python(evidence.summary.get("stale") or ())
    except ValidationError:
        found = ()
    return found or [each for state in evidence.states for each in state.status.stale]


_DRIFTS = TypeAdapter(tuple[StageDrift, ...])
