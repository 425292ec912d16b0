"""YAML as people mean it: YAML 1.2 scalars, duplicate keys refused, and the line of every key remembered.

PyYAML alone reads `1e-5` as text, `010` as 8, `1_000` as 1000, `no` as False, and lets the last of two equal keys win.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2's core schema."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+0123456789.")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


class YamlFault(ValueError):
    """`line` counts from 1; `message` has no file name."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line, self.message = line, message


def parse(text: str) -> tuple[Any, dict[str, int], list[YamlFault]]:
    """The data, the line of every dotted key, and the faults that leave the data usable (duplicate keys).

    Raises YamlFault where there is no data to speak of.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = error.problem or "not valid YAML"
        if "\\t" in problem:
            problem = "a tab is used for indenting; YAML wants spaces"
        raise YamlFault(line, problem) from error
    if node is None:
        return None, {}, []
    lines: dict[str, int] = {}
    faults: list[YamlFault] = []
    _walk(node, "", lines, faults)
    loader = _Loader("")
    try:
        return loader.construct_document(node), lines, faults
    except yaml.MarkedYAMLError as error:
        raise YamlFault(
            error.problem_mark.line + 1 if error.problem_mark else 1, error.problem or "not valid"
        ) from error
    finally:
        loader.dispose()


def _walk(node: yaml.Node, path: str, lines: dict[str, int], faults: list[YamlFault]) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: dict[Hashable, int] = {}
        for key, value in node.value:
            name = f"{path}.{key.value}".lstrip(".")
            line = key.start_mark.line + 1
            if key.value in seen:
                faults.append(YamlFault(line, f"{name}: given twice, first in line {seen[key.value]}"))
            seen.setdefault(key.value, line)
            lines[name] = line
            _walk(value, name, lines, faults)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, f"{path}.{index}", lines, faults)
