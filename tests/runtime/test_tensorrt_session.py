"""TensorRT sessions over a fake GPU, on which ONNX Runtime computes: the same tokens as ONNX Runtime alone, and what
is asked of the driver and the library on the way."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trt_fake
from cuda_fake import FakeDriver
from eagle_runtime import BackendError, BundleError, EagleModel, RequestError
from eagle_runtime.base.files import file_sha256
from eagle_runtime.bundle import listed_files
from eagle_runtime.bundle.fidelity import FidelityWarning
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.commands import cli
from eagle_runtime.commands.command import CLEARED, LoadingLine
from eagle_runtime.drafting.cost_storage import file_name
from eagle_runtime.opening import loading
from eagle_runtime.opening.opened import bundle_of_sessions
from eagle_runtime.trt import execution
from eagle_runtime.trt import session as tensorrt
from eagle_runtime.trt.fixed_shapes import HEAD_ROWS, TARGET_ROWS, Steps, past_steps, shapes_of
from eagle_runtime.trt.library import LIBRARIES
from eagle_runtime.trt.session import start_sessions
from insides import sessions_of
from systems import posix_only
from trt_fake import FakeContext, GraphStrategy, Specialization, Strategy, fake_library, write_fake_engines

CONTEXT = 700


class Machine:
    """A bundle with fake engines, a fake GPU of `total` bytes, a fake library."""

    def __init__(self, bundle: Path, library: str, *, streamed: bool = False, total: int = 1 << 32) -> None:
        self.bundle = bundle
        self.driver = FakeDriver(total)
        self.library = fake_library(self.driver, library)
        self.folder = write_fake_engines(bundle, library, CONTEXT, streamed=streamed)

    def sessions(self) -> Any:
        return start_sessions(self.library, self.driver, self.folder, read_manifest(self.bundle), CONTEXT)

    @contextmanager
    def model(self) -> Iterator[EagleModel]:
        with EagleModel(bundle_of_sessions(self.bundle, read_manifest(self.bundle), self.sessions(), CONTEXT)) as model:
            yield model

    @property
    def target_passes(self) -> list[dict[str, int]]:
        """The sizes of every forward pass that the library queued, captured ones included."""
        return self.library.contexts[0].passes  # type: ignore[no-any-return]


@pytest.fixture
def machine_of(bundle_of: Callable[..., Path], tmp_path: Path) -> Callable[..., Machine]:
    """Returns a function: kind of head, library -> a machine with a copy of the golden bundle."""

    def machine(kind: str = "eagle1", library: str = "tensorrt-rtx", **options: Any) -> Machine:
        bundle = tmp_path / f"{kind}-{library}"
        shutil.copytree(bundle_of(kind), bundle)
        return Machine(bundle, library, **options)

    return machine


def generation(model: EagleModel, prompt: Any, **settings: Any) -> tuple[tuple[int, ...], list[list[int]]]:
    """Returns the tokens of a generation, and the nodes of each of its trees."""
    trees: list[list[int]] = []
    tree = {"tree": "dynamic"} if settings.get("method", "eagle") == "eagle" else {}
    settings = {"max_new_tokens": 24, "ignore_eos": True} | tree | settings
    result = model.generate(prompt, on_cycle=lambda cycle: trees.append(cycle.tree.tokens.tolist()), **settings)
    return result.token_ids, trees


# The output.


@pytest.mark.parametrize(("kind", "library"), [("eagle1", "tensorrt-rtx"), ("eagle3", "tensorrt")])
def test_tokens_and_trees_are_those_of_onnxruntime(
    kind: str,
    library: str,
    machine_of: Callable[..., Machine],
    model_of: Callable[..., EagleModel],
    prompts: list[list[int]],
) -> None:
    """With drafts and without, greedy and sampled. Dynamic trees at temperature 0 are those of the host; others are of
    what the one call has drafted."""
    reference = model_of(kind)
    same = grown = 0
    sampled = {"temperature": 0.8, "seed": 3, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2}
    with machine_of(kind, library).model() as model:
        for prompt in prompts[:2]:
            plain = generation(reference, prompt, method="vanilla")
            assert generation(model, prompt, method="vanilla") == plain
            for settings in ({}, {"total_token": 30, "depth": 3}):
                expected = generation(reference, prompt, **settings)
                tokens, trees = generation(model, prompt, **settings)
                assert tokens == expected[0] == plain[0]
                same += sum(one == other for one, other in zip(trees, expected[1], strict=False))
                grown += max(len(trees), len(expected[1]))
            for others in ({"tree": "static"}, {"tree": "chain"}, {"tree": "sequoia"}, {"method": "eagle+lookup"}):
                assert generation(model, prompt, **others)[0] == plain[0]
            for drawn in ({"temperature": 1.0, "seed": 3}, sampled):
                expected = generation(reference, prompt, **drawn)
                tokens, trees = generation(model, prompt, **drawn)
                assert tokens == expected[0] == generation(model, prompt, method="vanilla", **drawn)[0]
                assert len(trees) <= 1.3 * len(expected[1]), "drafts are as good as the host's"
    assert same == grown


@pytest.mark.parametrize(
    ("kind", "library"),
    [("reads_state", "tensorrt"), pytest.param("deepspec", "tensorrt-rtx", marks=pytest.mark.slow)],
)
def test_blocks_and_trees_are_those_of_onnxruntime(
    kind: str, library: str, machine_of: Callable[..., Machine], model_of: Callable[..., EagleModel]
) -> None:
    """A block head's one call drafts what its graph drafts on the CPU, so all trees are the same, sampled ones too."""
    reference = model_of(kind)
    machine = machine_of(kind, library)
    with machine.model() as model:
        long = (np.arange(300) * 37 % 250).tolist()
        for prompt, drawn in ((long, {"temperature": 0}), ([7], {"temperature": 1.0, "seed": 3, "top_p": 0.95})):
            few: dict[str, Any] = {**drawn, "max_new_tokens": 8}
            plain = generation(reference, prompt, method="vanilla", **few)[0]
            for tree in ({"tree": "dynamic", "total_token": 16}, {"tree": "chain"}):
                expected = generation(reference, prompt, **few, **tree)
                assert generation(model, prompt, **few, **tree) == expected
                assert expected[0] == plain
            assert generation(model, prompt, tree="cost-aware", **few)[0] == plain
    assert {tuple(sizes) for sizes in machine.library.contexts[1].passes} == {("P",)}, "only the past's length varies"


def test_long_prompts_are_read_in_chunks(
    machine_of: Callable[..., Machine], model_of: Callable[..., EagleModel]
) -> None:
    """A prompt takes two forward passes, of 512 rows and of the rest, padded. The context is used up to its last
    row."""
    machine = machine_of()
    prompt = (np.arange(CONTEXT - 12) * 37 % 250).tolist()
    with machine.model() as model:
        reference = EagleModel.load(machine.bundle, backend="cpu", context=CONTEXT)
        for method in ("eagle", "vanilla"):
            assert generation(model, prompt, method=method) == generation(reference, prompt, method=method)
    read = [(sizes["T"], sizes["R"]) for sizes in machine.target_passes[:2]]
    assert read == [(512, 1), (512, 1)]


def test_scores_equal_those_of_onnxruntime(
    machine_of: Callable[..., Machine], model_of: Callable[..., EagleModel]
) -> None:
    with machine_of().model() as model:
        tokens = (np.arange(150) * 11 % 250).tolist()
        pieces = [np.array(piece) for piece in model.score(tokens, first=70)]
        expected = [np.array(piece) for piece in model_of("eagle1").score(tokens, first=70)]
    np.testing.assert_allclose(np.concatenate(pieces), np.concatenate(expected), atol=2e-4)


def test_a_target_alone(machine_of: Callable[..., Machine], model_of: Callable[..., EagleModel]) -> None:
    with machine_of("alone").model() as model:
        assert len(sessions_of(model)) == 1
        for prompt in ([5, 6, 7, 8] * 4, [9, 9, 9, 9]):
            assert generation(model, prompt, tree="chain") == generation(model_of("alone"), prompt, tree="chain")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_backend_name_loads_the_engines(
    library: str,
    machine_of: Callable[..., Machine],
    model_of: Callable[..., EagleModel],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all checks: engines that the sidecar rules out do not reach the library."""
    machine = machine_of("eagle1", library)
    monkeypatch.setattr(tensorrt, "load_library", lambda name: machine.library)
    monkeypatch.setattr(tensorrt, "CudaDriver", lambda: machine.driver)
    with EagleModel.load(machine.bundle, backend=library, context=CONTEXT) as model:
        assert generation(model, prompts[0]) == generation(model_of("eagle1"), prompts[0])
        with pytest.raises(RequestError, match=f"a model on {library} has no twins"):
            model.twin()
    machine.library.contexts.clear()
    machine.driver.compute_capability = "12.0"
    with pytest.raises(BundleError, match=r"built for compute capability 8\.9, but this GPU has 12\.0; build"):
        EagleModel.load(machine.bundle, backend=library, context=CONTEXT)
    machine.driver.compute_capability = "8.9"
    with pytest.raises(BundleError, match="a context of 700 needs no new engines"):
        EagleModel.load(machine.bundle, backend=library, context=2000)
    assert machine.library.contexts == [] and machine.driver.used == 0


@posix_only  # Windows lets nobody write to a file that is mapped
def test_only_files_that_are_read_are_hashed(
    machine_of: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT reads neither graphs nor weights; a backend that "auto" falls back to does, and finds the damage."""
    machine = machine_of()
    manifest, hashed = read_manifest(machine.bundle), list[Path]()

    def counted(path: Path) -> str:
        hashed.append(path)
        return file_sha256(path)

    monkeypatch.setattr(listed_files, "file_sha256", counted)
    weights = machine.bundle / "target/model.onnx.data"
    of_graphs = {machine.bundle / name for name in manifest.files if "model.onnx" in name}
    seen: list[tuple[str, int, int]] = []
    with load(machine, monkeypatch, on_progress=lambda *stage: seen.append(stage)):
        assert not of_graphs & set(hashed)
        assert {path.name for path in hashed} == {Path(name).name for name in manifest.files} - {
            path.name for path in of_graphs
        }
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["hash", "load", "warm"]
    machine.driver.compute_capability = "12.0"  # for which there are no engines
    hashed.clear()
    with EagleModel.load(machine.bundle, context=CONTEXT) as model:
        assert model.backend == "cpu" and of_graphs <= set(hashed) and len(hashed) == len(set(hashed))
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    machine.driver.compute_capability = "8.9"
    with load(machine, monkeypatch):
        pass
    machine.driver.compute_capability = "12.0"
    with pytest.raises(BundleError, match=r"target/model\.onnx\.data does not match its SHA-256"):
        EagleModel.load(machine.bundle, context=CONTEXT)


# Copies between host and GPU, and calls of the library.


def test_the_work_of_a_generation_is_counted(
    machine_of: Callable[..., Machine],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the model counts it, and in the output of eagle-run; the same as the driver's calls."""
    machine = machine_of("eagle1", "tensorrt")
    with load(machine, monkeypatch) as model:
        settings: dict[str, Any] = {"tree": "dynamic", "max_new_tokens": 24, "ignore_eos": True}
        model.generate(prompts[0], **settings)  # takes memory for rows, which later ones use again
        before, first = model.counters(), len(machine.driver.calls)
        assert before is not None
        cycles: list[Any] = []
        model.generate(prompts[0], on_cycle=cycles.append, **settings)
        now, calls = model.counters(), machine.driver.calls[first:]
        assert now is not None
        counted = now.since(before)
    named = {name: [call for call in calls if call[0] == name] for name in {call[0] for call in calls}}
    moved = sum(step.path[-1] >= len(step.path) for step in (cycle.step for cycle in cycles))
    assert counted.engine_calls == 1 + 2 * len(cycles) + moved, "the prompt's; one drafts, one verifies, one moves rows"
    assert counted.graph_launches == counted.engine_calls and counted.shapes == 0 == counted.allocations
    assert counted.synchronisations == len(named["synchronize"]) and counted.downloads == len(named["download"])
    assert counted.bytes_up == sum(call[3] for call in named["upload"])
    assert counted.bytes_down == sum(call[3] for call in named["download"])
    assert counted.device_copies == len(named["copy"]) + len(named["copy_2d"])
    arguments = ["--backend", "tensorrt", "--context", str(CONTEXT), "--json", "--max-new-tokens", "24", "--ignore-eos"]
    prompt = ",".join(map(str, prompts[0]))
    assert cli.main([str(machine.bundle), "--prompt-ids", prompt, "--tree", "dynamic", *arguments]) == 0
    printed = json.loads(capsys.readouterr().out)["counters"]
    assert printed.pop("allocations") > 0
    assert printed == {name: count for name, count in dataclasses.asdict(counted).items() if name != "allocations"}
    with EagleModel.load(machine.bundle, backend="cpu") as model:
        assert model.counters() is None
    assert cli.main([str(machine.bundle), "--prompt-ids", prompt, "--backend", "cpu", "--json"]) == 0
    assert "counters" not in json.loads(capsys.readouterr().out)


def test_steady_passes_repeat_shapes_and_addresses(
    machine_of: Callable[..., Machine], prompts: list[list[int]]
) -> None:
    """A generation uses few shapes; no address changes, and shapes change only where the padded past grows."""
    machine = machine_of("eagle1", "tensorrt-rtx")
    with machine.model() as model:
        cycles: list[Any] = []
        model.generate(prompts[0], tree="dynamic", max_new_tokens=60, ignore_eos=True, on_cycle=cycles.append)
    for context in machine.library.contexts:
        addresses = [call[1] for call in context.calls if call[0] == "address"]
        assert len(addresses) == len(set(addresses))
        shapes = {tuple(sorted(sizes.items())) for sizes in context.passes}
        assert len(shapes) <= 6 and (len(context.passes) >= len(cycles) or "T" not in context.passes[0])
        assert all(sizes.get("P", 0) % 256 == 0 for sizes in context.passes)


@pytest.mark.parametrize("capturable", [True, False])
def test_repeated_passes_are_captured_as_graphs(
    capturable: bool,
    machine_of: Callable[..., Machine],
    model_of: Callable[..., EagleModel],
    prompts: list[list[int]],
) -> None:
    """TensorRT leaves capturing to the caller. A forward pass that cannot be captured is queued kernel by kernel."""
    machine = machine_of("eagle1", "tensorrt")
    machine.driver.capturable = capturable
    with machine.model() as model:
        for _ in range(2):
            assert generation(model, prompts[0]) == generation(model_of("eagle1"), prompts[0])
        captured, launched = machine.driver.named("capture"), machine.driver.named("launch")
        assert 2 <= len(captured) <= 8
        assert len(launched) > 5 * len(captured) if capturable else not launched
    assert len(machine.driver.named("destroy_graph")) == (len(captured) if capturable else 0)


def test_graphs_of_another_cache_are_not_launched(machine_of: Callable[..., Machine], prompts: list[list[int]]) -> None:
    """Graphs hold the addresses of one cache."""
    machine = machine_of("eagle1", "tensorrt")
    manifest, sessions = read_manifest(machine.bundle), machine.sessions()
    first, second = (EagleModel(bundle_of_sessions(machine.bundle, manifest, sessions, CONTEXT)) for _ in range(2))
    expected = generation(first, prompts[0])
    assert generation(second, prompts[0]) == expected and generation(first, prompts[0]) == expected
    first.close()


def test_tensorrt_for_rtx_captures_graphs_itself(machine_of: Callable[..., Machine], prompts: list[list[int]]) -> None:
    machine = machine_of("eagle1", "tensorrt-rtx")
    with machine.model() as model:
        generation(model, prompts[0])
    for config in (context.config for context in machine.library.contexts):
        assert config.strategy is Strategy.USER_MANAGED
        assert config.cuda_graph_strategy is GraphStrategy.WHOLE_GRAPH_CAPTURE
        assert config.dynamic_shapes_kernel_specialization_strategy is Specialization.EAGER
    assert not machine.driver.named("capture")


# Few shapes, prepared while a bundle is loaded.


def load(machine: Machine, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> EagleModel:
    """Returns the model as programs load it."""
    library = machine.library.__name__.replace("_", "-")
    monkeypatch.setattr(tensorrt, "load_library", lambda name: machine.library)
    monkeypatch.setattr(tensorrt, "CudaDriver", lambda: machine.driver)
    return EagleModel.load(machine.bundle, backend=library, context=CONTEXT, **settings)


def test_loading_compiles_all_kernels_and_keeps_them(
    machine_of: Callable[..., Machine], prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And reports each shape. Then no generation compiles any, but for trees of more than 64 nodes, whose kernels are
    kept at once. A second start compiles none."""
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "cache"))
    machine = machine_of()
    seen: list[tuple[str, int, int]] = []
    with load(machine, monkeypatch, on_progress=lambda *step: seen.append(step)) as model:
        target, head, keep = machine.library.contexts
        shapes = [{tuple(sorted(sizes.items())) for sizes in context.compiled} for context in (target, head)]
        steps = [Steps(TARGET_ROWS, past_steps(CONTEXT), 128), Steps(HEAD_ROWS, past_steps(CONTEXT))]
        assert shapes == [{shape.pairs for shape in shapes_of(one)} for one in steps]
        kept = {path: path.stat().st_size for path in (tmp_path / "cache").glob("kernels-*")}
        assert len(kept) == 3 and len(keep.compiled) == 1
        shares = [done / total for stage, done, total in seen if stage == "warm"]
        assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1
        assert len(shares) == 2 + len(target.compiled) + len(head.compiled)
        for prompt in (prompts[0], (np.arange(CONTEXT - 40) * 37 % 250).tolist()):
            for settings in ({}, {"method": "vanilla"}, {"tree": "static"}, {"temperature": 1.0, "seed": 1}):
                generation(model, prompt, **settings)
        assert [len(context.compiled) for context in (target, head)] == [len(part) for part in shapes]
        generation(model, prompts[0], total_token=100)
        assert target.compiled[-1] == {"T": 512, "P": 256, "R": 128}
        assert {path: path.stat().st_size > size for path, size in kept.items()} == {
            path: path.name.startswith(f"kernels-{machine.folder.engines.target.sha256[:24]}") for path in kept
        }
    machine.library.contexts.clear()
    with load(machine, monkeypatch):
        assert all(not context.compiled for context in machine.library.contexts)


def test_costs_are_of_one_card_its_engines_and_its_library(
    machine_of: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are learned after kernels are specialised, and used by no other card, engine or library."""
    seen: list[frozenset[str]] = []

    def noted(facts: Iterable[str]) -> str:
        seen.append(frozenset(facts))
        return file_name(seen[-1])

    monkeypatch.setattr(loading, "file_name", noted)
    machine = machine_of()
    engines = machine.folder.engines
    for name, capability in (("Fake RTX", "8.9"), ("Fake RTX", "8.9"), ("Another RTX", "8.9")):
        machine.driver.name, machine.driver.compute_capability = name, capability
        with load(machine, monkeypatch):
            pass
        assert seen[-1] >= {name, capability, engines.target.sha256}
        assert engines.draft is not None and engines.draft.sha256 in seen[-1]
    assert seen[0] == seen[1] != seen[2]
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", SimpleNamespace(__version__="9.9"))
    with load(machine, monkeypatch):
        pass
    assert seen[-1] - seen[-2] == {"tensorrt_rtx 9.9"}


def test_a_terminal_shows_a_bar_while_kernels_are_compiled() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    steps = [("hash", 5, 5), ("load", 1, 1), ("warm", 0, 1), ("warm", 1, 4), ("warm", 3, 4), ("warm", 1, 1)]
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        line = LoadingLine(stream)
        for step in steps:
            line(*step)
    shown = terminal.getvalue().split(CLEARED)
    assert [text.count("#") for text in shown] == [0, 7, 22, 0] and shown[-1] == "" and file.getvalue() == ""
    assert shown[1].startswith("compiling kernels for this GPU [#######...")


def test_loading_captures_all_graphs(
    machine_of: Callable[..., Machine], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_of("eagle1", "tensorrt")
    with load(machine, monkeypatch) as model:
        captured = len(machine.driver.named("capture"))
        assert captured == sum(len(context.passes) for context in machine.library.contexts) / 2
        passes = [len(context.passes) for context in machine.library.contexts]
        for _ in range(2):
            generation(model, prompts[0])
        assert [len(context.passes) for context in machine.library.contexts] == passes, "all are replayed"
        assert len(machine.driver.named("launch")) > captured == len(machine.driver.named("capture"))
        assert not machine.driver.named("destroy_graph")
    assert len(machine.driver.named("destroy_graph")) == captured and not machine.driver.graphs


def test_the_graph_that_was_used_longest_ago_gives_way(
    machine_of: Callable[..., Machine],
    model_of: Callable[..., EagleModel],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A destroyed graph is never launched, which the driver would refuse."""
    monkeypatch.setattr(execution, "SPARE_GRAPHS", 1)
    machine = machine_of("eagle1", "tensorrt")
    with machine.model() as model:
        for settings in ({}, {"method": "vanilla"}, {"total_token": 30}, {"method": "vanilla"}, {}):
            expected = generation(model_of("eagle1"), prompts[0], **settings)
            assert generation(model, prompts[0], **settings) == expected
        assert len(machine.driver.graphs) <= 3 and len(machine.driver.named("destroy_graph")) >= 3


def test_an_interrupted_start_keeps_what_was_compiled_and_frees_all_memory(
    machine_of: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "cache"))
    machine = machine_of()

    def give_up(stage: str, done: int, total: int) -> None:
        if stage == "warm" and done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(machine, monkeypatch, on_progress=give_up)
    kept = [json.loads(path.read_bytes()) for path in (tmp_path / "cache").glob("kernels-*")]
    assert sorted(map(len, kept)) == [1, 4]
    assert machine.driver.used == machine.driver.pinned == 0 and not machine.driver.streams


# Memory.


def test_engines_share_scratch_memory_and_closing_frees_everything(
    machine_of: Callable[..., Machine], prompts: list[list[int]]
) -> None:
    machine = machine_of()
    with machine.model() as model:
        generation(model, prompts[0])
        target, head, _ = machine.library.contexts
        assert target.scratch == head.scratch is not None
        assert machine.driver.used > 0 and machine.driver.pinned > 0 and machine.driver.streams
    model.close()
    assert machine.driver.used == machine.driver.pinned == 0 and not machine.driver.streams


def test_further_generations_take_no_more_memory(machine_of: Callable[..., Machine], prompts: list[list[int]]) -> None:
    machine = machine_of()
    with machine.model() as model:
        generation(model, prompts[0])
        used = machine.driver.used
        for _ in range(3):
            generation(model, prompts[0])
        assert machine.driver.used == used


def test_a_full_gpu_is_refused_before_an_engine_is_loaded(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of("eagle1", "tensorrt-rtx", total=1_000_000)
    with pytest.raises(BackendError, match=r"Fake RTX has 0\.00 of 0\.00 GB free, but this bundle takes 0\.0\d GB: "):
        machine.sessions()
    assert machine.driver.calls == [] and machine.library.contexts == []


def test_a_failed_start_frees_all_memory(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of()
    machine.library.scratch = machine.driver.total + 1
    with pytest.raises(BackendError, match=r"memory is full: 4\.29 GB are needed"):
        machine.sessions()
    assert machine.driver.used == machine.driver.pinned == 0 and not machine.driver.streams


@pytest.mark.parametrize("backend", ["tensorrt-rtx", "auto"])
def test_a_cache_that_does_not_fit_leaves_nothing_on_the_gpu(
    backend: str, machine_of: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another process takes the rest of the memory while the engines are loaded. The error is still held, and
    with it the frames that hold the sessions, as an interactive interpreter does."""
    machine = machine_of()

    def sessions(name: str, *_: Any) -> Any:
        if name != "tensorrt-rtx":
            assert machine.driver.used == 0, "the next backend that is tried finds the memory free"
            raise BackendError("another reason")
        opened = machine.sessions()
        machine.driver.total = machine.driver.used
        return opened

    monkeypatch.setattr("eagle_runtime.opening.loading.open_sessions", sessions)
    with pytest.raises(BackendError, match="memory is full") as error:
        EagleModel.load(machine.bundle, backend=backend, context=CONTEXT)
    assert machine.driver.used == machine.driver.pinned == 0 and not machine.driver.streams
    assert all(context.freed for context in machine.library.contexts) and len(machine.library.contexts) == 3
    assert "GB are needed" in str(error.value)


def test_a_warning_that_is_raised_leaves_nothing_on_the_gpu(
    machine_of: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """python -W error makes errors of warnings, and the bundle is open when it gives this one."""
    machine = machine_of()
    monkeypatch.setattr("eagle_runtime.opening.loading.open_sessions", lambda *_: machine.sessions())
    monkeypatch.setattr("eagle_runtime.opening.loading.shortfall", lambda manifest: "it differs from its source")
    warnings.simplefilter("error", FidelityWarning)  # pytest puts the filters back
    with pytest.raises(FidelityWarning):
        EagleModel.load(machine.bundle, backend="tensorrt-rtx", context=CONTEXT)
    assert machine.driver.used == machine.driver.pinned == 0 and not machine.driver.streams


@posix_only  # as above
def test_streamed_weights_leave_room_for_buffers(machine_of: Callable[..., Machine], prompts: list[list[int]]) -> None:
    machine = machine_of("eagle1", "tensorrt-rtx", streamed=True)
    with machine.model() as model:
        generation(model, prompts[0])
        target, head, _ = machine.library.contexts
        assert target.engine.weight_streaming_budget_v2 == 1000, "all fit"
        assert target.config.cuda_graph_strategy is GraphStrategy.DISABLED
        assert head.config.cuda_graph_strategy is GraphStrategy.WHOLE_GRAPH_CAPTURE
        assert target.compiled and head.compiled, "shapes repeat, also where no graph holds them"
    machine.library.contexts.clear()
    tight = Machine(machine.bundle, "tensorrt-rtx", streamed=True, total=machine.driver.total)
    tight.driver.total = 200 << 20  # room for the buffers and the margin alone
    tight.library.streaming_scratch = 8192
    tight.sessions()
    target, head, _ = tight.library.contexts
    assert target.engine.weight_streaming_budget_v2 == 0
    assert target.scratch == head.scratch and target.scratch[1] == 4096 + 8192, "read once the budget was set"


# Kernels compiled on this machine.


def test_compiled_kernels_are_kept_in_the_users_cache(
    machine_of: Callable[..., Machine], prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are code, and a bundle's maker could put any there: none is read from or written to the bundle."""
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "cache"))
    machine = machine_of()
    engines = machine.folder.engines.specs.values()
    files = [tmp_path / "cache" / f"kernels-{engine.sha256[:24]}-8.9" for engine in engines]
    before = sorted(machine.bundle.rglob("*"))
    with machine.model() as model:
        assert not (tmp_path / "cache").exists()
        generation(model, prompts[0])
        kept = [file.read_bytes() for file in files]  # at once
        target, head, _ = machine.library.contexts
        assert (
            len(target.compiled) == len(json.loads(kept[0])) > 0 and len(head.compiled) == len(json.loads(kept[1])) > 0
        )
    for damaged in (False, True):
        machine.library.contexts.clear()
        if damaged:
            files[0].write_bytes(b"\xff damaged")
        with machine.model() as model:
            generation(model, prompts[0])
        target, head, _ = machine.library.contexts
        assert [len(context.compiled) > 0 for context in (target, head)] == [damaged, False]
        assert [file.read_bytes() for file in files] == kept
    assert sorted(machine.bundle.rglob("*")) == before
    assert sorted((tmp_path / "cache").iterdir()) == sorted(files)


def test_a_cache_folder_that_cannot_be_written_is_ignored(
    machine_of: Callable[..., Machine], prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "cache"))
    machine = machine_of()

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(30, "Read-only file system")

    with machine.model() as model:
        monkeypatch.setattr(Path, "write_bytes", refuse)
        generation(model, prompts[0])
    assert not list((tmp_path / "cache").iterdir())


# Errors.


def test_an_error_of_closing_is_raised_once_all_is_freed(
    machine_of: Callable[..., Machine], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_of("eagle1", "tensorrt")
    driver, destroy = machine.driver, machine.driver.destroy_graph
    failing = iter([True])

    def fail_once(graph: int) -> None:
        destroy(graph)
        if next(failing, False):
            raise BackendError("the GPU failed in cudaGraphExecDestroy")

    monkeypatch.setattr(driver, "destroy_graph", fail_once)
    model = load(machine, monkeypatch)
    assert driver.graphs
    with pytest.raises(BackendError, match="cudaGraphExecDestroy"):
        model.close()
    assert driver.used == driver.pinned == 0 and not driver.streams and not driver.graphs
    assert all(context.freed for context in machine.library.contexts)
    model.close()


def test_a_profile_that_is_not_taken_is_an_error(
    machine_of: Callable[..., Machine], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library raises an exception of its own."""
    machine = machine_of()

    def refuse(self: Any, profile_index: int, stream_handle: int) -> bool:
        raise RuntimeError("Error in set optimization profile async.")

    with machine.model() as model:
        monkeypatch.setattr(FakeContext, "set_optimization_profile_async", refuse)
        with pytest.raises(BackendError, match=r"^target.engine does not take its profile"):
            model.generate(prompts[0])


def test_what_reports_errors_is_in_c_while_engines_run(
    machine_of: Callable[..., Machine], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A logger in Python waits for the interpreter's lock, which a thread that closes an engine holds; an error
    recorder does too, so there is none any more when objects are freed."""
    machine = machine_of()
    seen: list[Any] = []
    end = FakeContext.__del__

    class Watched(trt_fake.FakeRtxContext):
        def __del__(self) -> None:
            seen.append((type(self.engine.runtime.logger), self.error_recorder, self.engine.error_recorder))
            end(self)

    monkeypatch.setattr(trt_fake, "FakeRtxContext", Watched)
    with machine.model() as model:
        generation(model, prompts[0])
    gc.collect()
    assert seen == [(machine.library.Logger, None, None)] * 3


def test_the_error_of_a_failed_pass_names_the_first_cause(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of()
    with machine.model() as model:
        machine.library.refuse = "execute_async_v3"
        with pytest.raises(BackendError, match=r"^target.engine failed \(the kernel was sick\)"):
            model.generate([1, 2, 3])


def test_an_engine_that_does_not_load_raises_and_frees_all_memory(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of()
    (machine.folder.folder / "draft.engine").write_bytes(b"\x00" * 64)
    with pytest.raises(
        BackendError, match=r"^draft.engine does not load from .*draft.engine \(the engine is not an engine\)"
    ):
        machine.sessions()
    assert machine.driver.used == machine.driver.pinned == 0 and not machine.driver.streams


def test_an_engine_of_another_graph_is_refused(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of()
    folder = machine.folder.folder
    shutil.copyfile(folder / "target.engine", folder / "draft.engine")
    with pytest.raises(BackendError, match=r"draft.engine has other inputs or outputs than the graph"):
        machine.sessions()


def test_a_tree_with_more_rows_of_logits_than_the_engine_serves_is_refused(machine_of: Callable[..., Machine]) -> None:
    settings: dict[str, Any] = {"total_token": 200}
    with machine_of().model() as model:
        with pytest.raises(RequestError, match=r"200 of them with logits.*lower total_token") as error:
            model.generate([1, 2, 3], max_new_tokens=300, ignore_eos=True, **settings)
        assert "\n" not in str(error.value)
        assert model.generate([1, 2, 3], max_new_tokens=3).token_ids, "the model can be used again"
