"""Each campaign for a minute, and what a campaign promises: the same cases again, one line per finding, going on after the last one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import campaign


@pytest.mark.slow
@pytest.mark.parametrize("name", campaign.CAMPAIGNS)
def test_a_campaign_finds_nothing_in_a_minute(name):
    try:
        records = campaign.run_campaign(name, seed=10, minutes=1.0)
    finally:
        campaign.close()
    assert records and not [record for record in records if campaign.is_finding(record)]


class FindsEveryThird:
    @staticmethod
    def case(random, folder):
        number = random.randrange(10**6)
        return campaign.Case(f"case {number}", lambda: (_ for _ in ()).throw(ValueError("wrong")) if number % 3 == 0 else None)


def test_a_campaign_goes_on_where_it_was_and_has_the_same_cases_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "finds", FindsEveryThird)
    journal = tmp_path / "finds-0.jsonl"
    first = campaign.run_campaign("finds", 0, minutes=1, cases=5, journal=journal)
    second = campaign.run_campaign("finds", 0, minutes=1, cases=5, journal=journal)
    assert [record["number"] for record in first + second] == list(range(10))
    assert [json.loads(line)["text"] for line in journal.read_text().splitlines()] == [r["text"] for r in first + second]
    assert campaign.run_case("finds", 0, 7)["text"] == second[2]["text"]
    found = [record for record in first + second if campaign.is_finding(record)]
    assert found and all("ValueError: wrong" in record["found"] for record in found)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found) and all("again: --seed 0 --only" in line for line in lines)
