"""The chat page's files, and the modules that uvicorn chooses when it starts."""

from PyInstaller.utils.hooks import collect_data_files, collect_submodules

datas = collect_data_files("eagle_serve")
hiddenimports = [*collect_submodules("eagle_serve"), *collect_submodules("uvicorn")]
