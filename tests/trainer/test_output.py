from __future__ import annotations

import os
from pathlib import Path

import pytest

from overspill.trainer.config import ConfigError
from overspill.trainer.output import MARKER, check_output, made_only_if_used, unfinished


def finished_run(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / MARKER).write_text(text)
    return folder


@pytest.mark.parametrize(
    "path, message",
    [("file", "is a file"), ("file/out", "file is a file"), ("full", "is not empty and no overspill run")],
)
def test_places_that_cannot_be_used_are_refused_early(path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match=message) as error:
        check_output(tmp_path / path)
    assert len(error.value.faults) == 1


def test_a_mount_point_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path)
    with pytest.raises(ConfigError, match="is a mount point"):
        check_output(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="is not writable"):
        check_output(tmp_path / "out")


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "out").symlink_to("large_disk")
    output = check_output(tmp_path / "out")
    with unfinished(output) as work:
        (work.folder / "model").touch()
        work.publish()
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "out" / "model").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large_disk", "out"]


@pytest.mark.parametrize("before", ["nothing", "empty", "finished"])
def test_what_may_be_replaced_is_replaced(before: str, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "out"
    if before != "nothing":
        output.parent.mkdir()
    if before == "empty":
        output.mkdir()
    if before == "finished":
        finished_run(output, "old")
    with unfinished(check_output(output)) as work:
        assert before != "finished" or (output / MARKER).read_text() == "old"
        (work.folder / MARKER).write_text("new")
        assert work.publish() == output
    assert (output / MARKER).read_text() == "new"
    assert list(output.parent.iterdir()) == [output]


def test_what_came_meanwhile_is_not_deleted(tmp_path: Path) -> None:
    output = check_output(tmp_path / "out")
    with unfinished(output) as work:
        (work.folder / MARKER).write_text("new")
        output.mkdir()
        (output / "thesis.txt").write_text("mine")
        assert work.publish() == tmp_path / "out-2"
    assert (output / "thesis.txt").read_text() == "mine"
    assert (tmp_path / "out-2" / MARKER).read_text() == "new"


def _fail_half_way(output: Path) -> None:
    with unfinished(check_output(output)) as work:
        (work.folder / "half").touch()
        raise RuntimeError("on purpose")


def test_a_failed_run_leaves_nothing_and_harms_nothing(tmp_path: Path) -> None:
    old = finished_run(tmp_path / "old", "old")
    for output in (tmp_path / "a" / "b" / "out", old):
        with pytest.raises(RuntimeError, match="on purpose"):
            _fail_half_way(output)
    assert list(tmp_path.rglob("*")) == [old, old / MARKER]


def test_folders_made_for_nothing_are_removed(tmp_path: Path) -> None:
    with made_only_if_used(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not list(tmp_path.iterdir())
    with made_only_if_used(tmp_path / "a" / "b"):
        (tmp_path / "a" / "other").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "other"]
    with made_only_if_used(tmp_path / "c") as used:
        used()
    assert (tmp_path / "c").is_dir()
