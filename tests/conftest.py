"""Fixtures shared by all tests: the golden pair, and bundles of it exported once for all workers."""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from filelock import FileLock

from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import MANIFEST_NAME
from eagle_runtime.commands.interrupts import STOP_SIGNALS
from eagle_runtime.ort.operators import native_operators

if TYPE_CHECKING:  # fixtures import torch: the process that hands out tests to workers needs none of it
    from trace_memory import TraceMemory

# Of tests of the native operators: they need eagle-edge-kernels, which `make kernels` builds.
needs_operators = pytest.mark.skipif(native_operators().library is None, reason=native_operators().reason)

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # some tests import it themselves
# There is a worker per core: a second thread in each waits for a core by spinning on it, which makes a test take up to
# five times as long. Workers, torch in them and the programs that tests start take the number from here; see also
# one_thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A machine that is busy with other work fails no test.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")

GOLDEN = Path(__file__).parent / "golden"
INT8_CACHE = "+int8 cache"  # end of the name of a precision, see bundle_of
HEADS = {"eagle1": "head_eagle1", "eagle3": "head_eagle3_dv44"}
BLOCKS = ("deepspec", "dflash", "reads_state")  # functions of block_writers


def put_listed(bundle: Path, name: str, content: bytes) -> None:
    """Add a file to a bundle, or replace it, and list it in the manifest, as if it had been exported like that."""
    (bundle / name).write_bytes(content)
    data = json.loads((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    data["files"][name] = hashlib.sha256(content).hexdigest()
    (bundle / MANIFEST_NAME).write_text(json.dumps(data), encoding="utf-8")


def put_tokenizer(bundle: Path) -> None:
    """Let a bundle of the golden pair take text: a token is a byte."""
    put_listed(bundle, "tokenizer.json", (GOLDEN / "byte_tokenizer.json").read_bytes())


def with_template(bundle: Path, folder: Path, template: str) -> Path:
    """Copy a bundle of the golden pair to `folder`, with a chat template; a token is a byte."""
    shutil.copytree(bundle, folder)
    put_tokenizer(folder)
    put_listed(folder, "chat_template.jinja", template.encode())
    return folder


CHAT_TEMPLATE = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}a: "


@pytest.fixture(scope="session")
def chatting(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden pair in int8 with a chat template; a token is a byte."""
    return with_template(bundle_of("eagle1", "int8"), tmp_path_factory.mktemp("chatting") / "pair", CHAT_TEMPLATE)


def write_block(kind: str, folder: Path) -> Path:
    """Write a block head; returns its folder. kind: one of BLOCKS."""
    import block_writers

    written: Path = getattr(block_writers, kind)().write(folder)
    return written


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests that slow.txt lists the mark slow."""
    lines = (Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").splitlines()
    listed = {line for line in lines if not line.startswith("#")}
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
    whole = {item.nodeid.partition("[")[0] for item in items}  # tests with all their parameters, unless ids were given
    gone = {each for each in listed if each.partition("[")[0] in whole} - {item.nodeid for item in items}
    if gone and len(whole) > 1000:
        raise pytest.UsageError(f"tests/slow.txt lists what no test is called: {', '.join(sorted(gone))}")


def pytest_configure() -> None:
    """Collects no garbage while modules are imported, which is in vain and takes a sixth of that time."""
    gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Where torch has no bytecode yet, one worker imports it before the others, each of which would compile it all."""
    torch, run = importlib.util.find_spec("torch"), getattr(session.config, "workerinput", {}).get("testrunuid")
    if run is None or torch is None or Path(importlib.util.cache_from_source(str(torch.origin))).exists():
        return (yield)
    with FileLock(Path(tempfile.gettempdir()) / f"eagle-edge-{run}.lock"):
        return (yield)


def pytest_collection_finish() -> None:
    """Leaves what was imported out of later collections: with it they take a tenth of all time. A trace, which makes
    many small objects that live on, takes a fourteenth longer with Python's own limit of 700."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Leaves what there is out of the collections at the end, in which pytest looks for errors: they take four
    seconds."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Restores the handlers of signals: a command that was stopped in this process leaves them ignored, and programs
    that later tests start would ignore them too."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def measured_costs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What passes cost is measured by the tests, not read from the user's own cache."""
    os.environ["EAGLE_CACHE"] = str(tmp_path_factory.mktemp("costs"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Sessions of ONNX Runtime in this process have one thread, unless a test says how many: see OMP_NUM_THREADS."""
    import onnxruntime

    class OneThread(onnxruntime.SessionOptions):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "SessionOptions", OneThread)
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    # It is the parent of their folders; without workers that parent is shared by all runs.
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def trace_memory(shared: Path) -> Iterator[TraceMemory]:
    """Exports by the tests of this run trace equal modules once, as do runs that are given one folder of traces."""
    from torch._export import utils as export_utils
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from eagle_export.graphs import head_modules, pair
    from trace_memory import TraceMemory

    folder = Path(os.environ.get("EAGLE_TRACES") or shared / "traces")
    folder.mkdir(exist_ok=True)
    memory = TraceMemory(folder)
    with pytest.MonkeyPatch.context() as patch:
        # A fifth of a trace is the list of what operators become in ONNX, which torch makes for each trace.
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        # A thirtieth is the names of operators, which torch looks up for each namespace, some fifty times a trace.
        patch.setattr(export_utils, "_materialize_cpp_cia_ops", functools.cache(export_utils._materialize_cpp_cia_ops))
        for module, name in ((pair, "trace_target"), (head_modules, "trace_draft"), (head_modules, "trace_ahead")):
            patch.setattr(module, name, memory.around(getattr(module, name)))
        yield memory


@pytest.fixture(scope="session", autouse=True)
def _traces(request: pytest.FixtureRequest) -> None:
    """Tests of operators alone do not wait for torch."""
    if "eagle_export.graphs.pair" in sys.modules:
        request.getfixturevalue("trace_memory")


@pytest.fixture
def fresh_traces(trace_memory: TraceMemory) -> Iterator[None]:
    """For tests that compare traces."""
    before, trace_memory.enabled = trace_memory.enabled, False
    yield
    trace_memory.enabled = before


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of reference models and traces."""
    return GOLDEN


@pytest.fixture(scope="session")
def bundle_of(shared: Path, trace_memory: TraceMemory) -> Callable[..., Path]:
    """kind of head, or "alone", precision (fp32) -> bundle of the golden pair, of its target alone, or with a recorded
    block head, exported by the first worker that asks. A precision of the target may be followed by "+int8 cache"."""

    def bundle(kind: str, precision: str = "fp32") -> Path:
        folder = shared / f"bundle_{kind}_{precision}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                from eagle_export.bundle import export
                from eagle_export.writing.settings import Settings

                head = (
                    None
                    if kind == "alone"
                    else write_block(kind, shared / f"block_{kind}")
                    if kind in BLOCKS
                    else GOLDEN / HEADS[kind]
                )
                observed = calibration(kind) if precision.startswith("int8-static") else None
                cache = "int8" if precision.endswith(INT8_CACHE) else None
                export(
                    GOLDEN / "target",
                    head,
                    folder,
                    Settings(
                        precision=precision.removesuffix(INT8_CACHE),
                        certify=False,
                        calibration=observed,
                        cache_precision=cache,
                    ),
                )
        return folder

    def calibration(kind: str) -> Path:
        """Of the texts of the reference traces."""
        from eagle_calib.calibrate import calibrate

        texts = [row["prompt_ids"] + row["first_64"] for row in load_trace("eagle2_tt16_d3_k4")["prompts"]]
        data, folder = shared / f"text_{kind}.jsonl", shared / f"calibration_{kind}"
        data.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in texts), encoding="utf-8")
        calibrate(bundle(kind), folder, data=data, threads=1)
        return folder

    return bundle


@pytest.fixture(scope="session")
def model_of(bundle_of: Callable[..., Path]) -> Iterator[Callable[..., EagleModel]]:
    """kind of head, precision (fp32), backend (cpu) -> loaded bundle of the golden pair, shared by the tests of a
    worker."""
    models: dict[tuple[str, str, str], EagleModel] = {}

    def model(kind: str, precision: str = "fp32", backend: str = "cpu") -> EagleModel:
        key = (kind, precision, backend)
        if key not in models:
            models[key] = EagleModel.load(bundle_of(kind, precision), threads=1, backend=backend)
        return models[key]

    yield model
    for loaded in models.values():
        loaded.close()


def load_trace(name: str) -> dict[str, Any]:
    """A recorded trace of tests/golden."""
    data: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return data


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """The eight prompts of the reference traces, as ids."""
    return [row["prompt_ids"] for row in load_trace("eagle2_tt16_d3_k4")["prompts"]]


@pytest.fixture(scope="session")
def text_bundle(tmp_path_factory: pytest.TempPathFactory, trace_memory: TraceMemory) -> Path:
    """The golden pair with a tokenizer of its vocabulary's ASCII, a token of other characters, and a chat template."""
    from tokenizers import Tokenizer

    from eagle_export.bundle import export
    from eagle_export.writing.settings import Settings

    folder = tmp_path_factory.mktemp("text")
    target = shutil.copytree(GOLDEN / "target", folder / "target")
    tokenizer = Tokenizer.from_file(str(GOLDEN / "byte_tokenizer.json"))
    tokenizer.add_tokens(["€😀"])
    tokenizer.save(str(target / "tokenizer.json"))
    config = json.loads((target / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}{{ m.role[0] | upper }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    export(target, GOLDEN / "head_eagle1", folder / "bundle", Settings(certify=False))
    return folder / "bundle"
