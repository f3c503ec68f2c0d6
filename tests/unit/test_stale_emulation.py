"""`benchmarks/staleness.py`: an update whose minibatches are computed at once, against one after the other."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vpipe.schedule import build

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import staleness
from small_gpt import Sizes, guessed_places, initial_weights, sample_places
from stale_rows import Row, read_row, read_rows, write_rows

SIZES = Sizes(layers=4, width=16, heads=2, vocabulary=40, length=8, batch=12)
UPDATES = 7
TOKENS = torch.randint(40, (2000,), generator=torch.Generator().manual_seed(5))


def plain_loss(w: dict[str, Tensor], batch: Tensor, guessed: Tensor | None) -> Tensor:
    """Of one minibatch; `w` holds a matrix or vector for each layer."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    if guessed is not None:
        targets = inputs.gather(1, guessed)
        inputs = inputs.scatter(1, guessed, SIZES.vocabulary - 1)
    x = w["tokens"][0][inputs] + w["positions"][0]

    def norm(x: Tensor, name: str, layer: int) -> Tensor:
        return F.layer_norm(x, (SIZES.width,), w[name][layer], w[f"{name}_bias"][layer])

    for i in range(SIZES.layers):
        qkv = norm(x, "norm1", i) @ w["qkv"][i] + w["qkv_bias"][i]
        q, k, v = (part.unflatten(-1, (SIZES.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=guessed is None).transpose(1, 2).flatten(2)
        x = x + found @ w["out"][i] + w["out_bias"][i]
        inner = F.gelu(norm(x, "norm2", i) @ w["up"][i] + w["up_bias"][i], approximate="tanh")
        x = x + inner @ w["down"][i] + w["down_bias"][i]
    x = norm(x, "final", 0)
    if guessed is not None:
        x = torch.stack([sample[places] for sample, places in zip(x, guessed, strict=True)])
    return F.cross_entropy((x @ w["head"][0].T).flatten(0, 1), targets.flatten())


def lag_of(row: Row) -> int:
    """Updates by which the last stage's copy of a tied parameter is late in vpipe itself."""
    name = "2bw" if row.interval >= row.stages else "vpipe"
    return build(name, row.stages, None, update_interval=row.interval).lag if row.stages > 1 else 0


def plain_losses(row: Row) -> list[float]:
    """Of AdamW, with versions in a list, and minibatch after minibatch."""
    weights = {k: w.clone().requires_grad_() for k, w in initial_weights(SIZES, 0, TOKENS.device).items()}
    if row.tied == "no":
        weights["head"] = weights["tokens"].detach().clone().requires_grad_()
    optimizer = torch.optim.AdamW(
        weights.values(), betas=row.betas, eps=1e-8, weight_decay=row.decay, foreach=False
    )
    history = [({k: w.detach().clone() for k, w in weights.items()}, dict.fromkeys(weights, 0.0))]
    places, guesses = (
        made(*given, SIZES, UPDATES, TOKENS.device)
        for made, given in ((sample_places, (len(TOKENS),)), (guessed_places, ()))
    )

    def read(name: str, layer: int, delay: int, number: int) -> Tensor:
        age = min(max(0, -((number - delay) // row.interval)), len(history) - 1)
        version, step = (kept[name] for kept in history[-1 - age])
        predicted = version + age * step if row.predict == "last" else version
        return (predicted + weights[name] - weights[name].detach())[layer]

    losses = []
    for update in range(UPDATES):
        batch = TOKENS[places[update][:, None] + torch.arange(SIZES.length + 1)]
        each = SIZES.batch // row.interval
        loss = torch.zeros(())
        for number in range(row.interval):
            some = slice(each * number, each * (number + 1))
            w = {}
            for name, weight in weights.items():
                count, first = len(weight), 0 if name.startswith(("final", "head")) else row.stages - 1
                delays = [row.stages - 1 - i * row.stages // count for i in range(count)]
                w[name] = [
                    read(name, i, delay if count > 1 else first, number) for i, delay in enumerate(delays)
                ]
            if row.tied == "late":
                w["head"] = [read("tokens", 0, lag_of(row) * row.interval, number)]
            guessed = guesses[update][some].long() if row.model == "bert" else None
            loss = loss + plain_loss(w, batch[some], guessed) / row.interval
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        rate = row.rate * (1 + math.cos(math.pi * (update + 1) / UPDATES)) / 2
        optimizer.param_groups[0]["lr"] = rate
        before = {k: w.detach() * (1 - rate * row.decay) for k, w in weights.items()}
        optimizer.step()
        now = {k: w.detach().clone() for k, w in weights.items()}
        history.append((now, {k: now[k] - before[k] for k in now}))
    return losses


@pytest.mark.parametrize(
    "settings",
    [
        "stages=4",
        "stages=4 predict=last tied=no",
        "stages=4 interval=2 predict=last",
        "stages=4 interval=4 predict=last tied=no",
        "stages=2 interval=6 predict=last",
        "stages=4 interval=3 predict=last model=bert",
    ],
)
def test_an_update_is_that_of_its_minibatches_one_by_one(settings: str) -> None:
    row = read_row(f"optimizer=adamw warmup=0 rate=0.02 {settings}")
    (losses,) = staleness.train([row], SIZES, TOKENS, UPDATES)
    assert losses == pytest.approx(plain_losses(row), rel=1e-4)
    assert losses != pytest.approx(plain_losses(replace(row, stages=1, interval=1)), rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("settings", ["stages=1", "stages=4 interval=4 predict=last"])
def test_compiled_it_computes_the_same(settings: str) -> None:
    eager, compiled = (
        staleness.train([read_row(settings)], SIZES, TOKENS, UPDATES, both)[0] for both in (False, True)
    )
    assert compiled == pytest.approx(eager, rel=1e-4)


def test_calls_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(TOKENS, tmp_path / "tokens")
    sizes = [word for k, v in vars(SIZES).items() for word in (f"--{k}", str(v))]
    common = ["staleness.py", "--device", "cpu", "--updates", "2", "--tokens", f"{tmp_path}/tokens", *sizes]

    def call(*words: str) -> str:
        monkeypatch.setattr("sys.argv", [*common, *words])
        staleness.main()
        return capsys.readouterr().out

    call("--json", f"{tmp_path}/1", "stages=1", "--side-by-side", "1")
    said = call(
        "stages=1", "stages=2", "--seconds", "0", "--json", f"{tmp_path}/2", "--merge", f"{tmp_path}/1"
    )
    assert "1 rows are left out:\n  seed=0 stages=2" in said
    call("stages=1", "stages=2", "--json", f"{tmp_path}/2", "--merge", f"{tmp_path}/1")
    assert [entry["stages"] for entry in json.loads((tmp_path / "2").read_text())] == [1, 2]
    said = call("--merge", f"{tmp_path}/2", f"{tmp_path}/1")
    assert said.count("stages=") == 2
    assert "tokens in" not in said


def test_rows_of_other_sizes_are_not_merged(tmp_path: Path) -> None:
    write_rows([(Row(), [1.0, 2.0])], SIZES, tmp_path / "rows")
    assert read_rows([tmp_path / "rows"], SIZES, 2) == [(Row(), [1.0, 2.0])]
    with pytest.raises(SystemExit, match="has 2 updates"):
        read_rows([tmp_path / "rows"], SIZES, 3)
    with pytest.raises(SystemExit, match="give the same --updates and sizes"):
        read_rows([tmp_path / "rows"], replace(SIZES, width=32), 2)
