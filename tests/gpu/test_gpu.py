"""On an NVIDIA GPU, with the shipped pair: every backend is lossless, and computes what the CPU and PyTorch compute.

Run with `pytest -m gpu`; tools/gpu_check.sh sets up a machine for it. Backends that are not installed, or do not
support this GPU, are skipped with the reason; CUDA is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from eagle_calib.replay import forced_logits
from eagle_runtime import BackendError, BundleError, EagleModel, SamplingParams
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.generate import generate
from eagle_runtime.drafting.shapes import DynamicTree, EagleDrafter
from eagle_runtime.drafting.vanilla import NoDraft
from eagle_runtime.machine.nvidia import DeviceInfo, first_gpu
from eagle_runtime.sampling.candidates import LogitRow
from eagle_runtime.sampling.sampler import Sampler
from eagle_tools.compare_engines import compare_sessions
from eagle_tools.questions import read_questions
from insides import bundle_in, sessions_of

pytestmark = pytest.mark.gpu

PAIR = Path(__file__).resolve().parents[2] / "tools" / "demo_pair"
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 100, 48, 48
CONTEXT = 512
TIE = 2**-7  # times the largest logit: rounding in fp16 may change a logit by so much
TIES = 0.1  # share of outputs that may differ from such a tie on
BACKENDS = ("cuda", "tensorrt-rtx", "tensorrt")

Rows = list[npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def gpu() -> DeviceInfo:
    try:
        return first_gpu()
    except BackendError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def bundle_on(tmp_path_factory: pytest.TempPathFactory, gpu: DeviceInfo) -> Callable[[str, str], Path]:
    """Returns a function: backend, precision -> bundle of the shipped pair, with engines where the backend needs
    them."""
    base = tmp_path_factory.mktemp("gpu")

    def bundle(backend: str, precision: str) -> Path:
        folder = base / f"{backend}_{precision}"
        if not folder.exists():
            from eagle_export.base.errors import ExportError
            from eagle_export.bundle import export
            from eagle_export.tensorrt.build import build_engines
            from eagle_export.writing.settings import Settings

            pair = PAIR / "target", PAIR / "eagle3"
            export(*pair, folder, Settings(precision=precision, backend=backend, certify=False))
            if backend != "cuda":
                capabilities = [gpu.compute_capability] if backend == "tensorrt-rtx" else None
                try:
                    build_engines(folder, backend, capabilities, context=CONTEXT)
                except (BackendError, ExportError) as error:
                    (folder / "unbuilt").write_text(str(error))
        if (folder / "unbuilt").exists():
            pytest.skip((folder / "unbuilt").read_text())
        return folder

    return bundle


@pytest.fixture(scope="module")
def model_on(bundle_on: Callable[[str, str], Path]) -> Iterator[Callable[..., EagleModel]]:
    """Returns a function: backend, precision (fp16) -> loaded bundle."""
    models: dict[tuple[str, str], EagleModel] = {}

    def model(backend: str, precision: str = "fp16") -> EagleModel:
        if (backend, precision) not in models:
            bundle = bundle_on(backend, precision)
            try:
                models[backend, precision] = EagleModel.load(bundle, backend=backend, context=CONTEXT)
            except (BackendError, BundleError) as error:
                if backend == "cuda":
                    raise
                pytest.skip(str(error))
        return models[backend, precision]

    yield model
    for loaded in models.values():
        loaded.close()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """PROMPTS held-out prompts. Where there are too few, the first half of a prompt is a further one."""
    turns = [question.turns[0] for question in read_questions(PAIR / "heldout.jsonl")]
    return [*turns, *(turn[: len(turn) // 2] for turn in turns)][:PROMPTS]


class RecordingSampler(Sampler):
    """A sampler that also records the logits it samples from."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        super().__init__(params, prompt, vocab_size)
        self.rows: Rows = []

    def next(self, logits: npt.NDArray[np.float32] | LogitRow) -> int:
        self.rows.append((logits if isinstance(logits, np.ndarray) else logits.whole()).copy())
        return super().next(logits)


def decode(
    model: EagleModel, drafter: Drafter, prompt: list[int], params: SamplingParams
) -> tuple[list[int], Rows, int]:
    """Returns the tokens, the logits that each was sampled from, and the number of accepted drafted tokens."""
    sampler = RecordingSampler(params, prompt, model.manifest.target.vocab_size)
    tokens: list[int] = []
    accepted = 0
    for event in generate(DecodingState(bundle_in(model).target, model.head), drafter, sampler, prompt):
        accepted += event.step.num_accepted
        tokens += event.step.tokens.tolist()
        if len(tokens) >= NEW_TOKENS:
            break
    return tokens[:NEW_TOKENS], sampler.rows[:NEW_TOKENS], accepted


def check_lossless(model: EagleModel, texts: Sequence[str], temperature: float) -> None:
    """Compare the tokens with drafts and without. They may differ from a token on where the logits differ by
    rounding."""
    ties, accepted = [], 0
    for index, text in enumerate(texts):
        prompt = model.text.encode(text)[:PROMPT_TOKENS]
        params = SamplingParams(temperature=temperature, seed=index)
        plain, plain_rows, _ = decode(model, NoDraft(), prompt, params)
        eagle, eagle_rows, taken = decode(model, EagleDrafter(model.head, DynamicTree()), prompt, params)
        accepted += taken
        if eagle != plain:
            at = next(i for i, pair in enumerate(zip(plain, eagle, strict=True)) if pair[0] != pair[1])
            gap = float(np.abs(plain_rows[at] - eagle_rows[at]).max() / np.abs(plain_rows[at]).max())
            case = f"prompt {index}, T = {temperature}, token {at}: logits differ by {gap:.1e} of the largest"
            assert gap < TIE, f"not a float tie: {case}"
            ties.append(case)
    print(f"{len(texts)} outputs compared, {len(ties)} float ties", *ties, sep="\n")
    assert accepted > len(texts), "the test needs accepted drafts"
    assert len(ties) <= TIES * len(texts)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_eagle_equals_vanilla(
    backend: str, temperature: float, model_on: Callable[..., EagleModel], texts: list[str]
) -> None:
    check_lossless(model_on(backend), texts, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_int4_on_cuda_is_lossless(temperature: float, model_on: Callable[..., EagleModel], texts: list[str]) -> None:
    check_lossless(model_on("cuda", "int4"), texts[:30], temperature)


@pytest.mark.parametrize(("backend", "precision"), [*((name, "fp16") for name in BACKENDS), ("cuda", "int4")])
def test_every_output_equals_the_cpus(
    backend: str,
    precision: str,
    bundle_on: Callable[[str, str], Path],
    model_on: Callable[..., EagleModel],
    texts: list[str],
) -> None:
    model = model_on(backend, precision)
    prompts = [model.text.encode(text)[:PROMPT_TOKENS] for text in texts[:6]]
    with EagleModel.load(bundle_on(backend, precision), backend="cpu", context=CONTEXT) as reference:
        comparisons = compare_sessions(
            sessions_of(reference), sessions_of(model), model.manifest.target.vocab_size, prompts
        )
    for each in comparisons:
        print(each)
        assert each.largest < 0.05 * each.scale
        assert each.agreement is None or each.agreement > 0.9


def test_cuda_agrees_with_pytorch(model_on: Callable[..., EagleModel], texts: list[str]) -> None:
    """Logits for greedy continuations of PyTorch, with the same fp16 weights on the same GPU."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch was built without CUDA")
    source = transformers.AutoModelForCausalLM.from_pretrained(
        PAIR / "target", local_files_only=True, dtype=torch.float16
    ).to("cuda")
    model = model_on("cuda")
    same = []
    for text in texts[:20]:
        prompt = model.text.encode(text)[:PROMPT_TOKENS]
        ids = torch.tensor([prompt], device="cuda")
        with torch.inference_mode():
            output = source.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
            rows = source(output[:, :-1]).logits[0, len(prompt) - 1 :].float().cpu().numpy()
        continuation = output[0, len(prompt) :].tolist()
        ours = forced_logits(model, prompt, continuation)
        assert np.abs(ours - rows).max() < 2 * TIE * np.abs(rows).max()
        same += (ours.argmax(-1) == rows.argmax(-1)).tolist()
    print(f"{np.mean(same):.2%} of {len(same)} tokens are ranked first by both")
    assert np.mean(same) > 0.97


def test_a_bundle_for_cpus_is_refused(tmp_path: Path, gpu: DeviceInfo) -> None:
    """Its int8 products would run on the host without a warning."""
    from eagle_export.bundle import export
    from eagle_export.writing.settings import Settings

    export(PAIR / "target", PAIR / "eagle1", tmp_path / "b", Settings(precision="int8", certify=False))
    with pytest.raises(BackendError, match=r"int8 products are those for CPUs; export .* --backend cuda"):
        EagleModel.load(tmp_path / "b", backend="cuda")


def test_auto_takes_the_gpu(bundle_on: Callable[[str, str], Path]) -> None:
    with EagleModel.load(bundle_on("cuda", "fp16"), context=CONTEXT) as model:
        assert model.backend == "cuda"
        assert [name for name, _ in model.passed_over] == ["tensorrt-rtx", "tensorrt"]
