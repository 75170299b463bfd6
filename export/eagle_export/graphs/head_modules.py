"""The modules of each kind of head: the head itself, its part in the target's graph, and its draft graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor, nn

from eagle_export.graphs.ahead_graph import AheadGraph, HydraGraph, MedusaGraph, trace_ahead
from eagle_export.graphs.assistant_graph import AssistantGraph
from eagle_export.graphs.block_graph import BlockGraph
from eagle_export.graphs.graphs import DraftGraph
from eagle_export.graphs.trace import Expected, Layout, trace_draft
from eagle_export.heads.ahead import HeadsAhead
from eagle_export.heads.assistant import AssistantReader
from eagle_export.heads.block import BlockHead, BlockReader
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.eagle1 import Eagle1Head, PredictionHead
from eagle_export.heads.eagle3 import Eagle3Head, TapReader
from eagle_export.heads.kinds import KINDS
from eagle_export.reading.families.gemma4 import LAYER_NORMS
from eagle_export.recipes.graph import WINDOW
from eagle_runtime.bundle.manifest import HeadKind

AnyHead = Eagle1Head | Eagle3Head | BlockHead | HeadsAhead
Logits = Callable[[Tensor], Tensor] | None


def _traced(module: nn.Module, config: HeadConfig, dtype: torch.dtype) -> ir.Model:
    layers, kind = config.num_layers, KINDS[config.kind]
    norms = layers * (4 if config.qk_norm else 2) + kind.norms - (config.output_norm == "none")
    layout = Layout(((config.num_kv_heads, config.head_dim),) * layers, dtype)
    return trace_draft(module, config, layout, Expected(attention=layers, rms_norm=norms, rotary=2 * layers))


def _traced_ahead(module: nn.Module, config: HeadConfig, dtype: torch.dtype) -> ir.Model:
    assert isinstance(module, AheadGraph)
    return trace_ahead(module, config.hidden_size, dtype)


def _traced_assistant(module: nn.Module, config: HeadConfig, dtype: torch.dtype) -> ir.Model:
    assert config.assistant is not None
    layers = config.num_layers
    norms = (LAYER_NORMS + 1) * layers + 1  # with that of the queries
    layout = Layout(config.assistant.rows, dtype)
    model = trace_draft(module, config, layout, Expected(attention=layers, rms_norm=norms, rotary=layers))
    for node in model.graph:  # no recipe may take the graph's mask for that of its layers
        if node.op_type == "Attention":
            node.metadata_props[WINDOW] = str(config.assistant.window)
    return model


@dataclass(frozen=True, slots=True)
class HeadModules:
    """Of one kind of head. head: uninitialised; None for one that reads more of the target than hidden states. graph:
    of its drafts, with the tokens that it returns per row, and what the target makes of the output of its LM head if
    the head has that. reader: of the target's hidden states, in the target's graph; None where features are the last
    one. trace: of the graph into ONNX."""

    head: Callable[[HeadConfig], AnyHead] | None
    graph: Callable[[HeadConfig, int, Logits], nn.Module]
    reader: Callable[[HeadConfig], TapReader | BlockReader | AssistantReader] | None = None
    trace: Callable[[nn.Module, HeadConfig, torch.dtype], ir.Model] = _traced


def _eagle3_graph(config: HeadConfig, top_k: int, logits: Logits) -> nn.Module:
    head = Eagle3Head(config)
    for name in ("fc", "fc_norm", "input_norm"):  # in the target's graph
        head._modules.pop(name, None)
    return DraftGraph(head, top_k, logits)


def _block_graph(config: HeadConfig, top_k: int, logits: Logits) -> nn.Module:
    head = BlockHead(config)
    del head.fc, head.hidden_norm  # in the target's graph
    return BlockGraph(head, config, top_k, logits)


MODULES: Mapping[HeadKind, HeadModules] = {
    "eagle1": HeadModules(Eagle1Head, lambda config, *of: DraftGraph(Eagle1Head(config), *of)),
    "eagle3": HeadModules(Eagle3Head, _eagle3_graph, TapReader),
    "mtp": HeadModules(PredictionHead, lambda config, *of: DraftGraph(PredictionHead(config), *of)),
    "block": HeadModules(BlockHead, _block_graph, BlockReader),
    "medusa": HeadModules(HeadsAhead, lambda config, *of: MedusaGraph(HeadsAhead(config), *of), trace=_traced_ahead),
    "hydra": HeadModules(HeadsAhead, lambda config, *of: HydraGraph(HeadsAhead(config), *of), trace=_traced_ahead),
    "assistant": HeadModules(
        None, lambda config, top_k, _: AssistantGraph(config, top_k), AssistantReader, _traced_assistant
    ),
}


def build_any_head(config: HeadConfig) -> AnyHead:
    """An uninitialised head of the config's kind."""
    make = MODULES[config.kind].head
    assert make is not None, "the caller asks for Pair.torch_head"
    return make(config)
