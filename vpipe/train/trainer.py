"""The trainer of one rank: builds the pipeline, trains, evaluates, saves, reports figures."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vpipe import checkpoint
from vpipe.communication import World, agree
from vpipe.communication.devices import take_device
from vpipe.config import RunConfig
from vpipe.config.arguments import build_schedule, check_plan, pipeline_arguments
from vpipe.config.code import load_function
from vpipe.config.compress import compression_by_ranks
from vpipe.config.file import AUTO
from vpipe.data import Batches, Sampler
from vpipe.errors import ConfigError, OutOfMemoryError, Stopped, VPipeError
from vpipe.launch.rank import LAUNCHED
from vpipe.launch.slurm import check_machine
from vpipe.observe.debug import attach
from vpipe.observe.pace import Pace
from vpipe.observe.recorder import Recorder
from vpipe.pipeline import Pipeline
from vpipe.record.run_folder import COMPLETE, STOPPED, log_path, make_folder, make_run_folder, write_resumed
from vpipe.record.whereabouts import whereabouts
from vpipe.system.best_effort import LogFile
from vpipe.system.device import limit_memory, make_deterministic
from vpipe.system.environment import DEVICE
from vpipe.system.faults import ATTEMPT
from vpipe.system.host_memory import keep_freed_memory
from vpipe.system.start import Phases, launchers_phases, process_began
from vpipe.system.units import read_bytes
from vpipe.train.datasets import Datasets, make_datasets
from vpipe.train.description import about_architecture, about_staleness, describe, write_description
from vpipe.train.memory_advice import advise, memory_advice
from vpipe.train.plan_by_ranks import choose_by_ranks
from vpipe.train.position import Position
from vpipe.train.preload import prepared_model
from vpipe.train.save_policy import SavePolicy, find_checkpoint
from vpipe.train.signals import Signals
from vpipe.train.workload import configured_loss, configured_loss_weight, configured_model
from vpipe.train.world import world_of_run
from vpipe.weights import learning_rate_policy


class Trainer:
    """One rank's part of a run. Every rank makes one and calls the same methods."""

    def __init__(
        self,
        config: RunConfig,
        world: World | None = None,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        """`announce` is called, on rank 0, with what begins and takes its time."""
        self.phases = Phases("import", process_began(), launchers_phases())
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        if config.deterministic:
            make_deterministic()
        self.config = config
        self.place = whereabouts(world.rank if world else int(os.environ.get("RANK", "0")))
        self.place.say("the rendezvous")
        self.phases.begin("rendezvous")
        self.world = world_of_run(config, world)
        self.rank = self.world.rank
        say = announce if announce is not None and self.rank == 0 else _ignore
        self.folder = self._agree_on_folder()
        self.notes: list[str] = []
        if AUTO in (config.partition, config.compress):
            self.config = config = choose_by_ranks(
                self.world, config, self.folder, self.phases, say, self.notes.append
            )
        self.device = self._take_device()
        if self.device.type == "cpu":
            keep_freed_memory()
        else:  # the thread of a split backward may begin with a product: torch makes the context, and warns
            warnings.filterwarnings(
                "ignore", "Attempting to run cuBLAS, but there was no current CUDA context"
            )
        log = LogFile(log_path(self.folder, self.rank))
        backend = f"backend: {config.distributed_backend or 'auto'}, rank: {self.rank}, world_size: {self.world.size}"
        log.line(f"Finished initializing process group; {backend}")
        log.close()
        say("building the model and reading the data")
        self.phases.begin("build")
        self.model = agree(self.world, "model", lambda: configured_model(config, "meta"))
        self.place.say("the reading of the data")
        self.data = agree(self.world, "data", self._read_data)
        self.position = Position(config, self.data.train, build_schedule(config).update_interval)
        self.position_found: dict[str, Any] = {}  # the position in the checkpoint that the run continues from
        self.resumed_from: Path | None = None  # the checkpoint
        self.place.say("the making of the pipeline")
        known = prepared_model(config) is self.model
        say("cutting the model into stages" if known else "capturing the model and cutting it into stages")
        self.phases.end()
        self.pipe = self._build_pipeline()
        self.phases.include(self.pipe.phases.seconds)
        try:
            check_plan(config, self.pipe.layout.graph.plan_fingerprint)
        except ConfigError:
            self.pipe.close()
            raise

    def restore(self, resume: str | None, report: Callable[[str], None]) -> str | None:
        """Go on from a checkpoint, start from pretrained weights, or from nothing; what was done, if anything.

        `report` is called, on rank 0, for each checkpoint that is skipped.
        """
        path = agree(self.world, "checkpoint", lambda: self._find(resume, report))
        path = self.world.all_gather("checkpoint found", path)[0]  # rank 0 looks for all
        if path is not None:
            self.position_found = checkpoint.load(self.pipe, Path(path), report)
            self.resumed_from = Path(path)
            self.position.resume(self.position_found, self.pipe.updates, path)
            return f"resumed from {path} after {self.pipe.updates} updates"
        if resume is not None:
            return "there is no checkpoint to resume from: training starts anew"
        if self.config.pretrained is not None:
            written = self.config.pretrained
            missing = checkpoint.load_pretrained(self.pipe, self.model, self.config.path(written))
            return f"started from {written}" + (f", which lacks {', '.join(missing)}" if missing else "")
        return None

    def train(
        self,
        resume: str | None = None,
        debug: Sequence[str] = (),
        take_signals: Callable[[], None] | None = None,
        *,
        verbose: bool = False,
    ) -> dict[str, Any]:
        """Train to the end and return the summary of the run; raises `Stopped` if it was requested to end before.

        `debug` names what is logged of each action; with `verbose` the phases of the start are shown. The signal
        handlers of before are restored afterwards, unless training fails and `take_signals` sets others.
        """
        pipe, recorder = self.pipe, self._begin(resume, debug, verbose)
        signals = Signals(pipe, recorder.say)
        pipe.on_warning(recorder.say)
        try:
            with SavePolicy(pipe, self.folder, self.config, recorder.say) as saves:
                saves.resume(self.position_found)
                signals.listen()
                with memory_advice(self.config, self.folder, pipe):
                    self._train(recorder, saves)
                if self._stops:
                    saves.check()
                if not (self._stops and saves.up_to_date):
                    recorder.show("writing the last checkpoint ...")
                    saves.save(self._position_here)
                saved = str(saves.finish())
                recorder.write_events()  # before the ranks meet for the summary: then rank 0 reads everybody's
                summary = recorder.summary(STOPPED if self._stops else COMPLETE)
                summary["checkpoint"] = saved
            if self._stops:
                raise Stopped(
                    f"the run was stopped by you (a signal or a program asked it to end): it has made {pipe.updates} "
                    f"of {self.position.updates} updates, which are saved in {saved}; go on with --resume auto",
                    summary,
                )
        except BaseException as error:
            recorder.error = error
            if not isinstance(error, Stopped):
                recorder.write_events()
            if take_signals is not None:
                signals.hand_over(take_signals)
            raise
        finally:
            signals.close()
            recorder.close()
        self.place.say("its end")
        return summary

    @property
    def _stops(self) -> bool:
        """Whether training was requested to end before its last update."""
        return self.pipe.stop_requested and self.pipe.updates < self.position.updates

    def _begin(self, resume: str | None, debug: Sequence[str], verbose: bool) -> Recorder:
        """Restore what was saved, and say what begins."""
        pipe, config = self.pipe, self.config
        notes = [*self.notes]
        self.phases.begin("restore")
        restored = self.restore(resume, notes.append)
        if pipe.updates >= self.position.updates and not int(os.environ.get(ATTEMPT, "0")):
            raise VPipeError(
                f"there is nothing to train: {pipe.updates} of {self.position.updates} updates are made: "
                "raise epochs or max_updates"
            )
        pipe.runtime.align_clocks()
        recorder = Recorder(
            pipe,
            self.folder,
            total=self.position.updates,
            samples=self.position.interval * config.batch_size,
            tokens=config.sequence_length
            if not config.data and "input_ids" in pipe.layout.graph.fields
            else None,
            print_frequency=config.print_frequency,
            verbose_frequency=config.verbose_frequency,
            hang_limit=config.hang_limit,
            prometheus_port=config.prometheus_port,
            projects={"wandb": config.wandb, "mlflow": config.mlflow},
            phases=self.phases,
            verbose=verbose,
            peak_tflops=config.peak_tflops,
            keys={
                key: str(value) for key, value in config.model_dump(mode="json", exclude_none=True).items()
            },
        )
        if self.rank == 0:
            write_description(pipe, config, self.data, self.folder, recorder.effort)
            before = self.resumed_from
            if before is not None and before.absolute().parents[1] != self.folder.absolute():
                with recorder.effort.writing(self.folder):
                    write_resumed(self.folder, before, pipe.updates)
        runtime = pipe.runtime
        stages = " and ".join(map(str, runtime.stages))
        recorder.log.line(f"[Rank {self.rank}] Stage: {stages}, Rank in stage: {runtime.rank_in_stage}")
        described = describe(pipe, config, type(self.model).__name__, self.position)
        stale = about_staleness(config, pipe.schedule)
        architecture = about_architecture(config, self.model)
        for line in (described, architecture, stale, self.data.note, *notes, restored):
            if line is not None:
                recorder.say(line)
        recorder.log.line("Training...")
        self.phases.begin("first update")
        if debug:
            attach(pipe, debug, recorder.log.line, recorder.show)
        return recorder

    def _train(self, recorder: Recorder, saves: SavePolicy) -> None:
        """Every update, with the evaluations and checkpoints between them, and the last evaluation."""
        pipe = self.pipe
        pace = Pace(pipe, recorder.say)

        def record(update: int, loss: float) -> None:
            recorder.update(update, loss, self.position.epoch(update))
            pace.update()

        remove = pipe.on_update(record)
        try:
            while pipe.updates < self.position.updates and not self._stops:
                end = self._next_pause(pipe.updates)
                for update, _ in pipe.train(self.position.batches(pipe.updates, end)):
                    if update + 1 < end and saves.due(update + 1):
                        recorder.pause()
                        saves.save(self._position_here)
                if self._stops or end == self.position.updates:
                    break
                if _divides(self.config.evaluation_interval, end):
                    self._evaluate(recorder, saves)
                if saves.due(end):
                    recorder.pause()
                    saves.save(self._position_here)
        finally:
            remove()
        if not self._stops:
            self._evaluate(recorder, saves)

    def _next_pause(self, done: int) -> int:
        """The update after which the run evaluates or saves next, or ends.

        Until there the pipeline is drained for no evaluation and no regular save, so it is drained for them at the same
        updates in a run that was resumed.
        """
        intervals = filter(None, (self.config.evaluation_interval, self.config.checkpoint_interval))
        return min((done // interval + 1) * interval for interval in (*intervals, self.position.updates))

    def _evaluate(self, recorder: Recorder, saves: SavePolicy) -> None:
        recorder.pause()
        loss, metrics = self.evaluate()
        recorder.evaluation(loss, metrics)
        saves.evaluated(loss)

    def evaluate(self) -> tuple[float, dict[str, float]]:
        """The mean loss over the validation samples, always the same ones, and what `compute_metrics` finds."""
        config, samples = self.config, len(self.data.validation)
        sampler = Sampler(samples, config.batch_size, config.seed)
        count = -(-min(samples, config.evaluation_samples) // config.batch_size)
        batches = Batches(self.data.validation, sampler, 0, count)
        if self.config.compute_metrics is None:
            return self.pipe.evaluate(batches), {}
        found = self.pipe.evaluate(batches, load_function(self.config, "compute_metrics"))
        return found.pop("loss"), found

    def close(self) -> None:
        self.pipe.close()

    def _agree_on_folder(self) -> Path:
        """The launcher has made the run's folder; otherwise rank 0 makes it for all."""

        def make() -> str | None:
            if LAUNCHED in os.environ:
                return os.environ[LAUNCHED]
            return str(make_run_folder(Path(self.config.log_directory))) if self.rank == 0 else None

        folder = Path(self.world.all_gather("folder", agree(self.world, "run folder", make))[0])
        agree(self.world, "folder of this host", lambda: make_folder(folder))
        return folder

    def _read_data(self) -> Datasets:
        """A tokenizer is trained once, by rank 0; the others wait and find it in the cache."""
        cache = self.folder.parent / "cache"
        if self.rank:
            self.world.all_gather("tokenizer", None)
            return make_datasets(self.config, self.model, cache)
        try:
            return make_datasets(self.config, self.model, cache)
        finally:
            self.world.all_gather("tokenizer", None)

    def _build_pipeline(self) -> Pipeline:
        config, train = self.config, self.data.train
        policy = learning_rate_policy(
            config.learning_rate_policy, warmup=config.warmup_updates, total=self.position.updates
        )
        try:
            return Pipeline(
                self.model,
                train.batch(range(min(config.batch_size, len(train))), 0),
                loss_fn=configured_loss(config),
                lr_scheduler=policy,
                precision=config.precision,
                compile=config.compile,
                cuda_graphs=config.cuda_graphs,
                on_nonfinite=config.on_nonfinite,
                nonfinite_limit=(config.nonfinite_limit[0], config.nonfinite_limit[1]),
                loss_scale=config.loss_scale,
                loss_weight=configured_loss_weight(config),
                compress=compression_by_ranks(config),
                device=self.device,
                world=self.world,
                **pipeline_arguments(config),
            )
        except OutOfMemoryError as error:
            raise OutOfMemoryError(f"{error}; {advise(config, None)}") from error

    def _find(self, resume: str | None, report: Callable[[str], None]) -> str | None:
        if self.rank:
            return None
        # A run that was restarted after a fault goes on where it was; before its first checkpoint, as it began.
        found = checkpoint.newest(self.folder / "checkpoints", report) if LAUNCHED in os.environ else None
        if found is None and resume is not None:
            found = find_checkpoint(resume, self.folder.parent, report)
        return None if found is None else str(found)

    def _position_here(self) -> dict[str, Any]:
        """Where in the data the pipeline is, once it is drained."""
        return self.position.state(self.pipe.updates)

    def _take_device(self) -> torch.device:
        """This rank's device, of whose memory it may have what the configuration says."""
        device = take_device(
            self.world, agree(self.world, "machines", lambda: named_gpu(self.config, self.rank))
        )
        cap = self.config.gpu_memory
        agree(self.world, "memory", lambda: limit_memory(device, None if cap is None else read_bytes(cap)))
        return device


def _ignore(text: str) -> None:
    pass


def _divides(interval: int, updates: int) -> bool:
    return bool(interval) and updates % interval == 0


def named_gpu(config: RunConfig, rank: int) -> str | None:
    """The GPU that `machines` names for a rank that some other launcher than ours has started."""
    check_machine(config, rank)
    count = torch.cuda.device_count()
    if config.machines is None or DEVICE in os.environ or not count:
        return None
    gpu = int(config.machines[rank].rpartition(":")[2])
    if gpu < count:
        return f"cuda:{gpu}"
    if count == 1:
        return None  # its launcher shows every rank one card: the rank's own
    raise ConfigError(
        f"{config.source}: machines names GPU {gpu} for rank {rank}, which sees {count}: name 0 to {count - 1}"
    )
