"""Train one of the small looped models that epicycle ships.

    python -m epicycle.tools.train_embedded --corpus corpus.tar.xz --out OUT --seconds 545
    python -m epicycle.tools.train_embedded --arch huginn --corpus corpus.tar.xz --out OUT --seconds 420

Owns the command line only. torch is imported after the flags are parsed, by the run that was asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from epicycle.tools.train_recipe import Recipe, add_flags, recipe_from


def train(recipe: Recipe) -> None:
    """Run the recipe to its end and write the checkpoint folder `recipe.out`."""
    from epicycle.tools.train_run import open_run
    from epicycle.tools.train_stages import RUNS

    with open_run(recipe) as run:
        RUNS[recipe.arch](run)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="train_embedded", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    arguments = parser.parse_args(argv)
    try:
        recipe = recipe_from(arguments)
    except ValueError as error:
        parser.error(str(error))
    train(recipe)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
