from pathlib import Path

import pytest

from specmill.samples import write_samples
from specmill.show import main, marked_text
from tests.fakes import sample


class Letters:
    """A tokenizer whose ids are letters."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(chr(96 + number) for number in ids)


def test_trained_text_stands_between_marks() -> None:
    assert marked_text(sample([1, 2], [3, 4, 5]), Letters(), "<", ">") == "ab<cde>"


def test_showing_a_sample_prints_its_text_and_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specmill.show.load_tokenizer", lambda _: Letters())
    write_samples(tmp_path / "data/prepared/heldout.parquet", [sample([1], [2]), sample([3], [4])])
    main(["show", "1", "--split", "heldout"])
    shown = capsys.readouterr().out
    assert "c>>>d<<<" in shown
    assert "2 tokens, 1 of them trained" in shown
    with pytest.raises(SystemExit, match="has samples 0 to 1, there is no 2"):
        main(["show", "2", "--split", "heldout"])
    with pytest.raises(SystemExit, match="dvc repro prepare"):
        main(["show", "0"])
