"""Names, shapes and types of the tensors in a pytorch_model.bin, without its values and without torch.

torch.save writes a zip file: data.pkl describes the tensors, and each storage is a file of its own. The description is
unpickled with five names alone, none of which runs code of the file; any other name is refused.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from eagle_export.base.errors import ExportError
from eagle_export.reading.stored_tensors import StoredTensor

STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "BoolStorage": "BOOL",
}
DESCRIPTION_BYTES = 16 << 20  # bytes of a description: a name, a shape and a storage for each tensor


def pickled_tensors(file: IO[bytes], named: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of an open pytorch_model.bin. named: its path, for errors. Raises ExportError for others."""
    try:
        with zipfile.ZipFile(file) as archive:
            (entry,) = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
            if entry.file_size > DESCRIPTION_BYTES:
                raise ValueError(f"a description of {entry.file_size} bytes")
            loaded = _Description(io.BytesIO(archive.read(entry))).load()
    except OSError:
        raise
    except Exception as error:  # the unpickler raises many kinds
        raise ExportError(
            f"{named} holds more than named tensors, or is damaged or of before torch 1.6 ({type(error).__name__}); "
            "download it again, or give the head as safetensors"
        ) from None
    if not isinstance(loaded, Mapping) or not all(isinstance(each, tuple) for each in loaded.values()):
        raise ExportError(f"{named} holds more than named tensors; give the head as safetensors")
    return {str(name): StoredTensor(str(name), named, shape, dtype) for name, (dtype, shape) in loaded.items()}


class _Description(pickle.Unpickler):
    """Makes (type, shape) of each tensor."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda dtype, _offset, shape, *_: (dtype, tuple(map(int, shape)))
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> str:
        _, dtype, *_ = pid  # "storage", type, key, place, numbers
        return str(dtype)
