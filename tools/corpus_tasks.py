"""Questions with answers that can be checked: sums, lists, calendars, kinds of things, who is where, tables of facts.

Owns one function per kind of question, (dice) -> (question, answer), and how often each is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from epicycle.tools import corpus_words as words
from epicycle.tools.corpus_clean import capital, with_article
from epicycle.tools.corpus_stories import PLOTS, draw_character, expand, tell, tidy

Task = Callable[[Random], tuple[str, str]]
PEOPLE = words.GIRLS + words.BOYS


def table(rows: Sequence[tuple[str, str]], questions: Sequence[str], answers: Sequence[str]) -> Task:
    """A task over rows of facts; `$a` is the first cell of a row and `$b` the second."""

    def ask(dice: Random) -> tuple[str, str]:
        first, second = dice.choice(rows)
        cells = {"a": first, "b": second}
        return tidy(expand(dice, dice.choice(questions), cells)), tidy(expand(dice, dice.choice(answers), cells))

    return ask


def ask_sum(dice: Random) -> tuple[str, str]:
    sign, name = dice.choice((("+", "plus"), ("+", "plus"), ("-", "minus"), ("-", "minus"), ("*", "times")))
    top = 12 if sign == "*" else dice.choice((20, 99))
    left, right = dice.randint(0, top), dice.randint(0, top)
    if sign == "-":
        left, right = max(left, right), min(left, right)
    result = {"+": left + right, "-": left - right, "*": left * right}[sign]
    symbols, spoken = f"{left} {sign} {right}", f"{left} {name} {right}"
    question = dice.choice((f"What is {symbols}?", f"What is {spoken}?", f"How much is {spoken}?", f"{symbols} = ?"))
    return question, dice.choice((f"{symbols} = {result}", f"{spoken} is {result}.", f"The answer is {result}."))


def ask_word_problem(dice: Random) -> tuple[str, str]:
    one, other = dice.sample(PEOPLE, 2)
    things = dice.choice(("apples", "coins", "books", "shells", "cookies", "marbles"))
    has, more = dice.randint(2, 20), dice.randint(1, 15)
    boxes, less = dice.randint(2, 9), dice.randint(1, has)
    return dice.choice(
        (
            (
                f"{one} has {has} {things}. {other} gives {one} {more} more. How many {things} does {one} have now?",
                f"{one} has {has} + {more} = {has + more} {things}.",
            ),
            (
                f"{one} has {has} {things} and gives {less} to {other}. How many {things} are left?",
                f"{one} has {has} - {less} = {has - less} {things} left.",
            ),
            (
                f"There are {boxes} boxes with {more} {things} in each box. How many {things} are there?",
                f"There are {boxes} x {more} = {boxes * more} {things}.",
            ),
        )
    )


def ask_compare(dice: Random) -> tuple[str, str]:
    left, right = dice.sample(range(1, 200), 2)
    big, small = max(left, right), min(left, right)
    return dice.choice(
        (
            (f"Which is bigger, {left} or {right}?", f"{big} is bigger than {small}."),
            (f"Which is smaller, {left} or {right}?", f"{small} is smaller than {big}."),
        )
    )


def ask_sort(dice: Random) -> tuple[str, str]:
    if dice.random() < 0.5:
        numbers = dice.sample(range(1, 60), dice.randint(3, 6))
        return f"Sort these numbers: {_listed(numbers)}", _listed(sorted(numbers))
    things = dice.sample(words.CATEGORIES["fruit"] + words.CATEGORIES["tool"], dice.randint(3, 5))
    return f"Put these words in alphabetical order: {_listed(things)}", _listed(sorted(things))


def ask_sequence(dice: Random) -> tuple[str, str]:
    start, step = dice.randint(0, 30), dice.randint(1, 10)
    numbers = [start + step * index for index in range(5)]
    return f"What comes next? {_listed(numbers[:4])}", f"{numbers[4]}. Each number is {step} more than the one before."


def ask_calendar(dice: Random) -> tuple[str, str]:
    names, kind = dice.choice(((words.DAYS, "day"), (words.MONTHS, "month")))
    here = dice.randrange(len(names))
    after, before = names[(here + 1) % len(names)], names[here - 1]
    return dice.choice(
        (
            (f"What {kind} comes after {names[here]}?", f"{after} comes after {names[here]}."),
            (f"What {kind} comes before {names[here]}?", f"{before} comes before {names[here]}."),
        )
    )


def ask_letters(dice: Random) -> tuple[str, str]:
    word = dice.choice(words.CATEGORIES["fruit"] + words.ANIMALS)
    return dice.choice(
        (
            (f"How do you spell {word}?", "-".join(word.upper()) + "."),
            (
                f"How many letters are in the word {word}?",
                f"The word {word} has {words.NUMBER_WORDS[len(word)]} letters.",
            ),
        )
    )


def ask_list(dice: Random) -> tuple[str, str]:
    things = dice.sample(words.CATEGORIES["fruit"] + words.CATEGORIES["vehicle"], dice.randint(3, 5))
    return dice.choice(
        (
            (f"What is the last word in this list? {_listed(things)}", f"The last word is {things[-1]}."),
            (f"What is the first word in this list? {_listed(things)}", f"The first word is {things[0]}."),
            (f"Repeat these words: {' '.join(things)}", " ".join(things)),
        )
    )


def ask_kind(dice: Random) -> tuple[str, str]:
    right, wrong = dice.sample(sorted(words.CATEGORIES), 2)
    members = dice.sample(words.CATEGORIES[right], 3)
    stranger = dice.choice(words.CATEGORIES[wrong])
    mixed = dice.sample([*members, stranger], 4)
    thing, asked = with_article(members[0]), dice.choice((right, wrong))
    verdict = "Yes" if asked == right else "No"
    return dice.choice(
        (
            (f"Is {thing} {with_article(asked)}?", f"{verdict}, {thing} is {with_article(right)}."),
            (
                f"Which word does not belong: {_listed(mixed)}?",
                f"{capital(stranger)} does not belong, because it is {with_article(wrong)}.",
            ),
            (
                f"Name three {words.PLURAL_CATEGORIES[right]}.",
                f"{capital(members[0])}, {members[1]} and {members[2]}.",
            ),
        )
    )


def ask_where(dice: Random) -> tuple[str, str]:
    """People walk, one takes a thing along and may put it down: where is whom, where is the thing?"""
    people, thing = dice.sample(PEOPLE, 3), dice.choice(words.THINGS)
    where: dict[str, str] = {}
    lines: list[str] = []
    for who in people:
        _walk(dice, who, where, lines)
    holder = dice.choice(people)
    lines.append(f"{holder} {dice.choice(('took', 'picked up', 'got'))} the {thing}.")
    for _ in range(dice.randint(1, 3)):
        _walk(dice, dice.choice(people), where, lines)
    thing_place = where[holder]
    if dice.random() < 0.4:
        lines.append(f"{holder} put down the {thing}.")
        _walk(dice, holder, where, lines)
    who = dice.choice(people)
    question, answer = dice.choice(
        (
            (f"Where is {who}?", f"{who} is in {where[who]}."),
            (f"Where is the {thing}?", f"The {thing} is in {thing_place}."),
        )
    )
    return " ".join([*lines, question]), answer


def _walk(dice: Random, who: str, where: dict[str, str], lines: list[str]) -> None:
    where[who] = dice.choice([room for room in words.ROOMS if room != where.get(who)])
    lines.append(f"{who} {dice.choice(('went', 'walked', 'moved', 'ran'))} to {where[who]}.")


def ask_order(dice: Random) -> tuple[str, str]:
    first, second, third = dice.sample(PEOPLE, 3)
    more, most, least = dice.choice((("taller", "tallest", "shortest"), ("older", "oldest", "youngest")))
    told = f"{first} is {more} than {second}. {second} is {more} than {third}."
    return dice.choice(
        (
            (f"{told} Who is the {most}?", f"{first} is the {most}."),
            (f"{told} Who is the {least}?", f"{third} is the {least}."),
        )
    )


def ask_family(dice: Random) -> tuple[str, str]:
    old, child = dice.sample(words.GIRLS, 2)
    parent = dice.choice(words.BOYS)
    return (
        f"{old} is the mother of {parent}. {parent} is the father of {child}. Who is {old} to {child}?",
        f"{old} is the grandmother of {child}.",
    )


def ask_landmark(dice: Random) -> tuple[str, str]:
    landmark, country = dice.choice(words.LANDMARKS)
    city = dict(words.CAPITALS)[country]
    return dice.choice(
        (
            (f"Where is {landmark}?", f"{capital(landmark)} is in {country}."),
            (
                f"What is the capital of the country where {landmark} stands?",
                f"{capital(landmark)} is in {country}, and the capital of {country} is {city}.",
            ),
        )
    )


def ask_how_to(dice: Random) -> tuple[str, str]:
    what, steps = dice.choice(words.HOW_TO)
    numbered = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, start=1))
    spoken = "First, " + " Then, ".join(step[0].lower() + step[1:] for step in steps)
    return dice.choice((f"How do I {what}?", f"Explain how to {what}.")), dice.choice((numbered, spoken))


def ask_small_talk(dice: Random) -> tuple[str, str]:
    question, answer = dice.choice(words.SMALL_TALK)
    return expand(dice, question, {}), expand(dice, answer, {})


def ask_comfort(dice: Random) -> tuple[str, str]:
    mood, answer = dice.choice(words.COMFORT)
    return expand(dice, f"{{I am|I feel}} {{so |very |}}{mood}{{| today}}.", {}), expand(dice, answer, {})


def ask_story(dice: Random) -> tuple[str, str]:
    hero, plot = draw_character(dice), dice.choice(PLOTS)
    known = f"{with_article(hero['kind'])} named {hero['name']}"
    question, story = dice.choice(
        (
            (dice.choice(("Tell me a story.", "Please tell me a bedtime story.")), tell(dice)),
            (f"Tell me a story about {known}.", tell(dice, hero)),
            (f"Write a short story about {plot.topic}.", tell(dice, plot=plot)),
            (f"Tell me a story about {plot.topic} with {hero['name']}.", tell(dice, hero, plot)),
        )
    )
    return question, story.text


def ask_reading(dice: Random) -> tuple[str, str]:
    story = tell(dice)
    question, answer = dice.choice(story.questions)
    return dice.choice((f"{story.text}\n\n{question}", f"{question}\n\n{story.text}")), answer


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


# How often each kind of question is asked, relative to the others.
TASKS: dict[Task, int] = {
    ask_sum: 9, ask_word_problem: 5, ask_compare: 2, ask_sort: 4, ask_sequence: 3, ask_calendar: 4, ask_letters: 2,
    ask_list: 3, ask_kind: 5, ask_where: 7, ask_order: 3, ask_family: 1, ask_landmark: 2, ask_how_to: 4,
    ask_small_talk: 13, ask_comfort: 3, ask_story: 13, ask_reading: 8,
    table(words.OPPOSITES, ("What is the opposite of $a?",), ("The opposite of $a is $b.", "$b.")): 2,
    table(words.PLURALS, ("What is the plural of $a?",), ("The plural of $a is $b.",)): 1,
    table(words.PASTS, ("What is the past tense of $a?",), ("The past tense of $a is $b.",)): 1,
    table(words.RHYMES, ("What rhymes with $a?",), ("$b rhymes with $a.",)): 1,
    table(words.COLOR_FACTS, ("What color is $a?",), ("$a is $b.",)): 1,
    table(words.SOUNDS, ("What sound does a $a make?",), ("A $a says $b.",)): 1,
    table(words.YOUNG, ("What is a baby $a called?", "What do you call a young $a?"), ("A baby $a is called $b.",)): 1,
    table(words.HOMES, ("Where does a $a live?",), ("A $a lives in $b.",)): 1,
    table(words.MEALS, ("What does a $a eat?",), ("A $a eats $b.",)): 1,
    table(words.CAPITALS, ("What is the capital of $a?", "Which city is the capital of $a?"),
          ("The capital of $a is $b.", "$b is the capital of $a.")): 5,
    table(words.WHY, ("$a",), ("$b",)): 6,
}  # fmt: skip
