"""Where a run leaves its model: checked before the work, filled beside its place, put there in one rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .config import ConfigError

MARKER = "overspill-run.json"
"""Written last into a finished run's folder; a folder without it is not ours to replace."""


def _is_free(output: Path) -> bool:
    """Nothing is there, or nothing but what may be replaced: an empty folder or a finished run."""
    return not output.exists() or (output.is_dir() and ((output / MARKER).is_file() or not any(output.iterdir())))


def check_output(path: Path) -> Path:
    """The folder that `path` means, links followed. Raises ConfigError for one that could not be put in place after
    the run: hours later is too late to hear of it.
    """
    output = path.resolve()
    if output.exists() and not output.is_dir():
        raise ConfigError([f"train.output_dir: {output} is a file"])
    if not _is_free(output):
        raise ConfigError([f"train.output_dir: {output} is not empty and no overspill run; choose another folder"])
    if os.path.ismount(output):
        raise ConfigError([f"train.output_dir: {output} is a mount point; name a folder inside it"])
    above = next(folder for folder in output.parents if folder.exists())
    if not above.is_dir():
        raise ConfigError([f"train.output_dir: {output} cannot be made: {above} is a file"])
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError([f"train.output_dir: {output} cannot be made: {above} is not writable for this user"])
    return output


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """`folder` is filled by the run; `publish` makes it the output."""

    folder: Path
    output: Path

    def publish(self) -> Path:
        """Put the folder in its place and return that. An older run there is gone only once this one is in place. If
        something of somebody else's has come there meanwhile, the model goes beside it.
        """
        target = self.output
        count = 1
        while not _is_free(target):
            count += 1
            target = self.output.with_name(f"{self.output.name}-{count}")
        if not target.exists():
            self.folder.rename(target)
            return target
        replaced = self.folder.with_name(f"{self.folder.name}.replaced")
        target.rename(replaced)
        self.folder.rename(target)
        shutil.rmtree(replaced)
        return target


@contextmanager
def unfinished(output: Path) -> Iterator[Unfinished]:
    """A hidden folder beside `output`, gone at the end unless it was published; so are parents made for it."""
    with made_only_if_used(output.parent) as used:
        work = Unfinished(folder=output.with_name(f".{output.name}.unfinished-{os.getpid()}"), output=output)
        work.folder.mkdir()
        try:
            yield work
            used()
        finally:
            shutil.rmtree(work.folder, ignore_errors=True)


@contextmanager
def made_only_if_used(path: Path | None) -> Iterator[Callable[[], None]]:
    """Make a folder and its parents; unless the body calls what it is given, remove at the end those that were made
    here and are still empty. A path where no folder can be made is left to whoever needs it to say so.
    """
    made: list[Path] = []
    used = False

    def keep() -> None:
        nonlocal used
        used = True

    if path is not None:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            for folder in reversed(missing):
                folder.mkdir()
                made.append(folder)
        except OSError:
            pass  # budget.py tries again and names key and reason
    try:
        yield keep
    finally:
        if not used:
            for folder in reversed(made):
                try:
                    folder.rmdir()
                except OSError:
                    break  # somebody has put something there
