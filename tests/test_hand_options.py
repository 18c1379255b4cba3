"""decisions.yaml: options and gates written by hand."""

from pathlib import Path

import pytest

from specmill.hand_options import Decisions, HandOption, read_decisions, with_hand
from specmill.options import Option
from tests.workspace import ROOT

COMPUTED = Option("eagle3, K=3", "eagle3", 3, "ruled out", ["slow"], "computed", "measured")


def written(folder: Path, text: str) -> Path:
    path = folder / "decisions.yaml"
    path.write_text(text)
    return path


def test_options_and_gates_are_read(tmp_path: Path) -> None:
    found = read_decisions(
        written(
            tmp_path,
            """
            options:
              - {name: the vendor's head, reason: never served here, gate: it is published}
              - {name: bigger machine, reason: too dear, gate: null, status: ruled out}
            gates: {"eagle3, K=3": the all-reduce is quicker}
            """,
        )
    )
    assert found.options[0] == HandOption(
        name="the vendor's head", reason="never served here", gate="it is published"
    )
    assert [option.status for option in found.options] == ["pending", "ruled out"]
    assert found.gates == {"eagle3, K=3": "the all-reduce is quicker"}


def test_no_file_and_an_empty_one_are_no_options(tmp_path: Path) -> None:
    assert read_decisions(tmp_path / "decisions.yaml") == Decisions()
    assert read_decisions(written(tmp_path, "# nothing yet\n")) == Decisions()
    assert read_decisions(ROOT / "decisions.yaml") == Decisions()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("options: [{name: a, reason: b}]", r"options\.0\.gate: Field required"),
        ("options: [{name: a, reason: b, gate: c, staus: pending}]", r"options\.0\.staus: Extra"),
        ("options: [{name: a, reason: b, gate: c, status: adopt}]", r"options\.0\.status: Input"),
        ("options: [{name: 'a | b', reason: b, gate: c}]", r"options\.0\.name: String should"),
        ('options: [{name: "a\\nb", reason: b, gate: c}]', r"options\.0\.name: String should"),
        ("options: [{name: '  ', reason: b, gate: c}]", r"options\.0\.name: String should"),
        ("gates: {a: null}", r"gates\.a: Input should be a valid string"),
        ("option: []", "option: Extra inputs"),
        ("[]", "decisions: Input should be a valid dictionary"),
        ("options: [{name: a, reason: b, gate: c}, {name: a, reason: d, gate: e}]",
         "decisions: options has 'a' twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_by_file_and_key(tmp_path: Path, text: str, named: str) -> None:
    if text == "[]":
        text = "- a"
    with pytest.raises(ValueError, match=rf"decisions\.yaml is not valid:\n  {named}"):
        read_decisions(written(tmp_path, text))


def test_what_is_no_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"decisions\.yaml is not YAML"):
        read_decisions(written(tmp_path, "options: ["))


def test_options_by_hand_stand_beside_the_computed_ones_and_gates_replace_theirs() -> None:
    found = with_hand(
        [COMPUTED],
        Decisions(
            options=[
                HandOption(name="theirs", reason="never served", gate="it is", status="pending")
            ],
            gates={"eagle3, K=3": "a faster link", "theirs": "its licence allows it"},
        ),
    )
    assert [(one.name, one.status, one.gate, one.by) for one in found] == [
        ("eagle3, K=3", "ruled out", "a faster link", "measured"),
        ("theirs", "pending", "its licence allows it", "hand"),
    ]
    assert found[1].evidence == ["never served"]


def test_a_gate_for_an_option_that_is_not_there_is_kept_as_one() -> None:
    (computed, kept) = with_hand([COMPUTED], Decisions(gates={"medusa, K=1": "heads are trained"}))
    assert computed == COMPUTED
    assert (kept.name, kept.status, kept.gate, kept.by) == (
        "medusa, K=1", "pending", "heads are trained", "hand",
    )  # fmt: skip


def test_an_option_by_hand_cannot_take_the_name_of_a_computed_one() -> None:
    mine = HandOption(name="eagle3, K=3", reason="a", gate=None)
    with pytest.raises(ValueError, match=r"options has 'eagle3, K=3', which is computed"):
        with_hand([COMPUTED], Decisions(options=[mine]))
