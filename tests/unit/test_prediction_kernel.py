"""The launch of the kernel for predicted versions, with a stand-in for the program, which runs on GPUs only."""

from typing import Any

import torch

from vpipe.weights.prediction_kernel import ADAM, BLOCK, Row, launcher


class Program:
    """Notes what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, list[list[int]], list[list[int]]]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(pointers: torch.Tensor, pieces: torch.Tensor, *_: Any, **__: Any) -> None:
            self.launches.append((grid[0], pointers.tolist(), pieces.tolist()))

        return launch


def row(size: int, dtype: torch.dtype = torch.float32) -> Row:
    return (*(torch.zeros(size, dtype=dtype) for _ in range(3)), torch.zeros(size, dtype=torch.bfloat16))


def test_each_piece_of_each_parameter_has_its_program() -> None:
    program, rows = Program(), [row(BLOCK + 1), row(16), row(2 * BLOCK)]
    kernel = launcher(program)
    for _ in range(2):
        assert kernel(rows, ADAM, torch.zeros(2), 0.0)
    count, pointers, pieces = program.launches[0]
    assert count == 5
    assert pointers == [[*(tensor.data_ptr() for tensor in each), each[0].numel()] for each in rows]
    assert pieces == [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1]]
    assert program.launches[1] == program.launches[0]


def test_what_it_cannot_read_is_refused_each_time() -> None:
    program = Program()
    kernel = launcher(program)
    whole = torch.zeros(40)
    for unfit in (
        [row(16, torch.float64)],
        [row(16), (whole[1:17], *row(16)[1:])],
        [row(16), (whole[:32:2], *row(16)[1:])],
    ):
        for _ in range(2):
            assert not kernel(unfit, ADAM, torch.zeros(2), 0.0)
    assert not program.launches
