"""How many keys the rows of each layer see, in the two ways in which configs say it."""

from __future__ import annotations

from eagle_export.reading.families.family import Config, Windows


def by_layer_type(config: Config) -> Windows:
    """The layers that config.layer_types calls sliding have a window."""
    width = config.sliding_window
    return tuple(int(width) if kind == "sliding_attention" and width else None for kind in config.layer_types)


def every_layer(config: Config) -> Windows:
    """All layers have config.sliding_window, if there is one."""
    width = config.sliding_window
    return (None if width is None else int(width),) * int(config.num_hidden_layers)
