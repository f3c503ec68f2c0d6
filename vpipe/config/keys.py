"""The configuration of a run: every key of the YAML file, checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StrictBool, model_validator

from vpipe.config.code import CODE_KEYS, names_code
from vpipe.config.contradictions import contradictions
from vpipe.config.names import MEANT
from vpipe.config.settings import AUTO
from vpipe.config.values import (
    LARGEST,
    Betas,
    Code,
    Compress,
    Count,
    Depth,
    Layers,
    LossWeight,
    Machine,
    MemorySize,
    Momentum,
    Natural,
    NotNegative,
    OptimizerName,
    Path_,
    Pattern,
    Places,
    Positive,
    Program,
    Rank,
    Real,
    ScheduleName,
    Seconds,
    Share,
)
from vpipe.cost.fields import mistake
from vpipe.errors import VPipeError
from vpipe.schedule import guides_schedule, kind_of, read_table
from vpipe.schedule.staleness import Staleness, read_staleness
from vpipe.system.files import exists, read_text, short_repr
from vpipe.system.validation import unknown_key


class _Keys(BaseModel):
    """Keys and their values; any other key is a mistake."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                raise mistake(unknown_key(key, values[key], cls.model_fields, MEANT))
        return values


class OptimizerGroup(_Keys):
    """Settings of some parameters; a key that is not given has the run's own value."""

    match: Pattern | Annotated[list[Pattern], Field(min_length=1)]
    optimizer: OptimizerName | None = None
    learning_rate: Positive | None = None
    weight_decay: NotNegative | None = None


class RunConfig(_Keys):
    """One run: model, pipeline, training. Paths in it are relative to the file it was read from."""

    # The model

    model_type: Literal["bert", "cpm", "translation"] = "bert"
    """Model that is trained: BERT with masked words, CPM (a GPT-2), or translation (a T5)."""
    model: Path_ | None = None
    """Instead of `model_type`: a Hugging Face `config.json`, or a directory that holds one; or a function of your own
    that returns an `nn.Module`, as `module:function`."""
    loss: Code | None = None
    """Function of your own, as `module:function`, that gets the model's output and the fields of a batch that `forward`
    does not take, and returns the loss; if not given, the model returns it."""
    loss_weight: LossWeight = "auto"
    """What a minibatch counts in its update's loss. samples: its number; tokens: the number of targets that its loss is
    a mean over, so that an update equals the plain model's over the whole batch; or a function of your own, as
    `module:function`, from a minibatch's fields to a number. auto: tokens, if the loss is such a mean, else labels that
    are not -100, else samples."""
    python_path: list[Path_] = []
    """Directories with the modules of the functions that `model`, `loss`, `loss_weight`, `data` and `compute_metrics`
    name. They are looked for there, beside this file, in the current directory, and among the installed packages."""
    hidden_size: Count = 128
    """Width of the model (BERT-large: 1024)."""
    num_layers: Layers = 4
    """Layers of the model (BERT-large: 24); for translation, of its encoder and of its decoder."""
    num_heads: Count = 4
    """Attention heads of each layer (BERT-large: 16)."""
    intermediate_size: Count | None = None
    """Width inside the feed-forward layers; four times `hidden_size` if not given."""
    vocab_size: Annotated[int, Field(strict=True, ge=8, le=LARGEST)] = 1024
    """Number of different tokens (BERT: 30522)."""
    dropout: Annotated[Real, Field(ge=0, lt=1)] = 0.1
    """Share of the activations that is dropped in training."""
    pretrained: Path_ | None = None
    """Directory with the `safetensors` weights that training starts from, as `save_pretrained` writes them."""

    # The data

    data_dir: Path_ | None = None
    """What to train on, a file or a folder: text in UTF-8; records with a text or messages (`.jsonl`, `.parquet`, or a
    folder that the package `datasets` saved); tokens (`.bin`); for translation a folder with two files, line by line
    aligned; HDF5 shards for BERT (see docs/data.md). If not given, the source text of Python's standard library."""
    data_field: Annotated[str, Field(min_length=1)] | None = None
    """Field of the records that is read: a text, or a list of messages. If not given, `text` or `messages`."""
    token_type: Literal["uint16", "uint32"] | None = None
    """Type of the tokens in `.bin` files; if not given, uint16 if the vocabulary allows it."""
    documents: Literal["joined", "masked", "padded"] = "joined"
    """How documents become samples of a model that predicts the next token. joined: one after the other, and attention
    crosses from one document into the next; masked: the same, but attention, positions and loss stay within a document;
    padded: each is a sample of its own, cut to `sequence_length` or filled up."""
    data: Code | None = None
    """Instead of `data_dir`: function of your own, as `module:function`, that returns the samples: a data set (with
    `__len__` and `__getitem__`), or a pair of them for training and validation."""
    synthetic_data: StrictBool = False
    """Train on random tokens; no data set is needed."""
    tokenizer: Path_ | None = None
    """A `tokenizer.json`, or a directory that holds one; if not given, one is trained on the text."""
    max_samples: Count | None = None
    """Samples of the data set at most; of synthetic data there are 1024 if not given."""
    validation_share: Annotated[Real, Field(gt=0, lt=1)] = 0.05
    """Share of the samples that is kept apart for evaluation."""
    batch_size: Count = 8
    """Samples of a minibatch, which all stages compute at once: not of an update, and not split further."""
    global_batch_size: Count | None = None
    """Samples of an update: `batch_size` times `minibatches` (in an asynchronous schedule times `update_interval`). The
    one of them that is not given follows from it; if none is, it is split into as many minibatches as the default."""
    sequence_length: Annotated[int, Field(strict=True, ge=4, le=LARGEST)] = 128
    """Tokens of a sample."""

    # The pipeline

    schedule: ScheduleName | None = None
    """Order of the work: gpipe, 1f1b, interleaved, zb-h1, zb-v, pipedream, 2bw, vpipe, or the path of a table
    that `vpipe schedule --csv` wrote. auto: with `partition: auto`, the one that reaches a loss first by prediction, as
    `vpipe plan --schedule auto` chooses it; a line says which, and why. If not given, `macrobatch` and `sync_mode`
    choose."""
    sync_mode: Literal["asp", "bsp"] | None = None
    """bsp: the minibatches of a batch make one update together; asp: each makes its own, on weights that may be stale.
    Without `schedule` they choose 1f1b and vpipe; a schedule of the other kind is refused."""
    macrobatch: StrictBool | None = None
    """true: one update for every `update_interval` minibatches, with two versions of the weights (schedule 2bw)."""
    stages: Places | None = None
    """Positions of the pipeline; if not given, as many as `machines` has entries, or as `module` says. With `partition:
    auto` as many ranks, which have another layout only if that is faster by more than 2 %; a line says so then."""
    minibatches: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] | None = None
    """Minibatches of an update in a synchronous schedule; twice the number of stages if not given."""
    update_interval: Count | None = None
    """Minibatches of an update in an asynchronous schedule."""
    chunks: Places | None = None
    """Stages on each rank, for the schedule interleaved."""
    replicas: Annotated[list[Places], Field(min_length=1, max_length=4096)] | None = None
    """Number of ranks of each position of the pipeline, such as [2, 1]."""
    placement: Annotated[list[list[Rank]], Field(min_length=1, max_length=4096)] | None = None
    """The ranks of each position of the pipeline, such as [[0, 2], [1]], in the order of their first minibatches.
    `replicas` gives as many of them. If not given, ranks are numbered position by position. `vpipe plan` chooses it
    where ranks are on several hosts."""
    depth: Annotated[list[Depth], Field(min_length=1, max_length=4096)] | None = None
    """Forwards of each stage before its first pair of forward and backward, such as [6, 4, 2, 0]: more of them hide
    slow links, for more memory (and older weights in asynchronous schedules). If not given, as many as keep the ranks
    behind the stage busy. For 1f1b, zb-h1, pipedream, vpipe and 2bw."""
    partition: Annotated[list[Count], Field(min_length=1, max_length=4096)] | Path_ | None = None
    """Blocks of each stage (`vpipe blocks` lists them), or the path of a plan (`vpipe.json`, or what `vpipe plan`
    wrote), whose schedule and replicas then hold too unless they are given; auto: the model is profiled and
    planned before the run, with the links between hosts if there are several. If not given, stages of about equal work,
    by the flops and the bytes of their operations."""
    policies: list[Literal["keep", "recompute", "swap"]] | None = None
    """Memory policy of each block's activations until backward; instead of a plan's, or of `recompute_ratio`."""
    gpu_memory: MemorySize | None = None
    """Memory of a rank that a plan may use, such as 11GiB; if not given, the device's."""
    recompute_ratio: Share | list[Share] | None = None
    """Share of each stage's blocks, counted from its end, whose activations are recomputed in backward; one
    number for all stages, or one for each. Of n blocks the last int(share * n) are. It overrides `vpipe.json`."""
    recompute: StrictBool | None = None
    """true: everything is recomputed; false: nothing. Ratios or a plan that say otherwise are refused."""

    # The training

    optimizer: OptimizerName | None = None
    """Rule of the updates. If not given, adamw; in an asynchronous schedule muon, with `staleness: [predict]`; with
    `schedule: auto` muon in any. muon: Muon for the matrices between embedding and head, AdamW for the rest, with one
    rate for both; it bears stale weights best. nadamw: NAdam with decoupled weight decay and a first beta of 0.99."""
    learning_rate: Positive = 1e-4
    """Size of the updates."""
    learning_rate_policy: Literal["polynomial", "step", "cosine", "constant"] = "constant"
    """How the learning rate falls after the warm-up: in a straight line to 0, to a tenth after each third of
    the run, along half a cosine, or not at all."""
    warmup_updates: Natural = 0
    """Updates during which the learning rate rises from 0."""
    weight_decay: NotNegative = 0.0
    """How much weights shrink with each update."""
    betas: Betas | None = None
    """Decay of the two moments of adam, adamw, nadamw, lamb and of muon's AdamW; if not given, the optimizer's own, and
    0.97 and 0.99 for muon where gradients are an update old or more on average (schedule vpipe with 3 stages)."""
    eps: Positive | None = None
    """What these optimizers add to the root of the second moment; if not given, the optimizer's own."""
    momentum: Momentum | None = None
    """Momentum of sgd (0.9 if not given) and muon (0.95)."""
    staleness: list[str | dict[str, int]] | None = None
    """Remedies for the stale weights of an asynchronous schedule, such as `[predict, {async_after: 100}]`. predict:
    forwards read the weights as they are expected to be when their gradients are applied. split_tied: the last stage's
    part of a tied embedding's gradient is applied at once, the first stage's when it has come; else both wait for each
    other. async_after: so many updates at the beginning are made one after the other, with an empty pipeline between
    them. `[]`: none."""
    optimizer_groups: list[OptimizerGroup] = []
    """Other settings for some parameters, by name: `match` is one or several patterns (`*` stands for any text, as in
    `"*.bias"`), `optimizer`, `learning_rate` and `weight_decay` override the run's own. The first entry that matches a
    parameter counts; a pattern that matches no parameter is an error."""
    clip_norm: Positive | None = None
    """Largest norm of the gradients: of all stages together, for which all ranks wait for each other at each update, or
    of each stage in an asynchronous schedule."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision in which the model computes; weights are kept and updated in fp32."""
    loss_scale: Positive | None = None
    """Loss scale that fp16 begins with; 65536 if not given. An overflow halves it, and 2000 updates without one double
    it."""
    compile: StrictBool = False
    """Blocks are compiled by torch.compile when they first run, which takes a C++ compiler, or Triton on a GPU.
    Dropout then draws other masks than without it. Evaluation is not compiled."""
    chunked_loss: StrictBool = True
    """The head and the loss of a large vocabulary are computed for some tokens at a time, so that the logits of a
    minibatch are never there as a whole: where the vocabulary is at least 4 times as large as a hidden state, and a
    minibatch in bf16 or fp16 has at least as many targets as a hidden state numbers, or one in fp32 at least 2**26
    logits. false: they are computed as the model does."""
    cuda_graphs: StrictBool | Literal["auto"] = False
    """On GPUs a stage's work for a minibatch is recorded as CUDA graphs and replayed: for small minibatches, whose
    kernels a GPU runs faster than its host launches them. It takes some more memory. Stages that swap, minibatches of
    another shape than the first, and those whose graphs have no room are run eagerly. auto: only stages whose host is
    slower than their GPU, as their second minibatch shows; none on a CPU."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a loss or a gradient that is not finite, before the update: stop ends the run, skip leaves out the
    update on every stage, for which all ranks wait for each other. With fp16 an overflow is no error: the loss scale is
    lowered."""
    nonfinite_limit: Annotated[list[Count], Field(min_length=2, max_length=2)] = [10, 100]
    """The run ends when `on_nonfinite: skip` has skipped so many of the last so many updates: with `[10, 100]` a share
    of 10 %, and also a count, because 10 skipped one after the other end it at once."""
    deterministic: StrictBool = False
    """Only algorithms that give the same result every time, which are slower on a GPU; an operation that has none
    is an error. On the CPU two runs with one seed are equal to the bit anyway."""
    epochs: Count = 1
    """Passes over the data set."""
    max_updates: Count | None = None
    """Most updates of the run; if not given, training ends after `epochs`."""
    evaluation_interval: Natural = 0
    """Updates between two evaluations; 0: only one, at the end."""
    evaluation_samples: Count = 256
    """Samples of an evaluation at most."""
    compute_metrics: Code | None = None
    """Function of your own, as `module:function`, that gets the model's output and the batch at an evaluation, and
    returns numbers by name, such as an accuracy (see docs/python.md)."""
    prompt: str = ""
    """Beginning of the sample sentence that a GPT writes at the end of its training."""
    seed: Natural = 0
    """Seed of the initial weights, of the data's order and of dropout."""

    # Ranks and hosts

    machines: Annotated[list[Machine], Field(min_length=1, max_length=4096)] | None = None
    """host:GPU of each rank, by its number among the GPUs that the rank sees; ranks may share a GPU. The ranks of other
    hosts are started by ssh (docs/many_machines.md)."""
    module: Annotated[str, Field(pattern=r"^vgpus=[1-9][0-9]{0,3}$")] | None = None
    """'vgpus=4': the number of ranks; it must be the one that `machines`, `stages` or `replicas` make, if given."""
    distributed_backend: Literal["gloo", "nccl"] | None = None
    """Channel between hosts (within one host it is shared memory, or CUDA IPC): gloo goes through the hosts' memory,
    from GPU to GPU too; chosen by the devices if not given."""
    compress: (
        Compress | Literal["auto"] | dict[str, Compress | dict[Literal["forward", "backward"], Compress]]
    ) = "none"
    """How activations and their gradients are compressed between ranks on different hosts: as bfloat16, or with 8 or 4
    bits a number; or for each apart, as in `{forward: int8, backward: bf16}`. `replicas` in that mapping is for the
    gradients of replicas; a pair of hosts, as in `{nodea/nodeb: int8}`, is a link with a mode, or such a mapping, of
    its own; without `machines` a pair of ranks, as in `{0/2: int8}`. `auto`: bf16 or int8 on the links that bound an
    update of the plan (docs/many_machines.md)."""
    links: Path_ | None = None
    """File of `vpipe doctor --machines` with the hosts and the links between them, for `partition: auto` and
    `compress: auto`. If not given, the ranks measure them when they have met."""
    directory: Path_ | None = None
    """Directory that the ranks start in, also under torchrun and srun, and where `partition` and `config_file` are
    looked for if they are not beside this file. It is relative to this file or, if there is none, to the current
    directory."""
    config_file: Path_ | None = None
    """Path of an `mp_conf.json` with the maps of modules, stages, ranks and depths, beside this file or in
    `directory`."""
    python: Program | None = None
    """Python on the other hosts of `machines`: its absolute path, or a name that is found there; if not given, the path
    of the one that runs this command."""
    container: Path_ | None = None
    """Singularity or Apptainer image that the ranks run in, with its own Python, torch and vpipe; data, code and logs
    are bound into it. Also under torchrun and srun."""
    port: Annotated[int, Field(strict=True, ge=0, le=65535)] = 0
    """Port where the ranks meet; 0: any that is free."""
    timeout: Seconds = 600.0
    """Seconds that a rank waits for another before it gives up."""
    rendezvous_limit: Seconds = 300.0
    """Seconds within which all ranks must have started."""
    heartbeat_limit: Annotated[Real, Field(ge=1, le=1e6)] = 10.0
    """Seconds within which a rank that is stopped, or whose interpreter hangs, is found."""

    # Logs, checkpoints, monitoring

    log_directory: Path_ = "runs"
    """Directory of the runs, relative to where the command is started, whatever `directory` is:
    `<log_directory>/<timestamp>/` holds the logs (`output.log.<rank>`), the figures, the checkpoints."""
    peak_tflops: Positive | None = None
    """Peak of a GPU (of a host, for ranks on its CPU) in TFLOP/s, of which `mfu` is the share that the model's products
    use; if not given, that of known cards, and for others there is no `mfu`."""
    print_frequency: Count = 10
    """Updates between two lines of the log."""
    verbose_frequency: Natural = 0
    """Updates between two lines of detailed statistics; 0: none."""
    checkpoint_interval: Natural = 0
    """Updates between two checkpoints; 0: only one, at the end."""
    checkpoint_minutes: Positive | None = None
    """Minutes between two checkpoints, in addition to `checkpoint_interval`. In an asynchronous schedule saving drains
    the pipeline, at updates that then depend on the clock: the run cannot be repeated to the bit."""
    keep_checkpoints: Count = 3
    """How many of the newest checkpoints stay; the best by evaluation loss stays too."""
    on_save_error: Literal["warn", "stop"] = "warn"
    """Reaction to a checkpoint that cannot be saved, except the last one: a warning, or the end of the run."""
    hang_limit: Seconds = 60.0
    """Seconds that a rank may wait for another before every rank logs its current action, and a sentence says which
    rank the others wait for. The run goes on; `timeout` ends it."""
    prometheus_port: Annotated[int, Field(strict=True, ge=0, le=65535)] = 0
    """Port of the loopback interface where rank 0 serves metrics to Prometheus; 0: none."""

    wandb: Annotated[str, Field(min_length=1)] | None = None
    """Project of Weights & Biases that rank 0 sends the metrics to, if the package `wandb` is installed."""
    mlflow: Annotated[str, Field(min_length=1)] | None = None
    """Experiment of MLflow that rank 0 sends the metrics to, if the package `mlflow` is installed; the variable
    `MLFLOW_TRACKING_URI` says where it is kept."""

    _source: Path = PrivateAttr(default=Path("config"))
    _planned: tuple[Path, str] | None = PrivateAttr(default=None)
    _idle: int = PrivateAttr(default=0)
    _notes: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        try:
            read_staleness(self.staleness or ())
        except VPipeError as error:
            raise mistake(str(error)) from None
        for key, problem in contradictions(self):
            raise mistake(f"{key} is {short_repr(getattr(self, key))}: {problem}")
        return self

    @property
    def source(self) -> Path:
        """The file that it was read from."""
        return self._source

    @property
    def planned(self) -> tuple[Path, str] | None:
        """The plan that the partition was read from, and the fingerprint of the model that it is for."""
        return self._planned

    @property
    def idle(self) -> int:
        """The ranks, behind those of the run, that its plan was made for and leaves idle."""
        return self._idle

    @property
    def notes(self) -> list[str]:
        """What follows from other keys and files without being written, in words for the user."""
        return self._notes

    @property
    def code(self) -> dict[str, str]:
        """The keys that name a function of the user's, and what they name."""
        return {key: getattr(self, key) for key in CODE_KEYS if names_code(getattr(self, key))}

    def path(self, written: str) -> Path:
        """A path that is written in the file, relative to the current directory."""
        return self._source.parent / written

    def file(self, key: str) -> Path:
        """The path that a key names: where it is found, or else where it should be."""
        written = getattr(self, key)
        places = [self.path(written)]
        if key == "directory":
            places.append(Path(written))
        elif key in ("partition", "config_file") and self.directory is not None:
            places.append(self.file("directory") / written)
        return next(filter(exists, places), places[0])

    @property
    def chosen_schedule(self) -> str:
        """The schedule's name, or the path of its table as written."""
        if self.schedule is not None:
            return self.schedule
        return guides_schedule(asynchronous=self.sync_mode == "asp", macrobatch=bool(self.macrobatch))

    @property
    def has_stale_weights(self) -> bool:
        """Whether the schedule is asynchronous, or may be; of a table its name does not say it."""
        name = self.chosen_schedule
        if name == AUTO:
            return True
        return not (
            read_table(read_text(self.path(name)), name) if name.endswith(".csv") else kind_of(name)
        ).synchronous

    @property
    def chosen_optimizer(self) -> str:
        """The configured one or, with the remedies, what bears stale weights best (docs/convergence.md)."""
        return self.optimizer or (self.stale_defaults[0] if self.has_stale_weights else "adamw")

    @property
    def remedies(self) -> Staleness:
        """For stale weights: the configured ones or, where the optimizer is not given either, prediction."""
        if self.staleness is None and self.optimizer is None and not self.has_stale_weights:
            return Staleness()
        return self.stale_defaults[1]

    def under(self, *, synchronous: bool) -> RunConfig:
        """The same keys with the optimizer and the remedies named that the run has under a schedule of this kind."""
        if synchronous:
            return self.model_copy(update={"optimizer": self.optimizer or "adamw", "staleness": []})
        optimizer, remedies = self.stale_defaults
        named = self.staleness if self.staleness is not None else ["predict"] * remedies.predict
        return self.model_copy(update={"optimizer": optimizer, "staleness": named})

    @property
    def stale_defaults(self) -> tuple[str, Staleness]:
        """Optimizer and remedies of this run under an asynchronous schedule."""
        remedies = self.staleness if self.staleness is not None else () if self.optimizer else ("predict",)
        return self.optimizer or "muon", read_staleness(remedies)

    @property
    def positions(self) -> int:
        """Stages of the pipeline; an interleaved schedule has several times as many."""
        if self.stages is not None:
            return self.stages
        if self.replicas is not None:
            return len(self.replicas)
        if self.machines is not None:
            return len(self.machines)
        if self.vgpus is not None:
            return self.vgpus
        if self.chosen_schedule.endswith(".csv"):
            return read_table(read_text(self.path(self.chosen_schedule))).num_ranks
        return len(self.partition) if isinstance(self.partition, list) else 1

    @property
    def ranks(self) -> int:
        return sum(self.replicas) if self.replicas is not None else self.positions

    @property
    def ratio(self) -> float | Sequence[float]:
        """The share of recomputed blocks, for all stages or for each."""
        return float(self.recompute or False) if self.recompute_ratio is None else self.recompute_ratio

    @property
    def vgpus(self) -> int | None:
        """The number of ranks that `module` says."""
        return None if self.module is None else int(self.module.removeprefix("vgpus="))

    @property
    def ranks_of_layout(self) -> int | None:
        """The number of ranks that `replicas` and `stages` make; None: they do not say."""
        return self.stages if self.replicas is None else sum(self.replicas)
