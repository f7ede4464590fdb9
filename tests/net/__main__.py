"""`cd tests && python -m net states|store`: record what the code does now."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import unicodedata
from pathlib import Path

from net.runs import (
    KEPT_RUN,
    RECORDED_STATES,
    RUNS,
    continue_kept,
    kept_copy,
    newest_checkpoint,
    processor,
    state_name,
    train,
)
from net.stores import RECORDED_STORE, hashes, prepare_rich


def main() -> int:
    """Record the states of runs for this kind of processor, or the bytes of a store, the same on every one."""
    parser = argparse.ArgumentParser(prog="net", description=__doc__)
    parser.add_argument("what", choices=("states", "store"))
    parser.add_argument("runs", nargs="*", help="only these of the runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-net-") as folder:
        if options.what == "store":
            return _record_store(Path(folder))
        return _record_states(options.runs, Path(folder))


def _record_states(names: list[str], folder: Path) -> int:
    records = json.loads(RECORDED_STATES.read_text()) if RECORDED_STATES.exists() else {}
    record = records.setdefault(processor(), {})
    failed = False
    for name in names or (*RUNS, KEPT_RUN):
        began = time.monotonic()
        if name == KEPT_RUN:
            place = kept_copy(folder / name)
            continue_kept(place, 1, "auto")
            checkpoint = newest_checkpoint(place / "trained" / "earlier")
        else:
            checkpoint = train(folder, name)
        found, promised = state_name(checkpoint), name if name == KEPT_RUN else RUNS[name].same_as or name
        print(f"{name}: {found} ({time.monotonic() - began:.1f} s)", flush=True)
        if promised == name:
            record[name] = found
        elif record.get(promised) != found:
            failed = True
            print(f"{name}: not the state of {promised}, {record.get(promised)}")
    RECORDED_STATES.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
    return int(failed)


def _record_store(folder: Path) -> int:
    store = {"unicode": unicodedata.unidata_version, "files": hashes(prepare_rich(folder / "store"))}
    RECORDED_STORE.write_text(json.dumps(store, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
