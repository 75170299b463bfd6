"""Block heads in the layouts of all known producers (block_writers.py): each is read with its producer's conventions,
and computes what its producer's own module computed (tests/golden/block_heads.*).

Whatever is left over, missing or contradictory is an error of one sentence.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from block_writers import (
    RECORDED,
    WRITERS,
    changed,
    deepspec,
    dflash,
    jetspec,
    modelopt_dspark,
    specforge_dspark,
    speculators_dflash,
    speculators_dspark,
)
from eagle_export.base.errors import ExportError
from eagle_export.graphs.eager import eager_head, eager_weights
from eagle_export.graphs.pair import HeadPart, open_pair
from eagle_export.heads.block import BlockHead, read_blocks
from eagle_export.heads.block_layouts import BLOCK_LAYOUTS, left_out
from eagle_export.reading.checkpoint import open_checkpoint
from eagle_export.reading.families.source import load_source
from head_writers import TARGET, Head

ROOTS = torch.tensor([[10, 14, 31]])  # of the recordings
# Producer -> taps, rows, anchor, causal, mask token, rank, whether the LM head is the head's own, drafted tokens.
CONVENTIONS = {
    "speculators DSpark": ((1, 4, 7), 4, True, False, 2, 6, True, 44),
    "speculators DFlash": ((2, 6), 5, False, False, 2, 0, True, 44),
    "eagle-train": ((1, 4, 7), 4, True, True, None, 6, True, 256),
    "DeepSpec DSpark": ((1, 4, 7), 4, True, False, 2, 6, False, 256),
    "SpecForge DSpark": ((1, 4, 7), 4, True, False, 2, 6, False, 256),
    "ModelOpt DSpark": ((1, 4, 7), 4, True, False, 2, 6, False, 256),
    "JetSpec": ((2, 6), 5, False, True, 2, 0, False, 256),
    "DFlash": ((2, 6), 5, False, False, 2, 0, False, 256),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return load_source(TARGET)


@pytest.fixture(scope="module")
def states(model: Any) -> tuple[Tensor, ...]:
    """The target's hidden states for the recordings' text."""
    with torch.inference_mode():
        hidden: tuple[Tensor, ...] = model(input_ids=RECORDED["tokens"], output_hidden_states=True).hidden_states
    return hidden


def opened(head: Head, folder: Path) -> HeadPart:
    part = open_pair(TARGET, head.write(folder)).head
    assert part is not None
    return part


def test_every_row_of_the_table_has_a_writer_and_conventions() -> None:
    assert [layout.producer for layout in BLOCK_LAYOUTS] == [*WRITERS] == [*CONVENTIONS]


@pytest.mark.parametrize("producer", WRITERS)
def test_a_head_is_read_with_its_producers_conventions(producer: str, tmp_path: Path) -> None:
    part = opened(WRITERS[producer](), tmp_path / "head")
    config = part.config
    assert (part.layout.producer, part.layout.kind, config.kind) == (producer, "block", "block")
    assert config.block is not None
    block = config.block
    read = (config.taps, block.size, block.anchor, block.causal, block.mask_id, block.markov_rank, block.own_lm_head)
    assert (*read, config.draft_vocab_size) == CONVENTIONS[producer]
    assert config.qk_norm == (producer != "eagle-train")
    assert config.rope["rope_parameters"]["rope_theta"] == 20000
    assert not part.own_embedding
    assert (part.d2t is not None) == (config.draft_vocab_size == 44)


@pytest.mark.parametrize(
    ("recorded", "write"),
    [
        ("dflash", dflash),
        ("jetspec", jetspec),
        ("dspark", deepspec),
        ("dspark", specforge_dspark),
        ("dspark", modelopt_dspark),
        ("dflash", speculators_dflash),
        ("dspark", speculators_dspark),
    ],
)
def test_a_head_computes_what_its_producers_module_computed(
    recorded: str, write: Callable[[], Head], tmp_path: Path, model: Any, states: tuple[Tensor, ...]
) -> None:
    part = opened(write(), tmp_path / "head")
    head = eager_head(part.config, eager_weights(part, model))
    assert isinstance(head, BlockHead)
    assert part.config.block is not None
    tokens = RECORDED["tokens"]
    with torch.inference_mode():
        taps = [states[tap] for tap in part.config.taps]
        hidden = read_blocks(head, part.config, tokens, taps, states[-1], ROOTS)[0]
        logits = head.logits(hidden[:, 0 if part.config.block.anchor else 1 :])
        if head.markov_head is not None:
            roots = tokens[0, ROOTS[0], None]
            logits = logits + head.markov_head(torch.cat([roots, RECORDED["dspark.drafted"][:, :-1]], 1))
    theirs = RECORDED[f"{recorded}.logits"]
    if part.d2t is not None:
        theirs = theirs[..., part.d2t + torch.arange(len(part.d2t))]
    torch.testing.assert_close(hidden, RECORDED[f"{recorded}.hidden"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, theirs, rtol=1e-5, atol=1e-5)


def test_without_ids_the_taps_are_z_labs_default(tmp_path: Path) -> None:
    head = dflash()
    head.config["dflash_config"] = {"mask_token_id": 2}
    assert opened(head, tmp_path / "head").config.taps == (2, 6)  # outputs of layers 1 and 8 - 3
    head.config["dflash_config"] = {"mask_token_id": 0, "target_layer_ids": [0, 6]}
    part = opened(head, tmp_path / "other")
    assert part.config.taps == (1, 7)
    assert part.config.block is not None and part.config.block.mask_id == 0


def test_a_rotation_that_the_head_does_not_say_is_the_targets(tmp_path: Path) -> None:
    head = speculators_dflash()
    del head.config["transformer_layer_config"]["rope_parameters"]
    theirs = open_pair(TARGET, None).config.rope_parameters["rope_theta"]
    assert opened(head, tmp_path / "head").config.rope["rope_parameters"]["rope_theta"] == theirs


@pytest.mark.parametrize(
    "stored",
    [
        lambda row: row,
        lambda row: row[None],
        lambda row: {"mask_token_id": 2, "embedding": row},
        lambda row: {"mask_embedding": row[None]},
    ],
)
def test_a_mask_embedding_next_to_the_weights_is_read(stored: Callable[[Tensor], object], tmp_path: Path) -> None:
    folder, row = tmp_path / "head", torch.linspace(-1, 1, 64).half()
    dflash().write(folder)
    torch.save(stored(row), folder / "mask_embedding.pt")
    part = open_pair(TARGET, folder).head
    assert part is not None and part.config.block is not None
    assert part.config.block.mask_id is None
    assert torch.equal(part.checkpoint.tensors["mask_embedding"].read(), row[None, None])


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("ran",))


@pytest.mark.parametrize("content", [b"no file of torch", pickle.dumps(Runs()), None, "wide"])
def test_a_mask_embedding_that_is_none_is_refused(
    content: bytes | str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dflash().write(tmp_path / "head")
    file = folder / "mask_embedding.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(torch.zeros(2, 64) if content is None else torch.zeros(65), file)
    with pytest.raises(ExportError, match="mask_embedding"):
        open_pair(TARGET, folder)
    assert "ran" not in capsys.readouterr().out


def test_confidence_is_left_out_knowingly(tmp_path: Path) -> None:
    part = opened(deepspec(), tmp_path / "head")
    assert not [name for name in part.checkpoint.tensors if "confidence" in name]
    assert "lm_head.weight" not in part.checkpoint.tensors  # equal to the target's
    note = left_out(open_checkpoint(tmp_path / "head"))
    assert note is not None and "confidence" in note
    assert left_out(part.checkpoint) is None


def nested(head: Head, **changes: object) -> Head:
    inner = {**head.config["dflash_config"], **changes}
    return changed(head, dflash_config={key: value for key, value in inner.items() if value is not None})


def layers(head: Head, **changes: object) -> Head:
    return changed(head, transformer_layer_config={**head.config["transformer_layer_config"], **changes})


def with_tensor(head: Head, name: str, *shape: int) -> Head:
    return Head({**head.tensors, name: torch.zeros(shape)}, head.config)


SLIDING = ["sliding_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("head", "causal"),
    [
        (lambda: changed(dflash(), layer_types=SLIDING, sliding_window=256), False),
        (lambda: nested(changed(dflash(), sliding_window=4096), use_swa=True, swa_window_size=256), False),
        (lambda: nested(dflash(), causal=True), True),
        (lambda: layers(speculators_dflash(), layer_types=SLIDING, sliding_window=2048), True),
        (lambda: layers(changed(speculators_dflash(), sliding_window_non_causal=True), layer_types=SLIDING), False),
    ],
    ids=["layers with a window", "all windowed", "causal", "speculators' windows are causal", "unless they say"],
)
def test_windows_that_a_head_outlives_are_read(head: Callable[[], Head], causal: bool, tmp_path: Path) -> None:
    written = head()
    if "transformer_layer_config" in written.config:
        written.config["transformer_layer_config"].setdefault("sliding_window", 2048)
        written.config["transformer_layer_config"]["sliding_window"] = 2048
    part = opened(written, tmp_path / "head")
    assert part.config.block is not None
    assert part.config.block.causal == causal


MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
REFUSALS: dict[str, tuple[Callable[[], Head], str]] = {
    "DFlash 2": (lambda: changed(dflash(), architectures=["DFlash2DraftModel"]), "a DFlash 2 head"),
    "Domino": (lambda: changed(dflash(), architectures=["DominoDraftModel"]), "a Domino head"),
    "Domino's tensors": (lambda: with_tensor(dflash(), "prefix_gru.weight_ih_l0", 3, 3), "a Domino head"),
    "Domino's projector": (lambda: nested(dflash(), projector_type="domino"), "projector_type is 'domino'"),
    "DFly": (lambda: changed(dflash(), architectures=["Qwen3DFlyModel"]), "a DFlare or DFly head"),
    "DFlare": (lambda: with_tensor(dflash(), "layer_fusion_weights", 2, 2), "a DFlare or DFly head"),
    "TreeFlash": (lambda: changed(dflash(), treeflash_config={"candidate_tokens": 16}), "a TreeFlash head"),
    "TreeFlash's tensors": (lambda: with_tensor(dflash(), "ar_approximation.d.weight", 3, 3), "a TreeFlash head"),
    "gated": (lambda: changed(deepspec(), markov_head_type="gated"), "markov_head_type is 'gated'"),
    "gated tensors": (lambda: with_tensor(deepspec(), "markov_head.gate_proj.weight", 6, 70), "gated transitions"),
    "recurrent": (lambda: changed(deepspec(), markov_head_type="rnn"), "markov_head_type is 'rnn'"),
    "recurrent tensors": (lambda: with_tensor(modelopt_dspark(), "joint_proj.weight", 6, 70), "recurrent transitions"),
    "adapter": (lambda: with_tensor(jetspec(), "hidden_dim_adapter.proj.weight", 64, 32), "an adapter"),
    "Gemma": (lambda: changed(deepspec(), architectures=["Gemma4DSparkModel"]), "Gemma's layers"),
    "other layers": (lambda: changed(dflash(), model_type="gemma3_text"), "layers are of type 'gemma3_text'"),
    "sinks": (lambda: nested(dflash(), attention_sink_bias=True), "attention_sink_bias is True"),
    "scaled": (lambda: nested(dflash(), output_multiplier=0.5), "output_multiplier is 0.5"),
    "quantised": (lambda: changed(dflash(), quantization_config={"bits": 4}), "quantization_config is"),
    "narrow window": (lambda: changed(dflash(), layer_types=SLIDING, sliding_window=128), "sliding_window is 128"),
    "no window": (lambda: changed(dflash(), layer_types=SLIDING, sliding_window=None), "sliding_window is None"),
    "mixed windows": (
        lambda: layers(speculators_dflash(), layer_types=["full_attention", SLIDING[0]], sliding_window=2048),
        "some layers see later rows",
    ),
    "other attention": (lambda: changed(dflash(), layer_types=["linear_attention"] * 2), "only full and sliding"),
    "no attention": (lambda: changed(dflash(), layer_types=[[1], [1]]), "only full and sliding"),
    "shifts": (
        lambda: nested(modelopt_dspark(), sample_from_anchor=False),
        "sample_from_anchor false and shift_label true contradict each other",
    ),
    "causal twice": (lambda: nested(jetspec(), causal=False), "causal false and causal_head true contradict"),
    "no truth": (lambda: nested(jetspec(), causal_head="yes"), "causal_head is 'yes', but must be true or false"),
    "no object": (lambda: changed(dflash(), dflash_config=[1, 5]), "dflash_config is .*, but must be an object"),
    "no object of EAGLE's": (lambda: changed(dflash(), eagle_config=[1]), "eagle_config is .*, but must be an object"),
    "another target": (
        lambda: changed(dflash(), num_target_layers=36),
        "num_target_layers is 36, but the",
    ),
    "a block of one": (lambda: changed(dflash(), block_size=1), "block_size is 1, but must be 2 to 64"),
    "no block": (lambda: changed(dflash(), block_size=None), "block_size is None"),
    "no mask": (lambda: nested(dflash(), mask_token_id=None), "mask_token_id is None, but must be a token's id"),
    "a mask outside": (lambda: nested(dflash(), mask_token_id=256), "outside the target's vocabulary of 256"),
    "no transitions": (lambda: changed(deepspec(), drop=MARKOV), r"markov_rank is 6 .* is missing"),
    "another rank": (lambda: changed(deepspec(), markov_rank=8), "markov_rank is 8 .* has rank 6"),
    "unwanted transitions": (lambda: changed(deepspec(), markov_rank=0), "markov_rank is 0 .* has rank 6"),
    "no LM head": (lambda: changed(speculators_dflash(), drop=("lm_head.weight",)), "draft_vocab_size is 44, but"),
    "no map": (lambda: changed(speculators_dflash(), drop=("d2t",)), "'d2t' is missing"),
    "dropped tap": (lambda: changed(speculators_dflash(), aux_hidden_state_layer_ids=[2]), "do not name 2 ascending"),
    "no ids": (lambda: changed(speculators_dflash(), aux_hidden_state_layer_ids=None), "does not say which"),
    "the last layer": (lambda: nested(dflash(), target_layer_ids=[1, 7]), "names the output of the last layer"),
    "the embedding": (lambda: changed(deepspec(), target_layer_ids=[-1, 3, 6]), "names the target's embedding"),
    "too few taps": (lambda: nested(dflash(), target_layer_ids=[1]), "do not name 2 ascending layers"),
    "no fc": (lambda: changed(dflash(), drop=("fc.weight",)), "'fc.weight' is missing"),
    "another width": (lambda: changed(dflash(), target_hidden_size=128), "target_hidden_size is 128"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_read_is_an_error_of_one_sentence(name: str, tmp_path: Path) -> None:
    make, message = REFUSALS[name]
    with pytest.raises(ExportError, match=message) as caught:
        open_pair(TARGET, make().write(tmp_path / "head"))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
