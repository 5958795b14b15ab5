"""The corpus scripts: generated answers are right, filters filter, and package formats are read."""

from __future__ import annotations

import re
import struct
import zlib
from random import Random

import pytest

from epicycle.tools import corpus_words as words
from epicycle.tools.corpus_clean import (
    group_paragraphs,
    is_private,
    is_unwanted,
    mend_chat_spelling,
    plain_ascii,
    without_duplicates,
)
from epicycle.tools.corpus_prepare import share_rows
from epicycle.tools.corpus_sources import SOURCES, Country, Meaning, r_strings, yaml_conversations
from epicycle.tools.corpus_stories import PLOTS, Plot, tell
from epicycle.tools.corpus_synth import make_piece
from epicycle.tools.corpus_tasks import TASKS, ask_kind, ask_sort, ask_sum, ask_where

SEEDS = range(60)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.topic)
def test_every_name_and_choice_of_a_plot_is_resolved(plot: Plot) -> None:
    for seed in SEEDS:
        story = tell(Random(seed), plot=plot)
        text = story.text + "".join(question + answer for question, answer in story.questions)
        assert [] == re.findall(r"[${}|]|\ba [aeiou]|(?<=[.!?] )[a-z]", text)


def test_a_story_is_about_the_hero_that_was_asked_for() -> None:
    hero = {"name": "Zed", "kind": "cat", "he": "she", "him": "her", "his": "her"}
    assert all("Zed" in tell(Random(seed), hero).text for seed in SEEDS)


def test_sums_are_right() -> None:
    names = {"plus": "+", "minus": "-", "times": "*"}
    for seed in SEEDS:
        question, answer = ask_sum(Random(seed))
        left, sign, right = re.search(r"(\d+) (\S+) (\d+)", question).groups()  # type: ignore[union-attr]
        value = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
        assert str(value[names.get(sign, sign)]) == re.findall(r"\d+", answer)[-1]


def test_sorted_lists_are_sorted() -> None:
    for seed in SEEDS:
        question, answer = ask_sort(Random(seed))
        items = question.split(": ")[1].split(", ")
        expected = sorted(items, key=int) if items[0].isdigit() else sorted(items)
        assert ", ".join(expected) == answer


def test_kinds_of_things_are_judged_by_the_table() -> None:
    kind_of = {member: kind for kind, members in words.CATEGORIES.items() for member in members}
    asked = 0
    for seed in SEEDS:
        question, answer = ask_kind(Random(seed))
        if found := re.fullmatch(r"Is an? (\w+) an? (\w+)\?", question):
            asked += 1
            assert (kind_of[found[1]] == found[2]) == answer.startswith("Yes")
    assert asked > 0


def test_where_a_person_is_follows_from_the_last_walk() -> None:
    asked = 0
    for seed in SEEDS:
        question, answer = ask_where(Random(seed))
        if found := re.search(r"Where is ([A-Z]\w+)\?$", question):
            asked += 1
            last = re.findall(rf"{found[1]} (?:went|walked|moved|ran) to ([a-z ]+)\.", question)[-1]
            assert f"{found[1]} is in {last}." == answer
    assert asked > 0


def test_every_task_asks_and_answers() -> None:
    for task in TASKS:
        question, answer = task(Random(1))
        assert [] == re.findall(r"[${}|]", question + answer)
        assert "" not in (question, answer)


def test_the_same_seed_makes_the_same_text() -> None:
    facts = [Meaning("run", "v", "move fast", "the dog ran")], [Country("Peru", "Lima", "the west", "Spanish", "")]
    first, again, other = (make_piece("chat", 5000, *facts, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_meaning_becomes_a_sentence() -> None:
    assert "Run is a verb. It means: to move fast. For example: The dog ran." == (
        Meaning("run", "v", "move fast", "the dog ran").answer()
    )


@pytest.mark.parametrize(
    "text", ["see www.example.net", "my number is 555-1234", "mail me at a@b", "my last name is X"]
)
def test_private_text_is_found(text: str) -> None:
    assert is_private(text)


def test_whole_words_and_stems_are_unwanted_but_not_their_look_alikes() -> None:
    assert [True, True, False, False] == [
        is_unwanted(text) for text in ("what the SHITTY weather", "drugs", "a jewel of grapes", "Essex cockpit")
    ]


def test_chat_spelling_is_mended() -> None:
    assert "I dooh I'm sure you don't see" == mend_chat_spelling("i dooooh im sure u dont see")


def test_text_becomes_plain_ascii() -> None:
    assert 'cafe - "so..."' == plain_ascii("café—“so…”")


def test_paragraphs_are_grouped_and_a_short_rest_is_dropped() -> None:
    assert ["a" * 900, "b" * 1000 + "\n\n" + "c" * 400] == group_paragraphs(
        ["a" * 900, "b" * 1000, "c" * 400, "d" * 2100, "e" * 10], high=1500
    )[:2]
    assert [] == group_paragraphs(["too short"])


def test_duplicates_ignore_case_and_punctuation() -> None:
    assert ["One, two.", "three"] == without_duplicates(["One, two.", "one two", "three"])


def test_strings_are_read_out_of_an_r_database() -> None:
    lines = ["TITLE", "", "It is a truth"]
    cells = b"".join(struct.pack(">ii", 9, len(line)) + line.encode() for line in lines)
    item = b"X\n" + struct.pack(">iii", 2, 0, 0) + struct.pack(">ii", 16, len(lines)) + cells
    not_strings = b"X\n" + struct.pack(">iii", 2, 0, 0) + struct.pack(">ii", 13, 0)
    database = b"".join(struct.pack(">i", len(part)) + zlib.compress(part) for part in (not_strings, item))
    assert [lines] == list(r_strings(database))


def test_conversations_are_read_out_of_a_topic_file() -> None:
    text = "categories:\n- x\nconversations:\n- - 'Don''t?'\n  - A long\n    answer\n- - Next\n  - Yes\n"
    assert [["Don't?", "A long answer"], ["Next", "Yes"]] == yaml_conversations(text)


def test_rows_are_shared_by_largest_remainder() -> None:
    assert {"a": 5, "b": 3, "c": 2} == share_rows({"a": 0.46, "b": 0.33, "c": 0.21}, 10)


def test_the_shares_of_all_sources_sum_to_one() -> None:
    assert 1.0 == round(sum(source.mix for source in SOURCES.values()), 9)
