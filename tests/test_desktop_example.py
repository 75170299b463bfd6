"""examples/desktop: the window stays responsive during an answer, and its buttons work. Needs Xvfb."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_export.bundle import export
from patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples/desktop/window.py"
PAIR = ROOT / "tools/demo_pair"
TICK_MS = 5

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def display() -> Iterator[str]:
    """A screen in memory."""
    program = shutil.which("Xvfb")
    assert program is not None, "the test of the window needs Xvfb; Debian's package is xvfb"
    reader, writer = os.pipe()
    server = subprocess.Popen(
        [program, "-displayfd", str(writer), "-screen", "0", "1000x700x24"],
        pass_fds=[writer],
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    number = os.read(reader, 16).decode().strip()
    yield f":{number}"
    server.terminate()
    server.wait()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("desktop") / "eagle1"
    export(PAIR / "target", PAIR / "eagle1", folder)
    return folder


class Driver:
    """A window whose thread is this one, and the longest time between two ticks of its timer."""

    def __init__(self, bundle: Path, settings: dict[str, Any]) -> None:
        import tkinter as tk

        spec = importlib.util.spec_from_file_location("desktop_window", EXAMPLE)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.root = tk.Tk()
        self.window = module.Window(self.root, str(bundle), settings)
        self.longest = 0.0
        self._latest = time.perf_counter()
        self.root.after(TICK_MS, self._tick)

    def _tick(self) -> None:
        now = time.perf_counter()
        self.longest = max(self.longest, now - self._latest - TICK_MS / 1e3)
        self._latest = now
        self.root.after(TICK_MS, self._tick)

    def until(self, condition: Any) -> None:
        """Let the window work until a condition holds, as its main loop does."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, self.window.status["text"]
            self.root.tk.dooneevent(0)

    def ask(self, question: str) -> None:
        self.window.entry.insert(0, question)
        self.window.button.invoke()

    def ready(self) -> bool:
        return str(self.window.button["state"]) == "normal"

    def shown(self) -> str:
        return str(self.window.text.get("1.0", "end"))

    def close(self) -> None:
        self.window.close()
        self.until(lambda: not self.window._thread.is_alive())
        self.root.destroy()


def test_the_window_answers_and_stops(display: str, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", display)
    driver = Driver(bundle, {"max_new_tokens": 500, "ignore_eos": True})
    driver.until(driver.ready)
    driver.longest, begun = 0.0, time.perf_counter()
    driver.ask("sort a list of names")
    driver.until(driver.ready)
    blocked, taken = driver.longest, time.perf_counter() - begun
    assert driver.window.status["text"].startswith("length: 500 tokens")
    assert len(driver.shown()) > 500
    folder = os.environ.get("EAGLE_SCREENSHOT")
    if folder:
        driver.root.update()
        subprocess.run(["import", "-window", "root", folder], check=True, env={**os.environ, "DISPLAY": display})
    print(f"the window's thread was blocked for {blocked * 1e3:.1f} ms at most, in an answer of {taken:.1f} s")
    assert blocked < 0.25 * taken
    before = len(driver.shown())
    driver.ask("reverse a string")
    driver.until(lambda: len(driver.shown()) > before + 80)
    driver.window.stop_button.invoke()
    driver.until(driver.ready)
    assert driver.window.status["text"].startswith("cancelled: ")
    driver.close()
