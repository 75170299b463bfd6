"""Hooks by which PyInstaller freezes applications with eagle_runtime and eagle_serve."""

from __future__ import annotations

from pathlib import Path


def get_hook_dirs() -> list[str]:
    """The folder of the hooks (entry point `pyinstaller40`)."""
    return [str(Path(__file__).parent)]
