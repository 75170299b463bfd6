"""EXAONE 4.0: norms of queries and keys, and after attention and MLP. Where some layers have a window (32B), these
alone rotate their queries and keys; where none has (1.2B), all do."""

from eagle_export.reading.families.family import Config, Family, by_layer_type


def rotary_layers(config: Config) -> int:
    """Returns how many layers rotate."""
    windows = by_layer_type(config)
    return sum(width is not None for width in windows) if config.sliding_window else len(windows)


EXAONE4 = Family(
    name="EXAONE 4.0",
    model_type="exaone4",
    causal_lm="Exaone4ForCausalLM",
    layer_norms=4,
    windows=by_layer_type,
    rotary_layers=rotary_layers,
)
FAMILIES = (EXAONE4,)
