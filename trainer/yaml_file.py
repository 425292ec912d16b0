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

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a tag that its text does not bear, like `!!int many`
            raise yaml.constructor.ConstructorError(None, None, f"not a value: {error}", node.start_mark) from error


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+0123456789.")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as something else."""


for _first, _resolvers in _Loader.yaml_implicit_resolvers.items():
    for _tag, _regexp in _resolvers:
        _Dumper.add_implicit_resolver(_tag, _regexp, [_first])


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
        return _parse(text)
    except RecursionError as error:
        raise YamlFault(1, "nested too deeply, or an alias that contains itself") from error


def dump(data: Any) -> str:
    """Text that `parse` reads back as `data`."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)


def _parse(text: str) -> tuple[Any, dict[str, int], list[YamlFault]]:
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlFault(line, f"the character U+{ord(text[error.position]):04X} is not allowed in YAML") from error
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
            if not isinstance(key, yaml.ScalarNode):
                raise YamlFault(key.start_mark.line + 1, "a key is plain text, not a list or a section")
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
