"""Make a pair as hard to quantise as real models are, with the same outputs: to develop quantisation on.

    python tools/harden.py TARGET EAGLE1_HEAD EAGLE3_HEAD -o OUT --strength middle --seed 0

writes OUT/target, OUT/eagle1 and OUT/eagle3: Hugging Face folders in fp32 whose logits equal the given pair's up to
rounding, which is checked. Each transform preserves the function:

    rotations   of the values between v_proj and o_proj, and of the residual stream if no EAGLE-1 head is given
    channels    outlier channels of the values, of the keys, and of the MLPs between up and down
    norms       outlier channels of the normalised inputs of q, k, v, gate and up
    sink        massive activations at the token that begins texts

Needs memory for the pair's weights in fp64.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from eagle_export.graphs.pair import Pair, open_pair
from eagle_runtime.base.errors import EagleError
from eagle_tools.harden.channels import plant_inner_outliers, plant_norm_outliers
from eagle_tools.harden.check import Difference, compare
from eagle_tools.harden.folders import write_pair, write_tokenizer
from eagle_tools.harden.rotations import ROTATIONS, rotate_stream, rotate_values
from eagle_tools.harden.sink import Token, plant_sink, writing_layer
from eagle_tools.harden.strength import STRENGTHS, HardenError, Strength
from eagle_tools.harden.weights import Weights, head_part, read_weights
from eagle_tools.harden.width import Width, choose_width, widen

TRANSFORMS = ("rotations", "channels", "norms", "sink")
TOLERANCE = 1e-4  # largest difference of a logit or log-probability, in fp32


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error in the input."""
    parser = argparse.ArgumentParser(prog="harden.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path, help="folder of the target")
    parser.add_argument("heads", type=Path, nargs="*", help="folders of its EAGLE heads, at most one of each kind")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--strength", choices=list(STRENGTHS), default="middle", help="default: %(default)s")
    parser.add_argument("--only", choices=TRANSFORMS, action="append", help="a transform; repeat it. Default: all")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        transforms = args.only or TRANSFORMS
        difference = harden(args.target, args.heads, args.out, STRENGTHS[args.strength], args.seed, transforms)
    except EagleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    words = [f"logits differ by at most {difference.logits:.1e}"]
    words += [f"{kind}'s log-probabilities by {largest:.1e}" for kind, largest in difference.heads.items()]
    print(f"{args.out}: {args.strength}; {', '.join(words)}")
    return 0


def harden(
    target: Path,
    heads: list[Path],
    out: Path,
    strength: Strength,
    seed: int = 0,
    transforms: Sequence[str] = TRANSFORMS,
) -> Difference:
    """Write the hardened target to out/target and each head to out/eagle1 or out/eagle3; returns by how much they
    differ from the source. Raises EagleError, also if that is more than TOLERANCE.

    transforms: some of TRANSFORMS."""
    unfinished = out.with_name(out.name + ".unfinished")
    for folder in (out, unfinished):
        if folder.exists():
            raise HardenError(f"{folder} exists; choose another folder or remove it")
    pairs = [open_pair(target, head) for head in heads] or [open_pair(target, None)]
    if pairs[0].family.model_type != "llama":
        raise HardenError(f"{target} is a {pairs[0].family.name} model, but only 'llama' targets can be hardened")
    kinds = [head_part(pair).config.kind for pair in pairs if pair.head]
    if "mtp" in kinds:
        raise HardenError(f"{target}: only EAGLE heads can be hardened, no multi-token-prediction layer")
    if len(set(kinds)) < len(kinds):
        raise HardenError(f"two of the heads are {max(kinds, key=kinds.count)} heads; give one of a kind")
    first = planted_token(pairs[0]) if "sink" in transforms else None
    rng = torch.Generator().manual_seed(seed)
    weights = read_weights(pairs)
    width = plant(pairs, weights, strength, transforms, first, rng)
    sizes = {} if width is None else {"hidden_size": len(width.source), "intermediate_size": len(width.units)}
    try:
        write_pair(pairs, unfinished, sizes, 1.0 if width is None else width.ratio, weights)
        write_tokenizer(target, unfinished / "target", first)
        difference = compare(target, dict(zip(kinds, heads, strict=True)), unfinished, first, seed)
        largest = max([difference.logits, *difference.heads.values()])
        if not largest <= TOLERANCE:
            raise HardenError(
                f"{target} would differ by {largest:.1e} after hardening, more than {TOLERANCE}; be milder"
            )
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return difference


def planted_token(pair: Pair) -> int:
    """The id of the token that begins texts. Raises HardenError if the target cannot have a sink there."""
    first = pair.config.bos_token_id
    folder = pair.target.folder
    if type(first) is not int or not 0 <= first < int(pair.config.vocab_size):
        raise HardenError(
            f"{folder / 'config.json'}: bos_token_id is {first!r}, but a sink needs the id that begins texts"
        )
    if int(pair.config.num_hidden_layers) < 3:
        raise HardenError(f"{folder} has fewer than the 3 layers in which a sink is written, carried and removed")
    return first


def plant(
    pairs: list[Pair],
    weights: Weights,
    strength: Strength,
    transforms: Sequence[str],
    first: int | None,
    rng: torch.Generator,
) -> Width | None:
    """Apply the transforms to the weights of the pairs; returns how they were widened, if they were.

    first: the token of the sink."""
    config = pairs[0].config
    width = None
    if "rotations" in transforms:
        rotation = ROTATIONS[strength.rotation]
        rotate_values(weights, rotation, rng)
        if "eagle1" not in weights.heads:
            rotate_stream(weights, rotation, rng)
    if first is not None:
        heads = int(config.num_attention_heads)
        width = choose_width(int(config.hidden_size), int(config.intermediate_size), heads, rng)
        widen(weights, width)
    if "channels" in transforms:
        plant_inner_outliers(weights, strength, rng)
    if "norms" in transforms:
        plant_norm_outliers(weights, width.free if width else (), strength, rng)
    if width is not None and first is not None:
        layer = writing_layer(int(config.num_hidden_layers))
        token = Token(first, float(config.rms_norm_eps) * width.ratio, layer)
        taps = next((pair.head.config.taps for pair in pairs if pair.head and pair.head.config.taps), ())
        plant_sink(weights, width, token, taps, strength, rng)
    return width


if __name__ == "__main__":
    sys.exit(main())
