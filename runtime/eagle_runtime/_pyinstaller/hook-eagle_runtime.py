"""Modules that are imported when first needed, backends among them, and the libraries of those that are installed."""

import importlib.util

from PyInstaller.utils.hooks import collect_dynamic_libs, collect_submodules

ENGINES = ("onnxruntime", "eagle_edge_kernels", "tensorrt_rtx", "tensorrt_rtx_libs", "llguidance")
LIBRARIES = ["*.dll", "*.dylib", "lib*.so", "eagle_kernels.so"]  # PyInstaller looks for the first three by itself
installed = [name for name in ENGINES if importlib.util.find_spec(name) is not None]
hiddenimports = [
    *collect_submodules("eagle_runtime", lambda name: "_pyinstaller" not in name),
    "jinja2.ext",
    *installed,
]
binaries = [library for name in installed for library in collect_dynamic_libs(name, search_patterns=LIBRARIES)]
