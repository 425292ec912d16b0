from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.trainer.yaml_file import YamlFault, dump, parse


def value(text: str) -> Any:
    return parse(f"a: {text}\n")[0]["a"]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("2e-5", 2e-5), ("2E-4", 2e-4), ("1.", 1.0), (".5", 0.5), ("-3", -3), ("+3", 3), ("0", 0),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("no", "no"), ("yes", "yes"), ("on", "on"), ("off", "off"), ("y", "y"),
        ("010", "010"), ("1_000", "1_000"), ("0x1F", "0x1F"), ("0o10", "0o10"), ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"), ("'3'", "3"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, expected: object) -> None:
    read = value(text)
    assert read == expected
    assert type(read) is type(expected)


def test_every_key_has_its_line() -> None:
    _, lines, faults = parse("# head\na:\n  b: 1\n  c: [x, {d: 2}]\n")
    assert (lines["a"], lines["a.b"], lines["a.c"], lines["a.c.1.d"]) == (2, 3, 4, 4)
    assert faults == []


def test_duplicate_keys_are_faults_at_any_depth() -> None:
    _, _, faults = parse("a: {b: 1, b: 2}\nc: 1\na: 3\n")
    assert {(fault.line, fault.message) for fault in faults} == {
        (1, "a.b: given twice, first in line 1"),
        (3, "a: given twice, first in line 1"),
    }


@pytest.mark.parametrize(
    "text, line, message",
    [
        ("a: 1\n\tb: 2\n", 2, "tab"),
        ("a: 1\nb: \x00\n", 2, "U+0000 is not allowed"),
        ("a: 1\n? [x]\n: 2\n", 2, "a key is plain text"),
        ("a: 1\nb: !!int many\n", 2, "not a value"),
        ("a: !!python/object/apply:os.getcwd []\n", 1, "could not determine a constructor"),
        ("a: &a [*a]\n", 1, "an alias that contains itself"),
        ("a: " + "[" * 3000, 1, "nested too deeply"),
        ("a: 1\n---\nb: 2\n", 2, "another document"),
    ],
)
def test_text_that_is_no_yaml_is_one_fault(text: str, line: int, message: str) -> None:
    with pytest.raises(YamlFault) as error:
        parse(text)
    assert error.value.line == line
    assert message in error.value.message
    assert "\n" not in error.value.message


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.from_regex(
    r"[-+0-9._eExo:]{1,8}|yes|no|on|off|null|~", fullmatch=True
)  # fmt: skip


@given(st.dictionaries(st.text(min_size=1), _LEAVES, max_size=4))
def test_what_is_dumped_reads_back(data: dict[str, Any]) -> None:
    assert parse(dump(data))[0] == data


def test_dumped_text_is_quoted_for_older_readers_too() -> None:
    assert dump({"a": "no", "b": "1e5"}) == "a: 'no'\nb: '1e5'\n"
