"""Logs that were damaged or made up get one line, and cannot write on the terminal."""

import json
import warnings

import pytest
from tiny_runs import tiny, trained

from eshampoo.lab.cli import main
from eshampoo.lab.run.runlog import FILE_NAME, read_records

VALUES = {
    "null": None,
    "text": "x",
    "a control character": "\x1b[31mred\x1b[0m",
    "a list": [1, "x"],
    "nothing in a list": [],
    "a table": {"x": [None]},
    "a negative number": -3,
    "zero": 0,
    "a fraction": 0.5,
    "a huge number": 10**400,
    "infinity": float("inf"),
    "not a number": float("nan"),
    "true": True,
}
MISSING = object()


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """The log of a short run with every kind of record."""
    out = tmp_path_factory.mktemp("run")
    trained(tiny("eshampoo", steps=4, frequency=1), out)
    found = read_records(out / FILE_NAME)
    assert {record["kind"] for record in found} == {*KINDS}
    return found


KINDS = ("run", "factors", "step", "basis", "evaluation", "end")


def changed(thing, path, value):
    """A copy of JSON data with another value, or none, at a path of keys."""
    if not path:
        return value
    key, *rest = path
    copy = list(thing) if isinstance(thing, list) else dict(thing)
    if value is MISSING and not rest:
        del copy[key]
    else:
        copy[key] = changed(thing[key], rest, value)
    return copy


def places(thing, depth=3):
    """Every path to something inside JSON data; of a list the first item."""
    inside = thing.items() if isinstance(thing, dict) else enumerate(thing[:1])
    for key, value in inside:
        yield (key,)
        if isinstance(value, dict | list) and depth > 1:
            yield from ((key, *rest) for rest in places(value, depth - 1))


def reported(records, directory, capsys):
    """The exit code of the report on some records; a refusal is one line that names the file."""
    path = directory / FILE_NAME
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code = main(["report", str(directory)])
    output = capsys.readouterr()
    assert "\x1b[31m" not in output.out + output.err
    if code:
        assert code == 2
        assert output.err.startswith("eshampoo: ")
        assert output.err.count("\n") == 1
    return code


def damages(records, kind):
    """Every way to spoil one field of the last record of a kind, and what is then in its place."""
    index = max(i for i, record in enumerate(records) if record["kind"] == kind)
    for place in places(records[index]):
        for name, value in {"missing": MISSING, **VALUES}.items():
            yield (
                f"{'.'.join(map(str, place))} is {name}",
                [*records[:index], changed(records[index], place, value), *records[index + 1 :]],
            )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_log_with_any_field_spoilt_is_reported_or_refused_in_one_line(
    kind, records, tmp_path, capsys
):
    refused = 0
    for name, spoilt in damages(records, kind):
        try:
            refused += reported(spoilt, tmp_path, capsys) == 2
        except Exception as error:
            raise AssertionError(f"{kind}: {name}") from error
    assert refused > 20


def test_a_log_with_a_field_missing_or_of_another_kind_is_refused(records, tmp_path, capsys):
    assert reported(records, tmp_path, capsys) == 0
    for index, key, value in [
        (0, "environment", MISSING),
        (0, "trivial", "x"),
        (-1, "seconds", MISSING),
        (-1, "final_loss", [1]),
    ]:
        spoilt = list(records)
        spoilt[index] = changed(records[index], [key], value)
        assert reported(spoilt, tmp_path, capsys) == 2


@pytest.mark.parametrize("name", ["[/]", "[red]soap[/red]", "[link=x]", "a :smile: b", "\\[x"])
def test_markup_in_a_name_is_shown_as_it_is(name, records, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    spoilt = changed(records, [0, "run", "optimizer"], name)
    assert reported(spoilt, tmp_path, capsys) == 0
    main(["report", str(tmp_path)])
    assert name in capsys.readouterr().out


@pytest.mark.parametrize("field", ["optimizer", "workload", "scale"])
def test_escapes_do_not_reach_the_terminal(field, records, tmp_path, capsys):
    spoilt = changed(records, [0, "run", field], "\x1b[31mred\x07")
    assert reported(spoilt, tmp_path, capsys) == 2


def test_half_a_character_does_not_stop_the_page(records, tmp_path, capsys):
    for place in ([0, "setting", "model"], [0, "command"]):
        assert reported(changed(records, place, "\ud800"), tmp_path, capsys) == 0
        assert "<title>" in (tmp_path / "report.html").read_text()


HOSTILE_LINES = {
    "deep": "[" * 100_000,
    "deep in a record": '{"kind":' * 100_000,
    "many digits": '{"kind": "step", "step": ' + "9" * 5000 + "}",
    "half a character": '{"kind": "step", "step": "\\ud800"}',
    "a list as kind": '{"kind": []}',
    "bytes": "\x00\x1b[31m",
}


@pytest.mark.parametrize("line", HOSTILE_LINES.values(), ids=HOSTILE_LINES)
def test_a_line_that_is_no_record_is_refused(line, records, tmp_path, capsys):
    (tmp_path / FILE_NAME).write_text(f"{json.dumps(records[0])}\n{line}\n")
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error[:-1].isprintable()
    assert str(tmp_path / FILE_NAME) in error
