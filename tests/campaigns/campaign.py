"""Long random tests, one command each: seeded, bounded in time, resumable, one line per finding.

    .venv/bin/python tests/campaigns/campaign.py layout_parity --minutes 15              cases 0, 1, 2, ... of seed 0 until the time is over
    .venv/bin/python tests/campaigns/campaign.py layout_parity --minutes 15              ... goes on after the last one
    .venv/bin/python tests/campaigns/campaign.py layout_parity --only 17                 one case again, with what it runs

A campaign is a module of this folder with `NAME`, `ABOUT` and `case(random, folder) -> Case`. A case is a pure function of the campaign, the seed
and its number. What was run is kept in build/campaigns/NAME-SEED.jsonl. docs/reliability.md has the counts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "campaigns")]

CAMPAIGNS = ("layout_parity", "resumes", "interruptions", "damage", "hostile_configs")
JOURNALS = ROOT / "build" / "campaigns"


@dataclass(frozen=True)
class Case:
    """`text`: what is tried, in one line. `run`: tries it; None, what was found, or `REFUSED` and why where the program says no in one line."""

    text: str
    run: Callable[[], str | None]


REFUSED = "refused: "


def run_case(name: str, seed: int, number: int) -> dict:
    """One case, in a folder of its own that is removed; a record for the journal."""
    module = importlib.import_module(name)
    folder, started = Path(tempfile.mkdtemp(prefix=f"campaign-{name}-")), time.monotonic()
    try:
        case = module.case(random.Random(f"{name}/{seed}/{number}"), folder)
        try:
            found = case.run()
        except Exception:
            lines = traceback.format_exc().strip().splitlines()
            found = f"a defect of the test or of the program: {lines[-1][-800:]} | {' | '.join(lines[-7:-1])[-500:]}"
        return {"number": number, "text": case.text, "found": found, "seconds": round(time.monotonic() - started, 1)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_campaign(name: str, seed: int, minutes: float, cases: int | None = None, journal: Path | None = None) -> list[dict]:
    """Records of the cases that this call ran: from the first that the journal does not have, until the time or the number is reached."""
    done = [json.loads(line) for line in journal.read_text().splitlines()] if journal and journal.exists() else []
    number, end, records = len(done), time.monotonic() + 60 * minutes, []
    while time.monotonic() < end and (cases is None or len(records) < cases):
        record = run_case(name, seed, number)
        records.append(record)
        if journal:
            with journal.open("a") as file:
                file.write(json.dumps(record) + "\n")
        if is_finding(record):
            print(f"{name} {number}: {record['found']} [{record['text']}] again: --seed {seed} --only {number}", flush=True)
        number += 1
    return records


def is_finding(record: dict) -> bool:
    return record["found"] is not None and not is_refused(record)


def is_refused(record: dict) -> bool:
    return (record["found"] or "").startswith(REFUSED)


def close() -> None:
    """Remove and end what campaigns keep between cases."""
    for name in (*CAMPAIGNS, "ranks"):
        getattr(sys.modules.get(name), "close", lambda: None)()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", choices=CAMPAIGNS)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run this case alone and say what it is")
    arguments = parser.parse_args()
    try:
        if arguments.only is not None:
            record = run_case(arguments.campaign, arguments.seed, arguments.only)
            print(json.dumps(record, indent=1))
            return int(is_finding(record))
        JOURNALS.mkdir(parents=True, exist_ok=True)
        journal = JOURNALS / f"{arguments.campaign}-{arguments.seed}.jsonl"
        run_campaign(arguments.campaign, arguments.seed, arguments.minutes, journal=journal)
        every = [json.loads(line) for line in journal.read_text().splitlines()]
        findings, refused = sum(map(is_finding, every)), sum(map(is_refused, every))
        minutes = sum(record["seconds"] for record in every) / 60
        print(
            f"{arguments.campaign}: {len(every)} cases in {minutes:.0f} min, {refused} refused in one line, {findings} findings"
        )
        return int(findings > 0)
    finally:
        close()


if __name__ == "__main__":
    raise SystemExit(main())
