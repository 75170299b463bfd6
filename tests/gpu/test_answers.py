"""On an NVIDIA GPU: answers that are written by captured steps, with attention that reads caches as far as they are
filled, are those of steps over masked caches and of plain forward passes, but for rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from eagle_train.answering import Request, TargetSampler  # noqa: E402
from eagle_train.config import Sampling  # noqa: E402
from eagle_train.graphed import GraphedSampler, Places  # noqa: E402
from eagle_train.target import FrozenTarget  # noqa: E402

pytestmark = pytest.mark.gpu

TARGET = Path(__file__).resolve().parents[2] / "tools" / "demo_pair" / "target"


class Listed:
    def __init__(self, requests: list[Request]) -> None:
        self._left = requests[::-1]

    def take(self) -> Request | None:
        return self._left.pop() if self._left else None


def written(kind: type[TargetSampler] | type[GraphedSampler]) -> dict[int, list[int]]:
    target = FrozenTarget(TARGET, torch.device("cuda"))
    requests = [
        Request([1, 300 + number, 90 + 7 * number], number, Sampling(max_new_tokens=40)) for number in range(60)
    ]
    return {request.number: tokens for request, tokens in kind(target, 24).answers(Listed(requests))}


def test_answers_are_those_of_plain_passes_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch was built without CUDA")
    flash, plain = written(GraphedSampler), written(TargetSampler)
    monkeypatch.setattr(Places, "_fused", lambda self: False)
    masked = written(GraphedSampler)
    for other in (plain, masked):
        same = [tokens == other[number] for number, tokens in flash.items()]
        assert len(same) == 60 and sum(same) > 30
