"""YAML as plain data: the text of a configuration makes values, and can do nothing else."""

from __future__ import annotations

from typing import Any

import yaml

DEEPEST = 20


class _PlainLoader(yaml.SafeLoader):
    """Values and nothing else: no objects, no aliases, with which a few lines can stand for gigabytes, and no brackets
    nested deeper than anybody would: the scanner's time grows with the square of their number.
    """

    def fetch_flow_collection_start(self, kind: Any) -> None:
        if self.flow_level >= DEEPEST:
            raise yaml.MarkedYAMLError(problem="brackets are nested too deep", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(kind)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not read", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The plain value that the text writes down; raises YAMLError with one line, whatever is wrong with it."""
    try:
        return yaml.load(text, _PlainLoader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise yaml.YAMLError(line + " ".join((error.problem or "it is not YAML").split())[:200]) from None
    except Exception as error:  # `!!bool x` is a KeyError there, `!!timestamp x` an AttributeError, ...
        reason = " ".join(str(error).split())[:200]
        raise yaml.YAMLError(f"cannot be read as YAML: {type(error).__name__}: {reason}") from None
