"""Short stories from plots with choices, each with questions whose answers are in the text.

Owns the template language and the plots. `{a|b}` is a choice, `$name` a value of the story; plots are data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from epicycle.tools import corpus_words as words

_CHOICE = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r"\$([a-z]+\d?)")


@dataclass(frozen=True, slots=True)
class Draw:
    """Values a plot draws: `names` are filled from the cells of one row, or, with `count`, from several values."""

    names: str
    rows: Sequence[str | tuple[str, ...]]
    count: int = 0


@dataclass(frozen=True, slots=True)
class Plot:
    """Text with choices and names, what it draws, and (question, answer) templates. Blank lines part paragraphs."""

    topic: str
    draws: tuple[Draw, ...]
    text: str
    questions: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Story:
    text: str
    questions: tuple[tuple[str, str], ...]


def expand(dice: Random, template: str, values: Mapping[str, str]) -> str:
    """Resolve choices from the inside out, then names."""
    while "{" in template:
        template = _CHOICE.sub(lambda found: dice.choice(found[1].split("|")), template)
    return _NAME.sub(lambda found: values[found[1]], template)


def tidy(text: str) -> str:
    """Single spaces, `an` before vowels, capitals after a full stop; speech keeps the case it was written in."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return re.sub(r'(^|\n|[.!?] )("?)([a-z])', lambda found: found[1] + found[2] + found[3].upper(), text)


def draw_character(dice: Random) -> dict[str, str]:
    """Name, kind and pronouns of a girl, a boy or an animal."""
    she = {"he": "she", "him": "her", "his": "her"}
    he = {"he": "he", "him": "him", "his": "his"}
    kinds = (
        {"name": dice.choice(words.GIRLS), "kind": "girl", **she},
        {"name": dice.choice(words.BOYS), "kind": "boy", **he},
        {"name": dice.choice(words.PETS), "kind": dice.choice(words.ANIMALS), **dice.choice((she, he))},
    )
    return dice.choice(kinds)


def draw_values(dice: Random, plot: Plot, hero: Mapping[str, str]) -> dict[str, str]:
    """Every name the plot's templates may use."""
    friend = draw_character(dice)
    while friend["name"] == hero["name"]:
        friend = draw_character(dice)
    values = {"hero": hero["name"], **hero, "friend": friend["name"], "fkind": friend["kind"], "fhe": friend["he"]}
    common = {
        "color": words.COLORS, "thing": words.THINGS, "food": words.FOODS, "place": words.PLACES, "glad": words.GLAD,
        "upset": words.UPSET, "weather": words.WEATHER, "day": words.DAYS, "helper": words.HELPERS,
        "trait": words.TRAITS,
    }  # fmt: skip
    values |= {name: dice.choice(options) for name, options in common.items()}
    for draw in plot.draws:
        values |= _drawn(dice, draw)
    return values


def _drawn(dice: Random, draw: Draw) -> dict[str, str]:
    if draw.count:
        picks = dice.sample(list(draw.rows), draw.count)
        return {f"{draw.names}{index}": str(pick) for index, pick in enumerate(picks)}
    row = dice.choice(draw.rows)
    cells = (row,) if isinstance(row, str) else row
    return dict(zip(draw.names.split(), cells, strict=True))


def tell(dice: Random, hero: Mapping[str, str] | None = None, plot: Plot | None = None) -> Story:
    """One story, of a given hero or plot if wanted."""
    plot = plot or dice.choice(PLOTS)
    values = draw_values(dice, plot, hero or draw_character(dice))
    template = f"{dice.choice(OPENINGS)} {plot.text.strip()} {dice.choice(ENDINGS)}"
    text = "\n\n".join(tidy(expand(dice, paragraph, values)) for paragraph in template.split("\n\n"))
    asked = [tuple(tidy(expand(dice, part, values)) for part in pair) for pair in plot.questions]
    return Story(text, tuple((question, answer) for question, answer in asked))


OPENINGS = (
    "{Once upon a time|Long ago|Once}, there {was|lived} a {$trait|little|young} $kind {named|called} $hero.",
    "$hero was a {$trait|little|young} $kind who lived {near $place|in a small house|not far from $place}.",
    "In a {small|quiet} {house|home} near $place lived a $trait $kind. {Everyone called $him|$his name was} $hero.",
    "It was a $weather day, and $hero, a {$trait|small} $kind, {looked out of the window|was up early}.",
)
ENDINGS = (
    "From that day on, $hero and $friend were {good|best} friends.",
    "That night, $hero fell asleep with a {smile|happy heart}.",
    '$hero {laughed|smiled} and said, "What a {day|good day}!"',
    "And so {everyone was $glad|it was a good day}.",
)
PLOTS = (
    Plot(
        topic="a lost thing",
        draws=(Draw("spot", words.SPOTS, count=4),),
        text="""
        $hero loved $his $color $thing {very much|best of all}. But on $day it was {gone|missing}, and
        $he was {very|so} $upset.

        First, $hero looked $spot0. {It was not there.|There was nothing.} Then $he looked $spot1. {Only
        dust was there.|It was not there.} "{What are you looking for|Can I help you}?" asked $friend.
        "I lost my $thing," said $hero. {Together they looked $spot2.|They looked everywhere.}

        At last they looked $spot3, and there was the $thing! $hero was {so |}$glad.
        """,
        questions=(
            ("What did $hero lose?", "$hero lost a $color $thing."),
            ("Where was the $thing?", "The $thing was $spot3."),
            ("Who helped $hero?", "$friend helped $hero."),
        ),
    ),
    Plot(
        topic="sharing",
        draws=(),
        text="""
        {One day|On $day}, $hero and $friend both wanted the same $color $thing. "It is mine!" said
        $hero. "No, I saw it first!" {cried|shouted} $friend. {Soon both were $upset.|They pulled and
        pulled.}

        $helper {heard them|came by}. "{If you share, both of you can have fun|You can take turns},"
        said $helper. $hero thought for a moment. "You can have it first," $he said. They {played|took
        turns} until {dinner|the sun went down}.
        """,
        questions=(
            ("What did they both want?", "They both wanted the $color $thing."),
            ("Who told them to share?", "$helper told them to share."),
        ),
    ),
    Plot(
        topic="a storm",
        draws=(Draw("shelter", ("an old barn", "a small cave", "a wooden hut", "a hollow tree")),),
        text="""
        On $day, $hero and $friend {were playing|went for a walk} near $place. Suddenly dark clouds
        came, and {thunder rolled|the wind began to blow}.

        "{I am scared|We must find a safe place}!" said $friend. They ran into $shelter. Rain drummed on
        the roof, and $hero {sang a song|told a funny story} until $friend smiled.

        After an hour the storm {passed|was over}. Over $place they saw a {big|bright} rainbow.
        """,
        questions=(
            ("Where did they hide from the storm?", "They hid in $shelter."),
            ("What did they see after the storm?", "They saw a rainbow."),
        ),
    ),
    Plot(
        topic="learning something new",
        draws=(
            Draw(
                "skill slip win",
                (
                    ("ride a bike", "fell into the grass", "rode down the whole street"),
                    ("swim", "swallowed some water", "swam across the pool"),
                    ("bake bread", "burned the bread", "baked a fine loaf"),
                    ("whistle", "made no sound at all", "whistled a happy tune"),
                    ("skate", "sat down hard on the ice", "skated in a big circle"),
                    ("read", "mixed up the letters", "read a whole page"),
                    ("juggle", "dropped all the balls", "kept three balls in the air"),
                ),
            ),
        ),
        text="""
        More than anything, $hero wanted to $skill. The first time $he tried, $he $slip. "I can not do
        it," said $hero.

        "{Nobody can do it the first time|Try again a little each day}," said $helper. So $hero {kept
        trying|practiced every day}. {$friend came to watch.|Each day it went a little better.}

        Then, on $day, $hero took a deep breath, and this time $he $win! $he felt {very|so} $glad.
        """,
        questions=(
            ("What did $hero want to learn?", "$hero wanted to learn to $skill."),
            ("What happened the first time?", "The first time, $hero $slip."),
            ("Did $hero give up?", "No, $hero kept trying."),
        ),
    ),
    Plot(
        topic="a seed",
        draws=(Draw("plant", ("sunflower", "apple tree", "pumpkin", "rose", "bean", "lemon tree")),),
        text="""
        One day, $helper gave $hero a {tiny|small} seed. "What will it become?" asked $hero. $he put it
        into the {garden|soil} and gave it water every day.

        For a week nothing happened, and $hero was $upset. "Good things take time," said $helper.

        Then a tiny green leaf {came up|looked out of the ground}. Week by week it grew, until it was a
        $plant! $hero showed it to $friend.
        """,
        questions=(
            ("What did the seed become?", "It became a $plant."),
            ("Who gave $hero the seed?", "$helper gave $hero the seed."),
        ),
    ),
    Plot(
        topic="a treasure",
        draws=(
            Draw("stop", words.PLACES, count=3),
            Draw("hidden", ("under a flat stone", "inside a bottle", "behind a loose brick", "under a bench")),
            Draw(
                "treasure", ("a box of coins", "a book of stories", "a silver whistle", "a music box", "a honey cake")
            ),
        ),
        text="""
        On $day, $hero found {an old|a strange} map {in a book|in the attic}. It said, "Go to $stop0."
        $hero and $friend {went|ran} there. A note was $hidden: "Now go to $stop1."

        So they went to $stop1. {It was a long way.|They were tired, but they went on.} There they found
        a second note: "Dig near $stop2."

        At last they came to $stop2. They dug and dug, and there it was: $treasure!
        """,
        questions=(
            ("Where did the map send them first?", "The map sent them to $stop0 first."),
            ("What was the treasure?", "The treasure was $treasure."),
            ("Where was the treasure?", "The treasure was near $stop2."),
        ),
    ),
    Plot(
        topic="making a new friend",
        draws=(),
        text="""
        On $day, a new $fkind came to $place. {This was|The newcomer was called} $friend. $friend sat
        alone and {did not talk|looked at the ground}.

        $hero knew how it feels to be new. "Hello, I am $hero. {Do you want to play|Would you like a
        $food}?" {$friend looked up and smiled.|"Yes, please," said $friend.} They played with a $thing
        all day.
        """,
        questions=(
            ("Who was new?", "$friend was new."),
            ("What did they play with?", "They played with a $thing."),
        ),
    ),
    Plot(
        topic="telling the truth",
        draws=(Draw("broken", ("cup", "vase", "lamp", "plate", "clock")),),
        text="""
        On $day, $hero was running in the house. Crash! The $broken of $helper fell and broke. "Who did
        this?" asked $helper. "{It was the cat|Maybe it was the wind}," said $hero.

        All night $hero could not sleep. The lie felt heavy. In the morning $he went to $helper. "It was
        me. I am sorry," said $hero. "Thank you for telling the truth," said $helper, {and they cleaned
        the floor|and they had tea together}.
        """,
        questions=(
            ("What broke?", "The $broken broke."),
            ("Did $hero tell the truth at first?", "No, $hero lied at first."),
        ),
    ),
)
