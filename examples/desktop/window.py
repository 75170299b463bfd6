"""A window to talk with a bundle: answers come piece by piece, from a thread that is not the window's.

python examples/desktop/window.py BUNDLE
"""

from __future__ import annotations

import queue
import sys
import threading
import tkinter as tk
from collections.abc import Sequence
from tkinter import scrolledtext, ttk
from typing import Any

from eagle_runtime import EagleError, EagleModel, Piece, Turn

LOOK_MS = 20  # between two looks at what the model's thread has sent
SETTINGS: dict[str, Any] = {"max_new_tokens": 500}


class Window:
    """The window. Only the methods of the model's thread wait for the model; they send what is to be shown to a queue,
    which the window's thread empties on a timer."""

    def __init__(self, root: tk.Tk, bundle: str, settings: dict[str, Any]) -> None:
        self.root = root
        self._settings = settings
        self._questions: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Piece | str] = queue.SimpleQueue()
        self._turn: Turn | None = None
        self.text = scrolledtext.ScrolledText(root, width=80, height=24, wrap="word", state="disabled")
        self.text.tag_configure("question", foreground="#1a4f9c", spacing1=8)
        self.entry = ttk.Entry(root)
        self.button = ttk.Button(root, text="Send", command=self.send)
        self.stop_button = ttk.Button(root, text="Stop", command=self.stop, state="disabled")
        self.status = ttk.Label(root, text="loading ...")
        self._arrange()
        self._thread = threading.Thread(target=self._serve, args=(bundle,), name="model")
        self._thread.start()
        root.protocol("WM_DELETE_WINDOW", self.close)
        root.after(LOOK_MS, self._look)

    # The window's thread

    def send(self) -> None:
        """Ask what the entry holds."""
        question = self.entry.get().strip()
        if question and str(self.button["state"]) != "disabled":
            self.entry.delete(0, "end")
            self._show(f"{question}\n", "question")
            self._answering(True)
            self._questions.put(question)

    def stop(self) -> None:
        """End the answer after the step that is running; what there is of it stays."""
        if self._turn is not None:
            self._turn.cancel()

    def close(self) -> None:
        """End the model's thread, then the window."""
        self.stop()
        self._questions.put(None)
        self._events.put("closing ...")
        self._wait_for_thread()

    def _wait_for_thread(self) -> None:
        if self._thread.is_alive():
            self.root.after(LOOK_MS, self._wait_for_thread)
        else:
            self.root.destroy()

    def _arrange(self) -> None:
        self.root.title("eagle-edge")
        self.text.grid(row=0, column=0, columnspan=3, sticky="nsew", padx=8, pady=(8, 4))
        self.entry.grid(row=1, column=0, sticky="ew", padx=(8, 4))
        self.button.grid(row=1, column=1)
        self.stop_button.grid(row=1, column=2, padx=(4, 8))
        self.status.grid(row=2, column=0, columnspan=3, sticky="w", padx=8, pady=(4, 8))
        self.root.rowconfigure(0, weight=1)
        self.root.columnconfigure(0, weight=1)
        self.entry.bind("<Return>", lambda event: self.send())
        self.entry.bind("<Escape>", lambda event: self.stop())
        self.entry.focus_set()
        self._answering(True)
        self.stop_button["state"] = "disabled"  # nothing to stop while it loads

    def _look(self) -> None:
        """Show what has come; text that came together is shown at once."""
        said = ""
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, str):
                self.status["text"] = event
                self._answering(False)
                continue
            said += event.text
            if event.result is not None:
                usage = event.result.usage
                said += "\n"
                self.status["text"] = (
                    f"{event.result.finish_reason}: {usage.new_tokens} tokens, {usage.tokens_per_s:.0f} per second, "
                    f"{usage.tau:.2f} per pass, first after {usage.ttft_s:.2f} s, {usage.cached_tokens} cached"
                )
                self._answering(False)
        if said:
            self._show(said, "answer")
        self.root.after(LOOK_MS, self._look)

    def _show(self, text: str, tag: str) -> None:
        self.text["state"] = "normal"
        self.text.insert("end", text, tag)
        self.text["state"] = "disabled"
        self.text.see("end")

    def _answering(self, answering: bool) -> None:
        self.button["state"] = "disabled" if answering else "normal"
        self.stop_button["state"] = "normal" if answering else "disabled"

    # The model's thread

    def _serve(self, bundle: str) -> None:
        """Load the bundle and answer questions until None comes."""
        try:
            with EagleModel.load(bundle) as model, model.conversation() as chat:
                self._events.put(f"{bundle} on {model.backend}")
                while (question := self._questions.get()) is not None:
                    try:
                        with chat.send(question, **self._settings) as turn:
                            self._turn = turn
                            for piece in turn:
                                self._events.put(piece)
                    except EagleError as error:
                        self._events.put(str(error))
                    finally:
                        self._turn = None
        except EagleError as error:
            self._events.put(str(error))


def main(argv: Sequence[str] | None = None) -> int:
    """Open the window; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1:
        print("usage: window.py BUNDLE", file=sys.stderr)
        return 2
    root = tk.Tk()
    Window(root, arguments[0], SETTINGS)
    root.mainloop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
