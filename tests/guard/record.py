"""``python -m tests.guard.record``: compare this tree with the records, or record it.

Without options, the command records all entries again. Use this only at the reference commit. ``--show`` prints the
differences between this tree and the records, and writes nothing. ``--later NAME ... --why TEXT`` records single
entries that are intended to differ, and adds them with the reason to ``records/later.json``. A name has the form that
``--show`` prints, for example ``signatures:natten_jax.na2d``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.guard import exported, lowered, results, signatures

RECORDS = Path(__file__).parent / "records"
LATER = RECORDS / "later.json"
#: For each kind of record, the function that returns the records of this tree.
KINDS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "signatures": signatures.take,
    "lowered": lowered.take,
    "exported": exported.take,
    "results": results.take,
}


def load(kind: str) -> dict[str, Any]:
    """Load the records of a kind. Return a dictionary by entry name."""
    if kind in ("signatures", "lowered"):
        records: dict[str, Any] = json.loads((RECORDS / f"{kind}.json").read_text(encoding="utf-8"))
        return records
    with np.load(RECORDS / f"{kind}.npz") as arrays:
        return dict(arrays)


def save(kind: str, records: Mapping[str, Any]) -> None:
    """Write the records of a kind."""
    RECORDS.mkdir(exist_ok=True)
    if kind in ("signatures", "lowered"):
        text = json.dumps(records, indent=1, sort_keys=True)
        (RECORDS / f"{kind}.json").write_text(f"{text}\n", encoding="utf-8")
    else:
        np.savez_compressed(RECORDS / f"{kind}.npz", **records)


def differences(kind: str, found: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return a description of each difference between the records and this tree, by entry name."""
    recorded = load(kind)
    if kind == "exported":
        texts = {name: "\n".join(exported.disagreements(name, each)) for name, each in recorded.items()}
        return {name: text for name, text in texts.items() if text}
    found = KINDS[kind]() if found is None else found
    if kind == "signatures":  # without flax, this tree has no entries of flax_modules
        modules = {name.split(".")[0] for name in found}
        recorded = {name: text for name, text in recorded.items() if name.split(".")[0] in modules}
    different = dict.fromkeys(found.keys() - recorded.keys(), "is new")
    different |= dict.fromkeys(recorded.keys() - found.keys(), "is gone")
    for name in sorted(recorded.keys() & found.keys()):
        if text := _difference(kind, name, recorded[name], found[name]):
            different[name] = text
    return different


def _difference(kind: str, name: str, recorded: Any, found: Any) -> str | None:
    if kind == "results":
        return results.difference(recorded, found, results.problem(int(name.split("/")[0])).dtype)
    if recorded == found:
        return None
    old, new = ([each] if isinstance(each, str) else each for each in (recorded, found))
    lines = [f"- {line}" for line in old if line not in new] + [f"+ {line}" for line in new if line not in old]
    return "\n".join(["differs", *lines])


def record_later(names: Sequence[str], why: str) -> None:
    """Record single entries again, and add the reason to ``records/later.json``.

    Raises:
        ValueError: A name matches no entry.
    """
    reasons = json.loads(LATER.read_text(encoding="utf-8"))
    for kind in sorted({name.partition(":")[0] for name in names}):
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of record: names begin with {', '.join(KINDS)} and a colon")
        recorded, found = load(kind), KINDS[kind]()
        for name in names:
            entry = name.partition(":")[2]
            if not name.startswith(f"{kind}:"):
                continue
            if entry not in recorded and entry not in found:
                raise ValueError(f"{name} is no entry")
            recorded.pop(entry, None)
            recorded |= {entry: found[entry]} if entry in found else {}
            reasons[name] = why
        save(kind, recorded)
    LATER.write_text(f"{json.dumps(reasons, indent=1, sort_keys=True)}\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.guard.record", description=__doc__)
    parser.add_argument("--show", action="store_true", help="print the differences, and record nothing")
    parser.add_argument("--later", nargs="+", metavar="NAME", help="record these entries again")
    parser.add_argument("--why", help="the reason for --later")
    given = parser.parse_args(argv)
    if (given.later is None) != (given.why is None):
        parser.error("--later and --why belong together")
    if given.show:
        for kind in KINDS:
            for name, text in differences(kind).items():
                print(f"{kind}:{name}: {text}")
    elif given.later is not None:
        record_later(given.later, given.why)
    else:
        for kind in KINDS:
            save(kind, KINDS[kind]())
        LATER.write_text("{}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
