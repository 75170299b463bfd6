"""Drafts from a user's own text: places and continuations against a slow search and a hand-worked example, the file,
and losslessness."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import put_tokenizer
from eagle_runtime import Constraint, EagleModel, RequestError
from eagle_runtime.drafting.datastore import PLACES, Datastore
from eagle_runtime.drafting.lookup import LookupDrafter
from eagle_runtime.drafting.matches import LONGEST, SHORTEST
from insides import bundle_in

NO_FEATURES = np.zeros((0, 2), np.float32)


def test_a_hand_worked_example() -> None:
    """After 1 2 come 3 4, 3 5, 3 4 and 6 in the documents; 9 1 2 matches one token more, in one place."""
    store = Datastore([[1, 2, 3, 4, 8, 1, 2, 3, 5], [9, 1, 2, 3, 4], [7, 1, 2, 6], [1, 2]])
    hits = store.continuations([0, 1, 2], nodes=10, depth=2)
    assert (hits.places, hits.length) == (5, 2)  # with the place at the end of the last document
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(hits.tokens.tolist(), hits.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert dict(zip(paths, hits.counts.tolist(), strict=True)) == {(3,): 3, (6,): 1, (3, 4): 2, (3, 5): 1}
    assert [hits.tokens[node] for node in hits.main_path()] == [3, 4]
    np.testing.assert_allclose(np.exp(hits.shares()), [3 / 5, 1 / 5, 2 / 3, 1 / 3], rtol=1e-6)
    few = store.continuations([0, 1, 2], nodes=2, depth=2)
    assert few.tokens.tolist() == [3, 4] and few.parents.tolist() == [-1, 0]
    longer = store.continuations([9, 1, 2], nodes=10, depth=5)
    assert (longer.places, longer.length) == (1, 3) and longer.tokens.tolist() == [3, 4]
    assert store.continuations([5, 5], 10, 5).length == 0 and store.continuations([2], 10, 5).length == 0
    tree = LookupDrafter(2, datastore=store, nodes=4).grow([0, 1, 2], 60)
    assert tree.tokens.tolist() == [2, 3, 6, 4] and tree.parents.tolist() == [-1, 0, 0, 1]
    np.testing.assert_allclose(np.exp(tree.scores), [1, 0.6, 0.2, 0.4], rtol=1e-6)


documents = st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=4).filter(any)


@given(texts=documents, context=st.lists(st.integers(0, 2), max_size=20))
@settings(deadline=None)
def test_places_are_those_of_a_slow_search(texts: list[list[int]], context: list[int]) -> None:
    hits = Datastore(texts).continuations(context, nodes=10**6, depth=3)
    most, following = 0, Counter[tuple[int, ...]]()
    places = [(text, end) for text in texts for end in range(len(text) + 1)]

    def matched(text: list[int], end: int) -> int:
        length = 0
        while length < min(LONGEST, end, len(context)) and text[end - 1 - length] == context[-1 - length]:
            length += 1
        return length

    most = max(matched(*place) for place in places)
    best = [text[end:] for text, end in places if matched(text, end) == most]
    for after in best:
        following.update(tuple(after[:count]) for count in range(1, min(3, len(after)) + 1))
    if most < SHORTEST or not following:
        assert len(hits.tokens) == 0
        return
    assert len(best) <= PLACES and (hits.places, hits.length) == (len(best), most)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(hits.tokens.tolist(), hits.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert dict(zip(paths, hits.counts.tolist(), strict=True)) == following


def test_the_text_itself_counts_where_it_matches_longer() -> None:
    drafter = LookupDrafter(4, datastore=Datastore([[2, 3, 9]]), nodes=5)
    assert drafter.grow([1, 2, 3, 4, 1, 2, 3], 60).tokens.tolist() == [3, 4, 1, 2, 3]
    for text, max_nodes, drafted in (([2, 3, 9], 60, [3, 9]), ([0, 0, 0], 2, [3])):
        drafter = LookupDrafter(4, datastore=Datastore([text]), nodes=5)
        assert drafter.grow([8, 2, 3], max_nodes).tokens.tolist() == drafted


@pytest.fixture(scope="module", params=["fp32", "int8"])
def text_pair(
    request: pytest.FixtureRequest, bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("datastore") / "bundle"
    shutil.copytree(bundle_of("eagle1", request.param), folder)
    put_tokenizer(folder)
    return folder


def test_the_output_is_that_of_decoding_without_drafts(
    text_pair: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    with EagleModel.load(text_pair, threads=1, context=256) as model:
        answers = [model.generate(p, max_new_tokens=40, ignore_eos=True, method="vanilla") for p in prompts[:3]]
        texts = [
            "".join(chr(token - 3) for token in [*p, *answer.token_ids] if token >= 3)
            for p, answer in zip(prompts, answers, strict=False)
        ]
    knowing, junk = tmp_path / "knowing.jsonl", tmp_path / "junk.txt"
    knowing.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    junk.write_text("\n".join(np.random.default_rng(0).permutation(list("abcdefgh {}()=,." * 40)).tolist()))
    ways: list[dict[str, Any]] = [
        {"method": "lookup"},
        {"method": "lookup", "tree": "dynamic"},
        {"method": "eagle+lookup"},
    ]
    for path in (knowing, junk):
        with EagleModel.load(text_pair, threads=1, context=256, datastore=path) as model:
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=False)):
                for temperature in (0.0, 0.7, 1.0):
                    given: dict[str, Any] = {"temperature": temperature, "seed": number, "max_new_tokens": 40}
                    vanilla = model.generate(prompt, method="vanilla", ignore_eos=True, **given)
                    for way in ways:
                        result = model.generate(prompt, ignore_eos=True, **given, **way)
                        assert result.token_ids == vanilla.token_ids
                        if path == knowing and temperature == 0 and "tree" in way:
                            assert result.token_ids == answer.token_ids and result.usage.tau > 3
            one = model.generate([5], method="lookup", tree="dynamic", max_new_tokens=3, ignore_eos=True)
            assert one.token_ids == model.generate([5], method="vanilla", max_new_tokens=3, ignore_eos=True).token_ids
            schema = {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 2, "maxItems": 4}
            held = [model.generate(prompts[0], constraint=Constraint.json_schema(schema), **way) for way in ways]
            assert len({result.token_ids for result in held}) == 1


def test_files_that_cannot_be_used(bundle_of: Callable[..., Path], text_bundle: Path, tmp_path: Path) -> None:
    files = {
        "empty.txt": ("", "holds no text"),
        "empty.jsonl": ("\n\n", "holds no text"),
        "number.jsonl": ('"fine"\n{"text": 7}\n', 'line 2 of .* cannot be used: .* an object with "text"'),
        "broken.jsonl": ("{", "line 1 of .* cannot be used"),
    }
    for name, (content, message) in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(RequestError, match=message):
            EagleModel.load(text_bundle, threads=1, datastore=tmp_path / name)
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    for name in ("latin.txt", "missing.txt"):
        with pytest.raises(RequestError, match="cannot be read as UTF-8 text"):
            EagleModel.load(text_bundle, threads=1, datastore=tmp_path / name)
    # a line separator in a string is part of the string: lines of JSON end at line feeds alone
    (tmp_path / "turns.jsonl").write_text('{"turns": ["ab", "cd"]}\n"ef\u2028\u0085"\n', encoding="utf-8")
    seen: list[tuple[str, int, int]] = []
    with EagleModel.load(
        text_bundle, threads=1, datastore=tmp_path / "turns.jsonl", on_progress=lambda *stage: seen.append(stage)
    ) as model:
        datastore = bundle_in(model).datastore
        last = model.text.encode_rendered("ef\u2028\u0085")
        assert datastore is not None and len(datastore) == 4 + len(last) + 4
    parts = [(done, total) for stage, done, total in seen if stage == "index"]
    assert parts == sorted(parts) and parts[-1][0] == parts[-1][1]
    with pytest.raises(RequestError, match="the bundle has no tokenizer"):
        EagleModel.load(bundle_of("eagle1"), threads=1, datastore=tmp_path / "turns.jsonl")
