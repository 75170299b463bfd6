"""Constraints: what is refused and how, what a matcher allows, and that looking ahead leaves it as it was."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from conftest import GOLDEN, put_tokenizer
from eagle_runtime import Constraint, ConstraintError, Drafter, EagleModel, RequestError, SamplingParams
from eagle_runtime.base.arguments import MOST_DEPTH
from eagle_runtime.base.tree import Tree
from eagle_runtime.drafting.constrained import pruned
from eagle_runtime.sampling.constraint import MOST_BYTES
from eagle_runtime.sampling.grammar_matcher import Lookahead, Matcher
from eagle_runtime.sampling.grammars import CACHED, Grammars
from eagle_runtime.sampling.sampler import Sampler
from eagle_runtime.text.detokenizer import TextStream, Vocabulary
from insides import bundle_in
from tokenizer_kinds import TOKENIZERS, id_of

TOKENIZER = (GOLDEN / "byte_tokenizer.json").read_text(encoding="utf-8")
VOCAB, EOS = 256, 1
PROMPT = "x = "


def grammars() -> Grammars:
    """Of a vocabulary of bytes."""
    return Grammars(lambda: TOKENIZER, VOCAB, [EOS])


def ids(text: str) -> list[int]:
    from tokenizers import Tokenizer

    return list(Tokenizer.from_str(TOKENIZER).encode(text).ids)


def texts_of(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> set[str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(TOKENIZER)
    return {"" if token == EOS else tokenizer.decode([int(token)]) for token in np.flatnonzero(mask)}


@pytest.fixture(scope="module")
def bundle(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes") / "bundle"
    shutil.copytree(bundle_of("eagle1"), folder)
    put_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[EagleModel]:
    with EagleModel.load(bundle, threads=1) as loaded:
        yield loaded


def test_one_schema_is_one_constraint() -> None:
    as_text = Constraint.json_schema('{"type":\n "string", "maxLength": 3}')
    assert as_text == Constraint.json_schema({"type": "string", "maxLength": 3})
    assert hash(as_text) == hash(Constraint.json_schema(as_text.source))
    assert Constraint.json_schema({"a": 1, "b": 2}) != Constraint.json_schema({"b": 2, "a": 1}), "the order counts"
    assert Constraint.json_object() == Constraint.json_schema({"type": "object"})


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Constraint.json_schema([1]),  # type: ignore[arg-type]
            "must be a JSON object",
        ),
        (lambda: Constraint.json_schema("nonsense"), "the schema is not JSON"),
        (lambda: Constraint.json_schema("true"), "must be a JSON object"),
        (lambda: Constraint.json_schema({"const": float("nan")}), "the schema is not JSON"),
        (lambda: Constraint.json_schema({"const": {1, 2}}), "the schema is not JSON"),
        (lambda: Constraint.json_schema(nested(MOST_DEPTH + 1)), "64 levels deep"),
        (lambda: Constraint.json_schema(nested(5000)), "64 levels deep"),
        (lambda: Constraint.json_schema('{"items":' * 5000 + "{}" + "}" * 5000), "64 levels deep"),
        (lambda: Constraint.json_schema({"const": "x" * MOST_BYTES}), "may have 65536"),
        (lambda: Constraint.json_schema({"const": "\ud800"}), "half a character"),
        (
            lambda: Constraint.regex(b"a"),  # type: ignore[arg-type]
            "must be text",
        ),
        (lambda: Constraint.regex("é" * (MOST_BYTES // 2 + 1)), "may have 65536"),
        (lambda: Constraint.choice("yes"), "must be a list of texts"),
        (lambda: Constraint.choice([]), "must be a list of texts"),
        (lambda: Constraint.choice(["a", ""]), "must be a list of texts"),
    ],
)
def test_what_no_model_could_follow_is_refused(make: Callable[[], Constraint], said: str) -> None:
    with pytest.raises(ConstraintError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (Constraint.regex("a("), r"\(regex: unclosed group\)"),
        (Constraint.regex("(?=a)b"), "look-around"),
        (Constraint.regex("[^\\s\\S]"), "no text follows it"),
        (Constraint.lark("start: nobody"), "nobody"),
        (Constraint.lark("start: start"), "no text follows it"),
        (Constraint.json_schema({"type": "banana"}), "Invalid type: banana"),
        (Constraint.json_schema({"not": {"type": "string"}}), "its keyword not has no grammar"),
        (Constraint.json_schema({"not": {}, "x-guidance": {"lenient": True}}), "its keyword not has no grammar"),
        (Constraint.json_schema({"$ref": "https://example.com/schema.json"}), "not present"),
        (Constraint.json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "Unsatisfiable"),
    ],
)
def test_what_does_not_compile_is_refused(constraint: Constraint, said: str) -> None:
    with pytest.raises(ConstraintError, match=said) as caught:
        grammars().matcher(constraint)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_matcher_follows_an_output_to_its_end() -> None:
    matcher = grammars().matcher(Constraint.regex("ab?"))
    assert texts_of(matcher.mask()) == {"a"}
    matcher.consume(ids("a")[0])
    assert texts_of(matcher.mask()) == {"b", ""}, "and the end of the text"
    assert not matcher.finished
    matcher.consume(ids("b")[0])
    assert matcher.finished
    other = grammars().matcher(Constraint.regex("ab?"), ends=frozenset(ids("a")))
    other.consume(ids("a")[0])
    assert other.finished, "a stop token ends it too"


def test_every_end_of_sequence_ends_it() -> None:
    several = Grammars(lambda: TOKENIZER, VOCAB, [EOS, 0])
    for end in (EOS, 0):
        matcher = several.matcher(Constraint.regex("a*"), ends=frozenset((EOS, 0)))
        assert set(np.flatnonzero(matcher.mask())) == {0, EOS, *ids("a")}
        matcher.consume(end)
        assert matcher.finished


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_of_every_kind_of_tokenizer_follows(kind: str) -> None:
    """Whatever may be drawn, drawn at random and decoded after a prompt. The kinds that llguidance does not know are
    refused."""
    tokenizer = TOKENIZERS[kind]()
    ends = [end for name in ("</s>", "<|end|>") if (end := tokenizer.token_to_id(name)) is not None]
    of_kind, rng = Grammars(tokenizer.to_str, tokenizer.get_vocab_size(), ends or [0]), np.random.default_rng(1)
    if not kind.startswith("byte"):
        with pytest.raises(ConstraintError, match="cannot read this model's tokenizer"):
            of_kind.matcher(Constraint.json_object())
        return
    prompt = [4]
    for pattern in (r"(the|a|b|c| |\.|'){1,6}", "[a-cé€]{1,4}", " ?a( b)*", "(the|a) ?s?"):
        for _ in range(20):
            matcher, drawn = of_kind.matcher(Constraint.regex(pattern)), list[int]()
            while not matcher.finished:
                drawn.append(int(rng.choice(np.flatnonzero(matcher.mask()))))
                matcher.consume(drawn[-1])
            stream = TextStream(Vocabulary(tokenizer, kind), prompt)
            text = stream.feed(drawn) + stream.finish()
            assert re.fullmatch(pattern, text), (pattern, text)


@pytest.mark.parametrize(
    ("space", "steps"),
    [
        (False, {"type": "NFC"}),  # Qwen's
        (False, {"type": "Sequence", "normalizers": [{"type": "Strip", "strip_left": True, "strip_right": True}]}),
        (True, None),
    ],
)
def test_text_of_a_grammar_is_not_changed_as_prompts_are(space: bool, steps: dict[str, Any] | None) -> None:
    """By a tokenizer that composes letters, or cuts spaces or puts one before a text."""
    tokenizer, option = TOKENIZERS["byte-level"](), "cafe\u0301 "  # an accent after its letter, as in names of files
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    content = json.dumps({**json.loads(tokenizer.to_str()), "normalizer": steps})
    of_kind = Grammars(lambda: content, tokenizer.get_vocab_size(), [id_of(tokenizer, "<|end|>")])
    matcher, drawn = of_kind.matcher(Constraint.choice([option])), list[int]()
    while not matcher.finished:
        drawn.append(int(np.flatnonzero(matcher.mask())[0]))
        matcher.consume(drawn[-1])
    assert tokenizer.decode(drawn) == option


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    matcher = grammars().matcher(Constraint.choice(["yes"]))
    with pytest.raises(ConstraintError, match="cannot be followed further"):
        matcher.consume(ids("n")[0])


def test_an_option_may_hold_any_letter() -> None:
    option = "".join(map(chr, range(128)))
    matcher = grammars().matcher(Constraint.choice(["yes", option]))
    for token in ids(option):
        assert matcher.mask()[token]
        matcher.consume(token)
    assert matcher.finished


def test_text_that_the_vocabulary_lacks_is_an_error() -> None:
    """The tokens of the pair are ASCII."""
    matcher = grammars().matcher(Constraint.choice(["né"]))
    matcher.consume(ids("n")[0])
    with pytest.raises(ConstraintError, match="no token of the vocabulary"):
        matcher.mask()


def test_grammars_are_compiled_once_and_the_oldest_dropped() -> None:
    asked: list[int] = []

    def tokenizer() -> str:
        asked.append(1)
        return TOKENIZER

    many = Grammars(tokenizer, VOCAB, [EOS])
    constraints = [Constraint.choice([f"k{index}"]) for index in range(CACHED + 2)]
    for constraint in constraints:
        many.matcher(constraint)
    first = many._compiled[constraints[-1]]
    many.matcher(constraints[-1]).consume(ids("k")[0])
    assert many._compiled[constraints[-1]] is first and not first.is_stopped()
    assert texts_of(many.matcher(constraints[-1]).mask()) == {"k"}, "each turn begins at the beginning"
    assert list(many._compiled) == constraints[2:]
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("content", "eos", "said"),
    [
        (None, [EOS], "no tokenizer.json"),
        (TOKENIZER, [], "end-of-sequence"),
        ('{"model": {"type": "Other"}}', [EOS], "cannot read this model's tokenizer"),
        (TOKENIZER, [VOCAB + 5], "end-of-sequence"),  # the model never writes it
    ],
)
def test_models_that_cannot_follow_constraints(content: str | None, eos: list[int], said: str) -> None:
    with pytest.raises(ConstraintError, match=said):
        Grammars(lambda: content, VOCAB, eos).matcher(Constraint.json_object())


def test_the_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConstraintError, match=r"pip install 'eagle-edge\[grammar\]'"):
        grammars().matcher(Constraint.json_object())


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows() -> None:
    """As Gemma-3's text models have it: such a token is never drawn, and forced ones are not drafted."""
    content = json.loads(TOKENIZER)
    beyond = {"id": VOCAB, "content": "<image>", "special": True, "normalized": False}
    content["added_tokens"].append({**beyond, "single_word": False, "lstrip": False, "rstrip": False})
    larger = Grammars(lambda: json.dumps(content), VOCAB, [EOS, VOCAB + 5])
    matcher = larger.matcher(Constraint.choice(["yes", "no"]))
    assert matcher.mask().shape == (VOCAB,) and texts_of(matcher.mask()) == {"y", "n"}
    for token in ids("yes"):
        assert Lookahead(matcher).allowed([], np.array([token, VOCAB - 1])).tolist() == [True, False]
        matcher.consume(token)
    assert matcher.finished or texts_of(matcher.mask()) == {""}
    assert matcher.has_row(VOCAB - 1) and not matcher.has_row(VOCAB)


def test_a_tokenizer_with_fewer_tokens_than_rows() -> None:
    matcher = Grammars(lambda: TOKENIZER, VOCAB + 64, [EOS]).matcher(Constraint.choice(["yes"]))
    assert matcher.mask().shape == (VOCAB + 64,) and np.flatnonzero(matcher.mask()).tolist() == ids("y")


def test_looking_ahead_changes_nothing() -> None:
    matcher = grammars().matcher(Constraint.lark('start: "ab" ("c" | "d")'))
    before = matcher.mask()
    ahead = Lookahead(matcher)
    assert ahead.forced(64) == ids("ab") and ahead.forced(1) == ids("a")
    assert ahead.cut(ids("abdx")) == ids("abd") and ahead.cut(ids("x")) == []
    candidates = np.array([*ids("abcdx"), EOS])
    assert ahead.allowed((), candidates).tolist() == [True, False, False, False, False, False]
    assert ahead.allowed(tuple(ids("ab")), candidates).tolist() == [False, False, True, True, False, False]
    assert not ahead.allowed(tuple(ids("abc")), candidates).any(), "the text is complete"
    assert not ahead.allowed(tuple(ids("x")), candidates).any()
    assert ahead.allowed((), candidates).tolist() == [True, False, False, False, False, False]
    assert ahead.pruned == 1 + 1 + 5 + 4 + 6 + 6 + 5, "tokens of the two chains, then candidates"
    assert (matcher.mask() == before).all()
    matcher.consume(ids("a")[0])
    ahead.begin()
    assert ahead.forced(64) == ids("b")


def test_an_end_of_sequence_is_looked_past_only_once() -> None:
    ahead = Lookahead(grammars().matcher(Constraint.regex("a*")))
    candidates = np.array([*ids("a"), EOS])
    assert ahead.allowed((), candidates).all()
    assert not ahead.allowed((EOS,), candidates).any()
    assert ahead.allowed(tuple(ids("aa")), candidates).all()


def test_trees_are_pruned_with_what_is_below() -> None:
    ahead = Lookahead(grammars().matcher(Constraint.regex("a(b|c)d")))
    root, (a, b, c, d) = 9, ids("abcd")
    tokens, parents = np.array([root, a, b, b, c, d, d]), np.array([-1, 0, 0, 1, 1, 2, 4])
    tree = pruned(Tree(tokens, parents, np.arange(7, dtype=np.float32)), ahead)
    assert tree.tokens.tolist() == [root, a, b, c, d]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 3]
    assert tree.scores.tolist() == [0, 1, 3, 4, 6]


def test_the_sampler_masks_before_penalties_and_filters() -> None:
    """The likeliest token that is allowed is drawn although the filters would keep others alone."""
    a, b = ids("ab")
    logits = np.zeros(VOCAB, np.float32)
    logits[a], logits[b] = 1, 50
    several: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.5, "top_p": 0.1},
        {"min_p": 1.0},
    )
    for settings in several:
        sampler = Sampler(
            SamplingParams(**settings), ids("x"), VOCAB, matcher=grammars().matcher(Constraint.regex("a"))
        )
        assert sampler.next(logits) == a and sampler.finished, settings
    banned = Sampler(
        SamplingParams(logit_bias={a: -np.inf}), [5], VOCAB, matcher=grammars().matcher(Constraint.regex("a"))
    )
    with pytest.raises(RequestError, match="no token is left"):
        banned.next(logits)


def test_requests(model: EagleModel) -> None:
    for wrong in ({"type": "object"}, "json", 3):
        with pytest.raises(RequestError, match="must be a Constraint"):
            model.stream(PROMPT, constraint=wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="ignore_eos"):
        model.stream(PROMPT, constraint=Constraint.json_object(), ignore_eos=True)
    with pytest.raises(RequestError, match="min_new_tokens"):
        model.stream(PROMPT, constraint=Constraint.json_object(), min_new_tokens=3)
    with pytest.raises(ConstraintError, match="banana"):  # at once, not with the first piece
        model.stream(PROMPT, constraint=Constraint.json_schema({"type": "banana"}))


def test_an_output_ends_with_its_grammar(model: EagleModel) -> None:
    for method in ("vanilla", "eagle", "lookup", "eagle+lookup"):
        result = model.generate(PROMPT, method=method, constraint=Constraint.choice(["exactly this"]))
        assert result.text == "exactly this" and result.finish_reason == "stop"
        assert result.stop.kind == "constraint_end"
        assert len(result.token_ids) == len("exactly this"), "nothing is drawn after it"
        assert result.usage.target_passes == (11 if method == "vanilla" else 1), "all but the first are forced"
        assert result.usage.forced_tokens == (0 if method == "vanilla" else 11)


def test_stop_tokens_and_limits_cut_before_the_grammar_ends(model: EagleModel) -> None:
    constraint = Constraint.regex("abc{20}d")
    for method in ("vanilla", "eagle+lookup"):
        stopped = model.generate(PROMPT, method=method, constraint=constraint, stop_token_ids=ids("b"))
        assert (stopped.text, stopped.finish_reason) == ("ab", "stop")
        cut = model.generate(PROMPT, method=method, constraint=constraint, max_new_tokens=5)
        assert (cut.text, cut.finish_reason) == ("abccc", "length")
        string = model.generate(PROMPT, method=method, constraint=constraint, stop="ccc")
        assert (string.text, string.stop.kind) == ("ab", "stop_string")
        whole = model.generate(PROMPT, method=method, constraint=constraint, max_new_tokens=23)
        assert (len(whole.token_ids), whole.stop.kind) == (23, "constraint_end"), "and not the limit, met by the same"


def test_a_constraint_that_runs_out_of_limits_is_an_error(model: EagleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never an output without the constraint: the text so far stays what it was, and the model usable."""
    monkeypatch.setattr("eagle_runtime.sampling.grammars.LIMITS", {"step_max_items": 12})
    constraint = Constraint.lark('start: "a" item*\nitem: "(" item* ")" | "[" item* "]" | "x" item')
    for method in ("vanilla", "eagle+lookup"):
        pieces = []
        with (
            pytest.raises(ConstraintError),
            model.stream(
                PROMPT, method=method, constraint=constraint, temperature=1.0, seed=1, max_new_tokens=400
            ) as stream,
        ):
            pieces += [piece.text for piece in stream]
    assert model.generate(PROMPT, max_new_tokens=4, ignore_eos=True).finish_reason == "length"


def test_an_own_drafter_may_draft_what_is_not_allowed(model: EagleModel) -> None:
    class AlwaysZ(Drafter):
        def grow(self, tokens: Any, max_nodes: int) -> Tree:
            return Tree(np.array([tokens[-1], *ids("zz")]), np.array([-1, 0, 1]), np.zeros(3, np.float32))

        def learn(self, step: Any) -> None:
            pass

    result = model.generate(PROMPT, drafter=AlwaysZ(), constraint=Constraint.regex("[0-9]z{3}"))
    assert result.text is not None and result.text[1:] == "zzz" and result.usage.target_passes < 3


def test_statistics_of_constrained_outputs_are_kept_apart(bundle: Path) -> None:
    with EagleModel.load(bundle, threads=1) as model:
        model.generate(PROMPT, method="eagle", max_new_tokens=8)
        model.generate(PROMPT, method="eagle", max_new_tokens=8, constraint=Constraint.json_object())
        model.generate(PROMPT, method="eagle", max_new_tokens=8, temperature=1.0, constraint=Constraint.regex("[a-z]+"))
        assert set(bundle_in(model).acceptance) == {
            ("eagle", True, False),
            ("eagle", True, True),
            ("eagle", False, True),
        }


def test_a_bundle_without_a_tokenizer(bundle_of: Callable[..., Path]) -> None:
    with EagleModel.load(bundle_of("eagle1"), threads=1) as model, pytest.raises(ConstraintError, match="tokenizer"):
        model.stream([5, 6], constraint=Constraint.json_object())


def test_a_matcher_is_one_turns_alone() -> None:
    one = grammars()
    first, second = (one.matcher(Constraint.regex("[ab]c")) for _ in range(2))
    first.consume(ids("a")[0])
    assert texts_of(second.mask()) == {"a", "b"} and texts_of(first.mask()) == {"c"}
    assert isinstance(first, Matcher)
