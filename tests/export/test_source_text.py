"""Texts that a source writes in one batch: sampled ones, and greedy ones beside them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from conftest import GOLDEN, HEADS
from eagle_calib.observe import SampleFile
from eagle_export.checking.source_reading import reading_of_pair
from eagle_export.graphs.pair import open_pair
from eagle_export.reading.families.source import load_source
from eagle_export.recording.continuations import run_errors
from eagle_export.recording.self_calibration import observe_source
from eagle_export.recording.source_text import Greedy, Writer, sample
from eagle_export.recording.states_in_place import states_in_place
from source_continuations import continuations
from tiny_families import ROWS, Row, source_of


def test_tokens_are_sampled_by_their_probabilities() -> None:
    shares = torch.tensor([0.1, 0.0, 0.65, 0.25])
    logits = shares.log().expand(4000, 4)
    counts = torch.bincount(sample(logits, torch.Generator().manual_seed(1)), minlength=4) / 4000
    torch.testing.assert_close(counts, shares, atol=0.03, rtol=0)
    assert counts[1] == 0


def test_texts_are_those_that_are_written_alone() -> None:
    """Sampled and greedy ones, whose starts differ in length; one ends early. Hidden states are the model's."""
    model = load_source(GOLDEN / "target")
    alone, _ = Writer(model).write([[5, 6, 7], [9, 8, 4]], 20, (0, -1), [], ())
    first = Writer(model).write([], 0, (), [Greedy([3, 4, 5, 6, 7, 8], 12, ())], ())[1][0]
    greedy = [
        Greedy([3, 4, 5, 6, 7, 8], 12, (), with_logits=True),
        Greedy([9, 9], 3, ()),
        Greedy([3, 4, 5, 6, 7, 8], 12, first.tokens[4:5]),
    ]
    counts: list[tuple[int, int]] = []
    writer = Writer(model, before=lambda texts, batch: counts.append((texts, batch)))
    sampled, written = writer.write([[5, 6, 7], [9, 8, 4]], 14, (0, -1), greedy, (2,))
    assert sampled.tokens.tolist() == alone.tokens[:, :14].tolist()
    assert set(sampled.hidden) == {0, -1} and sampled.hidden[-1].shape[:2] == (2, 14) and sum(sampled.passes) == 14
    assert counts[0] == (2, 5) and counts[-1] == (0, 5), "sampled texts are done before greedy ones"
    assert [len(each.tokens) for each in written] == [12, 3, 1 + first.tokens.index(first.tokens[4])]
    assert written[0].tokens == first.tokens and len(written[0].logits) == 12 and len(written[1].logits) == 0
    assert written[0].logits.argmax(-1).tolist() == first.tokens
    with torch.inference_mode():
        ids = torch.tensor([[*written[0].start, *written[0].tokens[:-1]]])
        wanted = model(input_ids=ids, output_hidden_states=True).hidden_states[2]
    torch.testing.assert_close(written[0].hidden[2], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_family_writes_its_texts_and_reads_no_token_in_vain(row: Row) -> None:
    """Those whose attention adds a mask refuse a pass for which the caches have no room: they had no certificate."""
    model, passes = source_of(row), list[int]()
    writer = Writer(model, before=lambda texts, batch: passes.append(batch))
    (written,) = writer.write([], 0, (), [Greedy([5, 9, 7], 16, (), with_logits=True)], ())[1]
    with torch.inference_mode():
        ids = torch.tensor([[*written.start, *written.tokens[:-1]]])
        wanted = model(input_ids=ids, use_cache=False).logits[0, 2:].numpy()
    assert len(passes) == len(written.tokens) == 16
    np.testing.assert_allclose(written.logits, wanted, atol=1e-4)


def test_states_are_changed_in_place_by_transformers_rule() -> None:
    """While a source writes. Every second head of values has the keys of the one before it."""
    random = torch.Generator().manual_seed(2)
    keys = [torch.randn(3, 1, 2, 8, generator=random) for _ in range(2)]
    values, state = torch.randn(3, 1, 4, 5, generator=random), torch.randn(3, 4, 8, 5, generator=random)
    gates = {"g": -torch.rand(3, 1, 4, generator=random), "beta": torch.rand(3, 1, 4, generator=random)}
    settings = {**gates, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    new, columns, weight = (torch.randn(*size, generator=random) for size in ((3, 1, 6), (3, 6, 4), (6, 4)))

    def step(state: torch.Tensor, columns: torch.Tensor) -> list[torch.Tensor]:
        read, left = modeling_qwen3_5.torch_recurrent_gated_delta_rule(*keys, values, initial_state=state, **settings)
        mixed = modeling_qwen3_5.causal_conv1d_update(new.mT, columns, weight, None, "silu")
        return [read, left, mixed, columns]

    wanted = step(state.clone(), columns.clone())
    with states_in_place(source_of(ROWS["Qwen3.5"])):
        found = step(state, columns)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert found[1] is state and step(state, columns)[1] is not state, "which ends"


def test_what_transformers_misses_is_not_said_while_a_source_runs() -> None:
    """Of LFM2 it says twice that a package with kernels for GPUs is not installed."""
    logger = logging.getLogger("transformers.integrations")
    with run_errors(Path("source")):
        assert not logger.isEnabledFor(logging.WARNING) and logger.isEnabledFor(logging.ERROR)
    assert logger.isEnabledFor(logging.WARNING)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_source_is_read_for_its_certificate_while_inputs_are_recorded(kind: str, tmp_path: Path) -> None:
    pair = open_pair(GOLDEN / "target", GOLDEN / HEADS[kind])
    meanwhile, apart = reading_of_pair(pair), reading_of_pair(pair)
    assert meanwhile is not None and apart is not None and pair.head is not None
    in_memory = observe_source(pair.target, pair.text, None, pair.head, asked=meanwhile.asked())
    with SampleFile(tmp_path) as file:
        recorded = observe_source(pair.target, pair.text, None, pair.head, asked=meanwhile.asked(), file=file)
        assert set(recorded.inputs) == set(in_memory.inputs)
        assert os.name == "nt" or not list(tmp_path.iterdir())  # the file has no name: a kill leaves nothing
        for name, seen in recorded.inputs.items():
            assert seen.rows == in_memory.inputs[name].rows
            np.testing.assert_array_equal(seen.sample, in_memory.inputs[name].sample)
            np.testing.assert_array_equal(seen.channel_absmax, in_memory.inputs[name].channel_absmax)
    assert not list(tmp_path.iterdir())
    assert meanwhile.expected is not None, "what was asked for is there before it is read"
    expected, checked = meanwhile.read()
    again, checked_apart = apart.read()
    alone = continuations(GOLDEN / "target", meanwhile.prompts, meanwhile.eos, meanwhile.count)
    assert [each.tokens for each in expected] == [each.tokens for each in again] == [each.tokens for each in alone]
    for one, two in zip(expected, alone, strict=True):
        np.testing.assert_allclose(one.logits, two.logits, atol=1e-3)
    assert checked is not None and checked_apart is not None
    assert (checked.rows, checked.share) == (checked_apart.rows, checked_apart.share) and checked.rows > 300


def test_a_source_is_loaded_without_a_bar_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands say what they do; transformers' bar would stand in files of what they say."""
    load_source(GOLDEN / "target")
    assert capsys.readouterr().err == ""
