"""Notebooks without Jupyter: their cells are run here, and what they print and show is stored in the file.

python -m tests.notebook examples/threads.ipynb
"""

import ast
import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def read_cells(path: Path, kind: str) -> list[str]:
    """The source of each cell of a kind: code or markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def run_cell(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        value = (
            eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last is not None else None
        )
    return printed.getvalue(), value


def outputs(printed: str, value: Any, number: int) -> list[dict[str, Any]]:
    """As the format of notebooks (nbformat 4) stores them."""
    found: list[dict[str, Any]] = []
    if printed:
        found.append({"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": [repr(value) if len(repr(value)) < 200 else f"<{type(value).__name__}>"]}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        found.append(
            {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}
        )
    return found


def execute(path: Path) -> None:
    """Run all code cells in an empty folder and store their outputs."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for number, cell in enumerate(code, 1):
                printed, value = run_cell("".join(cell["source"]), names)
                cell |= {"execution_count": number, "outputs": outputs(printed, value, number)}
        finally:
            os.chdir(before)
    path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        execute(Path(argument))
