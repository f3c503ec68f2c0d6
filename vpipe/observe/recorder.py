"""The recorder of a rank that trains: its log, watch and events, and on rank 0 the metrics and the progress."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from vpipe.errors import printable
from vpipe.observe.drift import DriftMeter
from vpipe.observe.evaluation import evaluation_line, perplexity_of
from vpipe.observe.figures import Meter, MetricsWriter, RankFigures, shares, stage_figures
from vpipe.observe.held_bytes import count_first_forwards, optimizer_of, weights_of
from vpipe.observe.prometheus import PrometheusEndpoint
from vpipe.observe.results import REPORT
from vpipe.observe.screen import ProgressReport
from vpipe.observe.trackers import start_trackers
from vpipe.observe.utilization import Utilization
from vpipe.observe.watch import RankWatch
from vpipe.record.events import StageBytes
from vpipe.record.run_folder import log_path
from vpipe.record.status import TIMES, read_statuses, stage_lines
from vpipe.record.thinning import Curve, is_written
from vpipe.stage.compiled import compile_seconds
from vpipe.system.best_effort import BestEffort, LogFile
from vpipe.system.start import Phases, phase_table
from vpipe.system.units import show_bytes

if TYPE_CHECKING:
    from vpipe.pipeline import Pipeline

RECENT = 10
"""Updates whose mean is the final loss; that of a single one is noisy."""
TOTALS = (*TIMES, "seconds", "clock", "updates", "bytes_sent", "bytes_received")
"""Figures that a status has."""
NO_METRICS: Mapping[str, float] = {}


class Recorder:
    def __init__(
        self,
        pipe: Pipeline,
        folder: Path,
        *,
        total: int,
        samples: int,
        tokens: int | None,
        print_frequency: int,
        verbose_frequency: int,
        hang_limit: float,
        prometheus_port: int,
        shows_progress: bool = True,
        projects: Mapping[str, str | None] | None = None,
        keys: Mapping[str, str] | None = None,
        phases: Phases | None = None,
        verbose: bool = False,
        peak_tflops: float | None = None,
    ) -> None:
        """`total` updates, 0 if that is not known; `samples` of an update, `tokens` of a sample, if it has any;
        `projects` of trackers, which get the run's `keys`; `phases` of the start, which are shown if `verbose`;
        `peak_tflops` of a card, if it is not to be that of its name."""
        self.effort = BestEffort(self.say)  # for all that is written beside the training
        self._progress = ProgressReport(total, pipe.updates, speaks=pipe.rank == 0, live=shows_progress)
        self.show = self._progress.say  # prints for the user, without the log
        self.log = LogFile(log_path(folder, pipe.rank), self.effort)
        self.losses = Curve[tuple[int, float]]()
        self.evaluations = Curve[tuple[int, float]]()
        self._last_losses: deque[float] = deque(maxlen=RECENT)
        self._last_evaluation: float | None = None
        self._perplexity: float | None = None  # of it
        self.error: BaseException | None = None  # the error that ends the run; set from outside
        self._pipe, self._folder = pipe, folder
        self._total = total
        self._samples, self._tokens = samples, tokens
        self._utilization = Utilization(pipe, peak_tflops)
        self._print_frequency, self._verbose_frequency = print_frequency, verbose_frequency
        self._recent: deque[float] = deque(maxlen=print_frequency)
        self._metrics_found: dict[str, float] = {}  # of the latest evaluation
        self._shows_progress = shows_progress
        self._phases, self._verbose = phases or Phases("first update"), verbose
        self._meter = Meter(pipe)
        self._detailed = self._meter.total()
        self._warm = pipe.updates + pipe.layout.schedule.lag + 1  # until then the pipeline fills up
        self._metrics: MetricsWriter | None = None
        if pipe.rank == 0:
            trackers = start_trackers(projects or {}, folder, keys or {}, self.effort)
            self._metrics = MetricsWriter(folder, self.effort, trackers)
        self._held = count_first_forwards(pipe)
        self._drift = DriftMeter(pipe)
        self._facts: dict[str, Any] = {"total": total, "updates": pipe.updates}
        self._watch = RankWatch(
            pipe,
            folder,
            self.log,
            limit=hang_limit,
            facts=lambda: self._facts,
            say=self.show,
            effort=self.effort,
        )
        serves = prometheus_port and pipe.rank == 0
        self._endpoint = PrometheusEndpoint(folder, prometheus_port) if serves else None

    def expect(self, total: int) -> None:
        """So many updates will have been made in the end; 0: that is not known."""
        self._total = total

    def say(self, line: str) -> None:
        line = printable(line)
        self.log.line(line)
        self.show(line)

    def update(self, update: int, loss: float, epoch: int) -> None:
        """An update's loss has arrived."""
        if self._phases.running:
            self._end_start()
        self.losses.add((update, loss))
        self._last_losses.append(loss)
        self._recent.append(loss)
        if update >= self._warm and not self._meter.running:
            self._meter.start()
        done, loss = update + 1, mean(self._recent)
        so_far = self._meter.total()
        figures = {
            "learning_rate": self._pipe.learning_rate,
            **self._speed(so_far),
            "peak_memory": so_far.peak_memory,
        }
        self._facts = {
            "total": self._total,
            "updates": done,
            "loss": loss if math.isfinite(loss) else None,
            "samples_per_s": figures["samples_per_s"],
            "tokens_per_s": figures.get("tokens_per_s"),
            "mfu": figures.get("mfu"),
            "totals": {name: getattr(so_far, name) for name in TOTALS},
            "stale": self._drift.figures(),
        }
        if update == 0:
            self.log.line(f"Epoch {epoch}, Iteration 0, Loss: {loss:.4f}")
        line = None
        if self._is_due(done, self._print_frequency) or done == self._total:
            line = f"Epoch {epoch}, Iteration {done}, Loss: {loss:.4f}"
            self.log.line(line)
            self._write("train", done, epoch=epoch, loss=loss, **figures)
        self._progress.update(done, loss, figures, line)
        if self._verbose_frequency and self._is_due(done, self._verbose_frequency):
            self._log_details(done)

    def _end_start(self) -> None:
        """The first update is made."""
        self._phases.end()
        if spent := compile_seconds():
            self._phases.move("compile", spent)
        table = phase_table(self._phases.seconds)
        self.log.line(f"the start, on this rank:\n{table}")
        if self._verbose:
            self.show(table)

    def pause(self) -> None:
        """Something else than training follows, until the next update."""
        self._meter.stop()

    def evaluation(self, loss: float, metrics: Mapping[str, float] = NO_METRICS) -> None:
        done = self._pipe.updates
        self.evaluations.add((done, loss))
        self._last_evaluation = loss
        self._metrics_found = dict(metrics)
        self._perplexity = perplexity_of(self._pipe, loss)
        line = f"Iteration {done}, {evaluation_line(loss, self._perplexity, metrics)}"
        self.log.line(line)
        if self._shows_progress:
            self.show(line)
        figures = {} if self._perplexity is None else {"perplexity": self._perplexity}
        self._write("evaluation", done, **{**metrics, "loss": loss, **figures})

    def summary(self, ended: str) -> dict[str, Any]:
        """The figures of the whole run and how it `ended`, the same on every rank.

        All ranks call it when the pipeline is empty.
        """
        self._meter.stop()
        gathered = self._pipe.world.all_gather("figures", list(self._meter.total()))
        lost = self._pipe.world.all_gather("lost writes", [self.effort.failed, self.effort.first])
        skipped = self._pipe.world.all_gather("skipped", self._pipe.runtime.updates.num_skipped)
        stale = self._pipe.world.all_gather("stale", [asdict(each) for each in self._drift.figures()])
        ranks = [RankFigures(*numbers) for numbers in gathered]
        layout, placement = self._pipe.layout, self._pipe.schedule.placement
        by_rank = stage_figures(ranks, placement)
        summary = {
            # A run that was restarted after its last update has made none.
            "loss": mean(self._last_losses) if self._last_losses else self._last_evaluation,
            "evaluation_loss": self._last_evaluation,
            "perplexity": self._perplexity,
            "updates": self._pipe.updates,
            "skipped_updates": max(skipped),
            "lost_writes": sum(count for count, _ in lost),
            "first_lost_write": next((first for _, first in lost if first is not None), None),
            **self._speed(ranks[0]),
            **shares(ranks),
            "peak_memory": [max(by_rank[rank]["peak_memory"] for rank in holders) for holders in placement],
            "ranks": by_rank,
            "stale": [figures for own in stale for figures in own],
            "losses": list(self.losses),
            "evaluations": list(self.evaluations),
            "metrics": self._metrics_found,
            "phases": {name: round(seconds, 3) for name, seconds in self._phases.seconds.items()},
            "schedule": self._pipe.schedule.name,
            "partition": list(layout.partition),
            "blocks": [[layout.graph.blocks[b].name for b in stage.blocks] for stage in layout.stage_graphs],
            "ended": ended,
            "report": str(self._folder / REPORT),
        }
        self._write("ranks", self._pipe.updates, ranks=by_rank, **shares(ranks))
        if summary["stale"]:
            self._write("stale", self._pipe.updates, stages=summary["stale"])
        return summary

    def write_events(self) -> None:
        """Write this rank's recorded actions, with the bytes of its stages and its memory over time."""
        stages = self._pipe.runtime.stages
        held = {
            index: StageBytes(weights_of(stage), optimizer_of(stage), self._held.get(index, 0))
            for index, stage in stages.items()
        }
        with self.effort.writing(self._folder):
            self._pipe.runtime.events.write(self._folder, held, self._watch.memory)

    def close(self) -> None:
        self._watch.close(self.error)
        if self._endpoint is not None:
            self._endpoint.close()
        self._progress.close()
        self.log.close()
        if self._metrics is not None:
            self._metrics.close()

    def _is_due(self, done: int, frequency: int) -> bool:
        """Whether so many updates are reported: of a very long run fewer and fewer, so that its files stay small."""
        return done % frequency == 0 and is_written(done // frequency)

    def _speed(self, so_far: RankFigures) -> dict[str, float]:
        speed = so_far.speed(self._samples)
        tokens = {} if self._tokens is None else {"tokens_per_s": speed["samples_per_s"] * self._tokens}
        return {**speed, **tokens, **self._utilization.mfu(speed["seconds_per_update"])}

    def _log_details(self, done: int) -> None:
        """This rank's times for an update, on average since the last such line."""
        total = self._meter.total()
        recent, self._detailed = total.since(self._detailed), total
        if not recent.updates:
            return
        each = {name: 1000 * getattr(recent, name) / recent.updates for name in TIMES}
        times = ", ".join(f"{name} {milliseconds:.1f} ms" for name, milliseconds in each.items())
        sent, received = recent.bytes_sent / recent.updates, recent.bytes_received / recent.updates
        stages = ", ".join(map(str, self._pipe.runtime.stages))
        share, speed = recent.shares, recent.speed(self._samples)
        self.log.line(
            f"Iteration {done}, stage {stages}, for each update: {times}, "
            f"sent {show_bytes(sent)}, received {show_bytes(received)}; "
            f"{speed['samples_per_s']:.1f} samples/s, {1000 * speed['seconds_per_update']:.1f} ms an update, "
            f"communication {share['communication_share']:.1%}, bubble {share['bubble_share']:.1%}"
        )
        if self._metrics is not None:
            self._metrics.write("stages", done, ranks=stage_lines(read_statuses(self._folder)))

    def _write(self, kind: str, update: int, **figures: Any) -> None:
        if self._metrics is not None:
            self._metrics.write(kind, update, **figures)
