"""What a bundle's manifest lists: its models, graphs and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import onnx_ir as ir

from eagle_export.graphs.pair import Pair
from eagle_export.graphs.weights import graph_spec
from eagle_export.heads.config import HeadConfig
from eagle_export.recipes.native_steps import DOMAIN
from eagle_export.recipes.same_bits import depends_on_processor
from eagle_runtime.base.files import file_sha256
from eagle_runtime.bundle.graph import OPERATORS, NativeSpec
from eagle_runtime.bundle.manifest import SCHEMA_VERSION, GraphSpec, HeadSpec, Manifest, TargetSpec, TreeDefaults

GRAPH_FILES = {"target": "target/model.onnx", "draft": "draft/model.onnx"}
NATIVE_FILES = {"target": "target/native.onnx", "draft": "draft/native.onnx"}
TOOLS = ("eagle-edge", "torch", "transformers", "onnx", "onnx-ir", "onnxscript")


def graph_specs(
    graphs: Mapping[str, ir.Model], natives: Mapping[str, ir.Model], decisions: Mapping[str, dict[str, str]]
) -> dict[str, GraphSpec]:
    """Returns what is listed of each graph. natives: other forms of some of them; decisions: what recipes did."""
    specs = {name: graph_spec(GRAPH_FILES[name], graph, decisions[name]) for name, graph in graphs.items()}
    for name, native in natives.items():
        operators = {node.op_type for node in native.graph if node.domain == DOMAIN}
        used = sorted(operators | depends_on_processor(native))
        form = NativeSpec(NATIVE_FILES[name], OPERATORS, tuple(used))
        specs[name] = replace(specs[name], native=form)
    return specs


def manifest_of(
    folder: Path,
    pair: Pair,
    specs: Mapping[str, GraphSpec],
    precisions: Mapping[str, str],
    top_k: int,
    draft_vocab: int | None,
    hashes: Mapping[str, str],
    sources: Mapping[str, str],
) -> Manifest:
    """Returns the manifest, without a certificate, of a bundle whose files lie in a folder.

    specs, precisions: of graph "target" and, if there is a head, "draft". top_k, draft_vocab: of the head. hashes:
    SHA-256 of files where it is known. sources: models of the hub -> their commits."""
    config = pair.config
    trees = TreeDefaults()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return Manifest(
        schema_version=SCHEMA_VERSION,
        precision=dict(precisions),
        target=TargetSpec(
            model_type=str(config.model_type),
            hidden_size=int(config.hidden_size),
            vocab_size=int(config.vocab_size),
            num_layers=int(config.num_hidden_layers),
            num_kv_heads=pair.num_kv_heads,
            head_dim=pair.head_dim,
            context=pair.context,
            eos_token_ids=pair.generation.eos,
            graph=specs["target"],
        ),
        head=None if pair.head is None else _head_spec(pair.head.config, specs["draft"], top_k, draft_vocab),
        tree_defaults=replace(trees, draft_top_k=min(trees.draft_top_k, top_k)),
        sampling=pair.generation.sampling,
        tools={name: metadata.version(name) for name in TOOLS} | dict(sources),
        files={name: hashes.get(name) or file_sha256(files[name]) for name in sorted(files)},
        certificate=None,
    )


def _head_spec(config: HeadConfig, graph: GraphSpec, top_k: int, draft_vocab: int | None) -> HeadSpec:
    return HeadSpec(
        kind=config.kind,
        hidden_size=config.hidden_size,
        draft_vocab_size=config.draft_vocab_size if draft_vocab is None else draft_vocab,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        top_k=top_k,
        taps=config.taps,
        block=None if config.block is None else config.block.spec(config.state_size),
        graph=graph,
    )


def shared_weights(manifest: Manifest) -> tuple[str, ...]:
    """Names of the weights, without small constants, that are the same in both graphs. What is rounded in blocks is
    not: a target's table is rounded as its LM head, a head's as a table."""
    if manifest.head is None:
        return ()
    target, head = manifest.target.graph, manifest.head.graph
    rounded = tuple(f"{name}." for graph in (target, head) for name, done in graph.recipe.items() if "blocks" in done)
    same = (name for name, spec in target.weights.items() if spec == head.weights.get(name) and "." in name)
    return tuple(sorted(name for name in same if not name.startswith(rounded)))
