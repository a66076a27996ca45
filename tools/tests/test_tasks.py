"""Tests of the demo's tasks: their edits are right, the embedded model makes them, `is_right` rejects wrong results."""

from __future__ import annotations

import ast
import re
from types import SimpleNamespace

import pytest

from specdec_core import LLM, SamplingParams
from specdec_tools.tasks import TASKS

GREEDY = SamplingParams(temperature=0, max_tokens=256)
RENAME = TASKS[0]


@pytest.fixture(scope="module")
def results():
    """The embedded model's greedy completion of each task, {title of the task: text}."""
    with LLM("tiny", dtype="float32") as llm:
        outputs = llm.generate([task.prompt for task in TASKS], GREEDY, use_tqdm=False)
    return {task.title: output.outputs[0].text for task, output in zip(TASKS, outputs, strict=True)}


def call(code, name, *arguments, **names):
    names = dict(names)
    exec(code, names)
    return names[name](*arguments)


def check_shortest_name(code):
    people = [SimpleNamespace(name=name) for name in ("Anna", "Bo", "Al", "")]
    assert call(code, "shortest_name", people) == "Bo"
    assert call(code, "shortest_name", people, 3) == "Anna"
    assert call(code, "shortest_name", []) is None


def check_read_temperatures(code, folder):
    (folder / "temperatures").write_text("20.5\n-3\n\n")
    assert call(code, "read_temperatures", folder / "temperatures") == [20.5, -3.0]
    assert call(code, "read_temperatures", folder / "temperatures", 2) == [41.0, -6.0]


def check_load_inventory(code, folder):
    (folder / "inventory").write_text("green tea 3\nrice 1\nrice 2\n")
    assert call(code, "load_inventory", folder / "inventory") == {"green tea": 3, "rice": 2}


def check_shop(code):
    shops = [call(code, "Shop", "Teas"), call(code, "Shop", "Teas", (8, 12))]
    assert [[shop.is_open(hour) for hour in (8, 9, 12, 17)] for shop in shops] == [
        [False, True, True, False],
        [True, True, False, False],
    ]
    assert [shop.count_visits([8, 9, 9, 16]) for shop in shops] == [3, 3]


@pytest.mark.parametrize("of", ["code", "edited", "result"])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.title)
def test_the_code_works_before_and_after(task, of, results, tmp_path):
    code = results[task.title] if of == "result" else getattr(task, of)
    match ast.parse(code).body[0].name:
        case "shortest_name":
            check_shortest_name(code)
        case "read_temperatures":
            check_read_temperatures(code, tmp_path)
        case "load_inventory":
            check_load_inventory(code, tmp_path)
        case "Shop":
            check_shop(code)
        case name:
            pytest.fail(f"{name} has no check")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.title)
def test_the_embedded_model_is_right(task, results):
    assert task.is_right(results[task.title])


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.title)
def test_the_edit_is_the_one_of_the_instruction(task):
    before, after = (set(re.findall(r"\w+", code)) for code in (task.code, task.edited))
    if renamed := re.fullmatch(r"rename `(\w+)` to `(\w+)`", task.instruction):
        old, new = renamed.groups()
        assert (before - after, after - before) == ({old}, {new})
        assert task.code.count(old) >= 2
    elif task.instruction == "remove the comments":
        assert "#" in task.code
        assert "#" not in task.edited
        assert ast.dump(ast.parse(task.code)) == ast.dump(ast.parse(task.edited))
    else:
        assert task.instruction == "repeat the code unchanged"
        assert task.code == task.edited


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.title)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda task: task.edited[:-20],
        lambda task: task.edited + "x = 1\n",
        lambda task: task.edited + "# a comment\n",
        lambda task: task.edited.replace("for", "for for", 1),
        lambda task: task.edited.replace("return", "", 1),
        lambda task: "",
        lambda task: "\0",
        lambda task: "a" + ".b" * 20_000,
        lambda task: "-" * 7000,
        lambda task: "x = 1is 2",
    ],
    ids=["cut", "longer", "comment", "no Python", "other code", "empty", "null byte", "deep", "signs", "odd literal"],
)
def test_wrong_results_are_found(task, spoil):
    assert not task.is_right(spoil(task))


def test_an_edit_that_is_not_made_or_made_by_half_is_wrong():
    assert not RENAME.is_right(RENAME.code)
    assert not RENAME.is_right(RENAME.code.replace("result", "group", 2))


def test_layout_does_not_count():
    assert RENAME.is_right("\n" + RENAME.edited.replace(" = ", "  =  ") + "\n\n")
