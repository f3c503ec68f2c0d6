"""The table at the end of a run, of summaries written by hand."""

from typing import Any

from vpipe.observe.screen import summary_table

SUMMARY: dict[str, Any] = {
    "schedule": "1f1b",
    "loss": 1.5,
    "losses": [(1, 2.5), (8, 1.5)],
    "evaluation_loss": None,
    "perplexity": None,
    "updates": 8,
    "samples_per_s": 0.0,
    "seconds_per_update": 0.1,
    "of_limit": 0.7,
    "communication_share": 0.1,
    "bubble_share": 0.15,
    "skipped_updates": 0,
    "lost_writes": 0,
    "ranks": [],
}


def shown(**changed: Any) -> dict[str, str]:
    names, values = (list(column.cells) for column in summary_table(SUMMARY | changed).columns)
    return dict(zip(map(str, names), map(str, values), strict=True))


def test_an_evaluation_has_a_perplexity_or_not() -> None:
    assert shown()["evaluation"] == "none"
    assert shown(evaluation_loss=2.0)["evaluation"] == "loss 2.0000"
    assert shown(evaluation_loss=2.0, perplexity=7.389)["evaluation"] == "loss 2.0000, perplexity 7.39"


def test_memory_is_that_of_ranks_by_the_stages_that_they_hold() -> None:
    """The most of a stage's replicas; a rank of two stages has one memory."""

    def rank(peak: int, *stages: int) -> dict[str, Any]:
        return {"stages": stages, "peak_memory": peak * 2**20}

    replicas = shown(ranks=[rank(3, 0), rank(5, 0), rank(4, 1)])
    assert (replicas["peak memory, stage 0"], replicas["peak memory, stage 1"]) == ("5 MiB", "4 MiB")
    v = shown(ranks=[rank(3, 0, 3), rank(4, 1, 2)])
    assert (v["peak memory, stages 0, 3"], v["peak memory, stages 1, 2"]) == ("3 MiB", "4 MiB")
