"""`python -m studies.trials.soak`: mixed requests to a server of its own, and what it says of a server that grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_tools.request_kinds import KINDS
from studies.trials import soak
from studies.trials.soak import Outcome, requests_of


def test_every_kind_is_sent_and_some_are_left() -> None:
    asked = requests_of(400, chat=True, tokens=20, seed=1)
    kinds = {one.kind.split(",")[0] for one in asked}
    assert kinds == set(KINDS)
    left = [one for one in asked if one.left_s is not None]
    assert 15 < len(left) < 80 and all(one.kind.endswith("left") for one in left)
    assert asked == requests_of(400, chat=True, tokens=20, seed=1) != requests_of(400, chat=True, tokens=20, seed=2)
    assert {one.path for one in requests_of(50, chat=False, tokens=20, seed=1)} == {"/v1/completions"}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux' figures of a process")
def test_a_server_answers_mixed_requests(chatting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--requests", "24", "--clients", "4", "--tokens", "6", "--parallel", "2", "--threads", "1"]
    assert soak.main([str(chatting), *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["requests"] == sum(said["kinds"].values()) == 24 and said["failed"] == [] and said["growth"] == 1.0


def test_what_fails() -> None:
    def outcome(**more: object) -> Outcome:
        given: dict[str, object] = {
            "requests": 600, "sizes": [100, 103], "growth": 1.03, "threads": [4, 4], "failed": [], "kinds": {},
            "seconds": 1.0,
        }  # fmt: skip
        return Outcome(**{**given, **more})  # type: ignore[arg-type]

    assert outcome().passed
    assert not outcome(growth=1.031).passed
    assert not outcome(threads=[4, 5]).passed
    assert not outcome(failed=["text: 500"]).passed
    assert "text: 500" in soak.described(outcome(failed=["text: 500"]))


def test_wrong_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main([str(tmp_path), "--requests", "0"]) == 2
    assert "requests is 0, clients 8 and tokens 24, but each must be 1 or more" in capsys.readouterr().err
    assert soak.main([str(tmp_path / "none"), "--requests", "3"]) == 2
    assert "the server did not start" in capsys.readouterr().err
