import subprocess
from pathlib import Path

import pytest

from specmill.params_file import load_params
from specmill.profile import use_profile

ROOT = Path(__file__).parents[1]


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """params.yaml, committed in a repository of its own, which is the working directory."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    path = Path("params.yaml")
    path.write_bytes((ROOT / "params.yaml").read_bytes())
    git("init", "--quiet")
    commit()
    return path


def git(*words: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(["git", *identity, *words], check=True)


def commit() -> None:
    git("add", "params.yaml")
    git("commit", "--quiet", "-m", "params")


@pytest.fixture
def profile(params: Path) -> Path:
    """Another valid file; nothing says so but its first line."""
    path = Path("profile.yaml")
    path.write_text("# the profile\n" + params.read_text())
    load_params(path)
    return path


def test_a_profile_takes_the_place_of_committed_params(params: Path, profile: Path) -> None:
    use_profile(profile, params)
    assert params.read_text().startswith("# the profile\n")
    assert params.read_bytes() == profile.read_bytes()


def test_params_with_uncommitted_changes_are_not_overwritten(params: Path, profile: Path) -> None:
    mine = params.read_text() + "# mine\n"
    params.write_text(mine)
    with pytest.raises(
        ValueError, match=r"params\.yaml has changes that are not committed and that profile\.yaml"
    ):
        use_profile(profile, params)
    assert params.read_text() == mine
    commit()
    use_profile(profile, params)
    assert params.read_bytes() == profile.read_bytes()


def test_staged_changes_are_not_committed_ones(params: Path, profile: Path) -> None:
    params.write_text(params.read_text() + "# mine\n")
    git("add", "params.yaml")
    with pytest.raises(ValueError, match="not committed"):
        use_profile(profile, params)
    assert params.read_text().endswith("# mine\n")


def test_a_params_file_that_git_does_not_know_is_not_overwritten(
    params: Path, profile: Path
) -> None:
    git("rm", "--quiet", "--cached", "params.yaml")
    git("commit", "--quiet", "-m", "untracked")
    with pytest.raises(ValueError, match="not committed"):
        use_profile(profile, params)


def test_a_profile_in_place_can_be_used_again(params: Path, profile: Path) -> None:
    use_profile(profile, params)
    use_profile(profile, params)  # uncommitted, but nothing would be lost
    assert params.read_bytes() == profile.read_bytes()


def test_an_invalid_profile_changes_nothing(params: Path, profile: Path) -> None:
    before = params.read_bytes()
    profile.write_text("spec: {tokens: abc}\n")
    with pytest.raises(ValueError, match=r"profile\.yaml is not valid"):
        use_profile(profile, params)
    assert params.read_bytes() == before


def test_a_profile_is_used_where_no_params_are(params: Path, profile: Path) -> None:
    git("rm", "--quiet", "params.yaml")
    git("commit", "--quiet", "-m", "gone")
    use_profile(profile, params)
    assert params.read_bytes() == profile.read_bytes()


def test_outside_a_repository_nothing_is_overwritten(
    params: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    mine = (params.read_text() + "# mine\n").encode()
    (outside / "params.yaml").write_bytes(mine)
    (outside / "profile.yaml").write_bytes(profile.read_bytes())
    monkeypatch.chdir(outside)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(ValueError, match="git cannot tell"):
        use_profile(Path("profile.yaml"), Path("params.yaml"))
    assert Path("params.yaml").read_bytes() == mine
