"""`vpipe train` of a user's own model: from the YAML's folder, resumed, evaluated, exported."""

import json
from pathlib import Path

from safetensors.torch import load_file

from tests.end_to_end.command import vpipe
from tests.own_model import RUN, SOURCE


def test_train_resume_and_export(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "net.py").write_text(SOURCE)
    (mine / "run.yml").write_text(RUN)
    ended = vpipe("train", "mine/run.yml", cwd=tmp_path)
    assert ended.code == 0, ended.said
    assert "Net: 4 blocks" in ended.out
    assert "Evaluation loss: " in ended.out
    assert "erplexity" not in ended.out  # the loss weighs its cross-entropies
    folder = next(path.parent for path in tmp_path.glob("runs/*/summary.json"))
    assert {"trace.json", "report.html", "metrics.jsonl"} <= {path.name for path in folder.iterdir()}
    names: dict[str, object] = {}
    exec(SOURCE, names)
    model = names["Net"]()  # type: ignore[operator]
    model.load_state_dict(load_file(folder / "model/model.safetensors"))  # strictly

    ended = vpipe("train", "mine/run.yml", "--resume", "auto", "--set", "max_updates=6", cwd=tmp_path)
    assert ended.code == 0, ended.said
    assert "after 4 updates" in ended.out
    ended = vpipe("eval", "mine/run.yml", "--json", cwd=tmp_path)
    evaluated = json.loads(ended.out)
    assert (evaluated["updates"], evaluated["perplexity"]) == (6, None)


def test_a_mistake_in_the_users_code_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SOURCE + "\ndef broken():\n    return 1 / 0\n")
    (tmp_path / "run.yml").write_text(RUN.replace("net:build_model", "net:broken"))
    ended = vpipe("train", "run.yml", cwd=tmp_path)
    assert ended.code == 2, ended.said
    assert "it raised ZeroDivisionError: division by zero (at " in ended.err
    assert "Traceback" not in ended.said
