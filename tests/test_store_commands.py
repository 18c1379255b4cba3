import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from specmill import paths
from specmill.files import digest
from specmill.manifest import MANIFEST, Manifest, write_manifest
from specmill.samples import write_samples
from specmill.shards import StateSpec
from specmill.store import INDEX, HiddenStateStore
from specmill.store_commands import main
from tests.fakes import sample
from tests.stored import BF16, FP8, add, expected, flip, sample_key, shards
from tests.workspace import ROOT

A, B, C, D = ([number, number + 1] for number in (10, 20, 30, 40))
VIEW = paths.HIDDEN_STATES


@dataclass
class Ran:
    """How a command ended."""

    status: int
    out: str
    error: str


Command = Callable[..., Ran]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Run a command where the repository is an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "STORE", Path(".cache/hidden_states"))

    def command(*words: str | Path) -> Ran:
        monkeypatch.setattr(sys, "argv", ["store", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        # a text is an error, which Python prints when it ends
        code = ended.value.code
        return (
            Ran(code, said.out, said.err) if isinstance(code, int) else Ran(1, said.out, str(code))
        )

    return command


@pytest.fixture
def store(run: Command) -> HiddenStateStore:
    """A store with shards of A and B, of C, and of A in fp8; the view is A, B and C."""
    made = HiddenStateStore(paths.STORE)
    add(made, BF16, [A, B])
    add(made, BF16, [C])
    add(made, FP8, [A])
    made.write_view(VIEW, BF16, [sample_key(ids) for ids in (A, B, C)], 10**6)
    return made


# words


def program(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the program as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "specmill.store", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "DVC_ROOT": "."},
        capture_output=True,
        text=True,
    )


def test_the_program_and_every_command_explain_themselves(run: Command) -> None:
    done = program("--help")
    assert done.returncode == 0
    assert "usage: python -m specmill.store" in done.stdout
    for name in ("ls", "stats", "verify", "compact", "gc", "add", "pull"):
        assert f"\n    {name} " in done.stdout
        said = run(name, "--help")
        assert said.status == 0
        assert said.out.startswith(f"usage: python -m specmill.store {name} [-h]")
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"    {name} "))
        assert line.split(maxsplit=1)[1] in " ".join(said.out.split())


@pytest.mark.parametrize(
    "words",
    [
        "",
        "list",
        "ls extra",
        "ls --all",
        "stats data",
        "verify one two",
        "compact --shard-mib 0",
        "compact --shard-mib -5",
        "compact --shard-mib half",
        "gc --keep",
        "gc --no",
        "add one two",
        "pull",
        "pull --samples",
        "pull --samples 0",
        "pull --samples -1",
        "pull --samples many",
    ],
)
def test_a_wrong_command_ends_with_2(run: Command, words: str) -> None:
    ran = run(*words.split())
    assert ran.status == 2
    assert "usage: python -m specmill.store" in ran.error


@pytest.mark.parametrize("words", ["ls", "stats", "verify", "compact --shard-mib 1", "gc --yes"])
def test_a_store_that_is_not_there_is_an_error_and_is_not_made(run: Command, words: str) -> None:
    ran = run(*words.split())
    assert ran.status == 1
    assert "there is no store at .cache/hidden_states" in ran.error
    assert not paths.STORE.exists()


def test_looking_at_a_store_and_a_view_needs_no_torch(store: HiddenStateStore) -> None:
    blocked = ["torch", "safetensors", "vllm", "transformers", "datasets"]
    looks = ["ls", "ls --samples", "stats", "verify", "verify data/hidden_states"]
    # one process for all of them
    code = f"""
import sys
sys.modules.update(dict.fromkeys({blocked}))
from specmill.store_commands import main
for words in {looks}:
    sys.argv = ["store", *words.split()]
    try:
        main()
    except SystemExit as ended:
        print("ended", ended.code)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT), "DVC_ROOT": "."},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert ends == ["ended 0"] * len(looks)


# ls, stats


def test_ls_has_a_line_for_each_verifier_layer_set_and_dtype(
    run: Command, store: HiddenStateStore
) -> None:
    header, *lines = (line.split() for line in run("ls").out.splitlines())
    assert header == ["verifier", "layers", "dtype", "samples", "tokens", "GB"]
    assert lines == [
        ["fingerprint", "2,4", "bfloat16", "3", "6", "0.000"],
        ["fingerprint", "2,4", "float8_e4m3fn", "1", "2", "0.000"],
    ]


def test_ls_samples_lists_equal_lines_for_equal_stores(
    run: Command, store: HiddenStateStore
) -> None:
    other = HiddenStateStore(Path("other"))
    for spec, samples in ((FP8, [A]), (BF16, [C, B]), (BF16, [A])):
        add(other, spec, samples)
    ran = run("ls", "--samples")
    assert ran.out == run("--store", "other", "ls", "--samples").out
    contents = expected(BF16, [A, B, C]) | expected(FP8, [A])
    assert {tuple(line.split()[:3]) for line in ran.out.splitlines()} == {
        (key, checksum, "2") for key, checksum in contents.items()
    }
    assert {line.split()[3] for line in ran.out.splitlines()} == {
        sample_key(ids) for ids in (A, B, C)
    }


def figures(said: str) -> dict[str, str]:
    """What `stats` says, by the words before it."""
    return dict(line.split("  ", 1) for line in said.replace("   ", "  ").splitlines())


def test_stats_counts_shards_bytes_samples_and_tokens(
    run: Command, store: HiddenStateStore
) -> None:
    add(store, BF16, [A, C])
    (store.folder / next(iter(store.shards))).unlink()  # A and B
    sizes = [(store.folder / name).stat().st_size for name in shards(store.folder)]
    in_view = (store.folder / list(store.shards)[1]).stat().st_size
    said = {key.strip(): value.strip() for key, value in figures(run("stats").out).items()}
    assert said["shards"] == "3 (1 missing)"
    assert said["bytes"] == f"{sum(sizes):,}"
    assert said["samples"] == "3 (6 with copies)"
    assert said["tokens"] == "6"
    assert said["bytes a token"] == f"{sum(sizes) / 6:,.1f}, without headers 20.0"
    assert said["in data/hidden_states"] == f"{100 * in_view / sum(sizes):.1f}% of the bytes"
    contents = expected(BF16, [A, C]) | expected(FP8, [A])
    assert said["content digest"] == digest(contents)


def test_stats_of_an_empty_store_are_zeros(run: Command) -> None:
    paths.STORE.mkdir(parents=True)
    ran = run("stats")
    assert ran.status == 0
    assert "tokens          0\n" in ran.out


@pytest.mark.parametrize(
    ("dtype", "formula"), [("bfloat16", 4 * 576 * 2 + 4), ("float8_e4m3fn", 4 * 576 + 4 * 4 + 4)]
)
def test_bytes_a_token_are_within_a_hundredth_of_layers_by_width_by_bytes(
    run: Command, dtype: str, formula: int
) -> None:
    spec = StateSpec("fingerprint", (2, 15, 27, 30), hidden_size=576, dtype=dtype)
    noise = random.Random(3)
    add(
        HiddenStateStore(paths.STORE),
        spec,
        [[noise.randrange(49_152) for _ in range(noise.randint(40, 120))] for _ in range(20)],
    )
    (line,) = (line for line in run("stats").out.splitlines() if line.startswith("bytes a token"))
    measured, stated = (float(text.replace(",", "")) for text in line.split()[3::3])
    assert stated == formula
    assert formula < measured < 1.01 * formula


# verify


def data_of(store: HiddenStateStore, ids: list[int]) -> tuple[Path, int]:
    (found,) = store.pieces(BF16, [sample_key(ids)])
    return found.file, found.offset


@pytest.mark.parametrize("words", [["verify"], ["verify", VIEW]])
def test_verify_ends_with_0_when_every_byte_is_as_it_was_written(
    run: Command, store: HiddenStateStore, words: list[str | Path]
) -> None:
    ran = run(*words)
    assert (ran.status, ran.out) == (0, "every byte is as it was written (0.000 GB)\n")


def lost(said: str) -> list[str]:
    """The samples that verify says are lost."""
    return [line.split()[2] for line in said.splitlines() if line.startswith("lost: sample ")]


@pytest.mark.parametrize("words", [["verify"], ["verify", VIEW]])
def test_verify_names_the_sample_of_a_flipped_bit_and_ends_with_1(
    run: Command, store: HiddenStateStore, words: list[str | Path]
) -> None:
    file, offset = data_of(store, B)
    flip(VIEW / file.name, offset + 39)  # through the view's link
    os.utime(file, (0, 0))
    ran = run(*words)
    assert ran.status == 1
    assert (
        f"samples: {(Path(words[-1]) if len(words) > 1 else paths.STORE) / file.name}\n" in ran.out
    )
    assert lost(ran.out) == [sample_key(B)]
    assert "1 damaged, 1 samples lost" in ran.out
    assert file.stat().st_mtime > 0  # so that DVC looks at it again
    store.drop_damaged(BF16, store.places[BF16])
    assert store.contents() == expected(BF16, [A, C]) | expected(FP8, [A])


@pytest.mark.parametrize("words", [["verify"], ["verify", VIEW]])
@pytest.mark.parametrize("at", [0, 9, 300, "padding"])
def test_verify_finds_a_damaged_header_which_loses_no_sample(
    run: Command, store: HiddenStateStore, words: list[str | Path], at: int | str
) -> None:
    file, offset = data_of(store, A)
    flip(file, at if isinstance(at, int) else offset - 1)
    ran = run(*words)
    assert ran.status == 1
    assert "header: " in ran.out
    assert lost(ran.out) == []


@pytest.mark.parametrize("words", [["verify"], ["verify", VIEW]])
def test_verify_tells_what_a_cut_and_what_a_lengthened_shard_lose(
    run: Command, store: HiddenStateStore, words: list[str | Path]
) -> None:
    file, offset = data_of(store, B)
    size = file.stat().st_size
    file.chmod(0o644)
    os.truncate(file, size + 1)
    assert (run(*words).status, lost(run(*words).out)) == (1, [])
    os.truncate(file, offset)
    assert (run(*words).status, lost(run(*words).out)) == (1, [sample_key(B)])
    os.truncate(file, 0)
    assert (run(*words).status, lost(run(*words).out)) == (1, [sample_key(A), sample_key(B)])


@pytest.mark.parametrize("words", [["verify"], ["verify", VIEW]])
def test_verify_finds_a_missing_shard(
    run: Command, store: HiddenStateStore, words: list[str | Path]
) -> None:
    file, _ = data_of(store, A)
    (VIEW / file.name if len(words) > 1 else file).unlink()
    ran = run(*words)
    assert ran.status == 1
    assert "missing: " in ran.out
    assert lost(ran.out) == [sample_key(A), sample_key(B)]


def test_verify_names_samples_of_any_spec_and_files_that_are_no_shards(
    run: Command, store: HiddenStateStore
) -> None:
    (found,) = store.pieces(FP8, [sample_key(A)])
    flip(found.file, -1)
    (store.folder / "x.safetensors").write_bytes(b"hello")
    ran = run("verify")
    assert ran.status == 1
    assert lost(ran.out) == [sample_key(A)]
    assert "no shard: .cache/hidden_states/x.safetensors" in ran.out
    assert "2 damaged, 1 samples lost" in ran.out


def test_verify_of_a_view_finds_damage_to_samples_it_does_not_use(
    run: Command, store: HiddenStateStore
) -> None:
    store.write_view(VIEW, BF16, [sample_key(A)], 10**6)
    file, offset = data_of(store, B)
    flip(VIEW / file.name, offset)
    ran = run("verify", VIEW)
    assert (ran.status, lost(ran.out)) == (1, [])


@pytest.mark.parametrize("field", [0, 1, 2])
def test_verify_of_a_view_finds_a_manifest_that_does_not_fit_its_shards(
    run: Command, store: HiddenStateStore, field: int
) -> None:
    row = Manifest(VIEW).places[sample_key(C)].row
    old = [f'"{row.sample_key}",2', f'"{row.sample_key}",2', f'"{row.checksum}"'][field]
    new = [f'"{sample_key(D)}",2', f'"{row.sample_key}",1', f'"{64 * "0"}"'][field]
    text = (VIEW / MANIFEST).read_text()
    assert text.count(old) == 1
    (VIEW / MANIFEST).write_text(text.replace(old, new))
    ran = run("verify", VIEW)
    assert ran.status == 1
    assert lost(ran.out) == [sample_key(D if field == 0 else C)]


def test_verify_of_a_folder_that_is_no_view_is_an_error(run: Command) -> None:
    ran = run("verify", "nowhere")
    assert ran.status == 1
    assert "nowhere/manifest.json is missing" in ran.error


# compact, gc


def test_compact_keeps_contents_in_fewer_shards(run: Command, store: HiddenStateStore) -> None:
    contents = store.contents()
    ran = run("compact", "--shard-mib", "1")
    assert (ran.status, ran.out) == (0, "3 shards before, 2 now\n")
    assert HiddenStateStore(paths.STORE).contents() == contents


def test_compact_takes_the_size_of_a_shard_from_params(
    run: Command, store: HiddenStateStore
) -> None:
    shutil.copy(ROOT / "params.yaml", "params.yaml")
    assert run("compact").out == "3 shards before, 2 now\n"


def test_gc_lists_what_no_view_needs_and_deletes_it_with_yes(
    run: Command, store: HiddenStateStore
) -> None:
    unneeded = list(store.shards)[2]  # A in fp8
    (store.folder / "x.safetensors").write_bytes(b"hello")
    killed = store.folder / f".{32 * '0'}.tmp"
    killed.write_bytes(b"half a shard")
    before = shards(store.folder)
    ran = run("gc")
    assert ran.status == 0
    assert f"{unneeded} (1 samples)\nx.safetensors (0 samples)\n{killed.name} (0" in ran.out
    assert "3 shards, 0.000 GB would go with --yes" in ran.out
    assert (shards(store.folder), killed.exists()) == (before, True)

    assert "3 shards, 0.000 GB deleted" in run("gc", "--yes").out
    assert set(before) - set(shards(store.folder)) == {unneeded, "x.safetensors"}
    assert not killed.exists()
    left = HiddenStateStore(paths.STORE)
    assert left.contents() == expected(BF16, [A, B, C])
    assert (left.check(left.shards), left.unreadable) == ([], [])
    assert "0 shards, 0.000 GB would go" in run("gc").out


def test_gc_keeps_what_any_of_several_views_needs(run: Command, store: HiddenStateStore) -> None:
    store.write_view(Path("fp8"), FP8, [sample_key(A)], 10**6)
    assert "0 shards" in run("gc", "--keep", VIEW, "fp8").out
    assert run("gc", "--yes", "--keep", "fp8").status == 0
    assert HiddenStateStore(paths.STORE).contents() == expected(FP8, [A])


def test_gc_keeps_the_states_of_bench_answers_without_being_told(
    run: Command, store: HiddenStateStore
) -> None:
    assert "1 shards" in run("gc").out
    store.write_view(paths.BENCH_STATES, FP8, [sample_key(A)], 10**6)
    assert "0 shards" in run("gc").out


@pytest.mark.parametrize("words", [[], ["--keep", "nowhere"], ["--keep", "whole", "nowhere"]])
def test_gc_deletes_nothing_when_a_view_is_not_there(
    run: Command, store: HiddenStateStore, words: list[str]
) -> None:
    VIEW.rename("whole")
    before = shards(store.folder)
    ran = run("gc", "--yes", *words)
    assert ran.status == 1
    assert "manifest.json is missing" in ran.error
    assert shards(store.folder) == before


def test_gc_deletes_nothing_for_a_view_that_is_online(
    run: Command, store: HiddenStateStore
) -> None:
    write_manifest(VIEW, BF16, [], online=True)
    before = shards(store.folder)
    ran = run("gc", "--yes")
    assert ran.status == 1
    assert "data/hidden_states needs no shard at all" in ran.error
    assert shards(store.folder) == before


def test_gc_after_compaction_keeps_the_samples_of_the_view(
    run: Command, store: HiddenStateStore
) -> None:
    run("compact", "--shard-mib", "1")
    assert run("gc", "--yes").status == 0
    assert HiddenStateStore(paths.STORE).contents() == expected(BF16, [A, B, C])


# add, pull


def test_add_takes_a_pulled_view_into_a_store(run: Command, store: HiddenStateStore) -> None:
    ran = run("--store", "new/store", "add")
    assert (ran.status, ran.out) == (0, "2 shards of data/hidden_states are in the store now\n")
    taken = HiddenStateStore(Path("new/store"))
    assert taken.contents() == expected(BF16, [A, B, C])
    assert taken.check(taken.shards) == []
    assert (Path("new/store") / INDEX).is_file()
    assert "0 shards" in run("--store", "new/store", "add", VIEW).out


def test_add_brings_back_shards_that_the_store_has_lost(
    run: Command, store: HiddenStateStore
) -> None:
    for name in list(store.shards)[:2]:
        (store.folder / name).unlink()
    assert "2 shards" in run("add").out
    assert HiddenStateStore(paths.STORE).contents() == store.contents()
    assert run("verify").status == 0


def test_add_replaces_what_is_damaged_in_the_store_and_verify_says_so(
    run: Command, store: HiddenStateStore
) -> None:
    contents = store.contents()
    for name in list(store.shards)[:2]:  # copies of their own, as DVC makes by default
        content = (VIEW / name).read_bytes()
        (VIEW / name).unlink()
        (VIEW / name).write_bytes(content)
    file, offset = data_of(store, B)
    flip(store.folder / file.name, offset)
    found = run("verify")
    assert found.status == 1
    assert "data/hidden_states has them: `python -m specmill.store add`" in found.out
    assert "1 shards" in run("add").out
    assert run("verify").status == 0
    assert HiddenStateStore(paths.STORE).contents() == contents


def test_add_takes_copies_across_file_systems(
    run: Command, store: HiddenStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert run("--store", "new", "add").status == 0
    assert run("--store", "new", "verify").status == 0
    assert not any((Path("new") / name).samefile(VIEW / name) for name in shards(VIEW))


@pytest.mark.parametrize("where", ["data", "header", "length"])
def test_add_refuses_a_damaged_shard_by_name(
    run: Command, store: HiddenStateStore, where: str
) -> None:
    file, offset = data_of(store, B)
    if where == "length":
        file.chmod(0o644)
        os.truncate(file, offset)
    else:
        flip(file, offset if where == "data" else 50)
    ran = run("--store", "new", "add")
    assert ran.status == 1
    assert f"{VIEW / file.name} is damaged" in ran.error
    assert file.name not in shards(Path("new"))


def test_add_refuses_a_view_of_which_a_part_was_pulled(
    run: Command, store: HiddenStateStore
) -> None:
    file, _ = data_of(store, B)
    (VIEW / file.name).unlink()
    ran = run("--store", "new", "add")
    assert ran.status == 1
    assert "2 of 3 samples are missing: 1 of 2 shards" in ran.error
    assert file.name in ran.error
    assert not Path("new").exists()


def fake_dvc(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> Path:
    """A `dvc` that writes its arguments down, one call a line."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "dvc"
    script.write_text(f'#!/bin/sh\necho "$@" >> {folder / "calls"}\nexit {status}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    return folder / "calls"


@pytest.fixture
def pulled(tmp_path: Path, store: HiddenStateStore) -> list[str]:
    """The pipeline's data: B, A and D train, C is held out; the shard of each of the four."""
    store = HiddenStateStore(paths.STORE)
    add(store, BF16, [D])
    store.write_view(VIEW, BF16, [sample_key(ids) for ids in (B, A, D, C)], 10**6)
    paths.PREPARED.mkdir(parents=True)
    for name, split in (("train", (B, A, D)), ("heldout", (C,))):
        write_samples(
            paths.PREPARED / f"{name}.parquet", [sample(ids[:1], ids[1:]) for ids in split]
        )
    return [data_of(store, ids)[0].name for ids in (B, A, D, C)]


@pytest.mark.parametrize(("number", "num_shards"), [(1, 2), (2, 2), (3, 3), (1000, 3)])
def test_pull_fetches_the_shards_of_the_first_samples_and_of_those_held_out(
    run: Command,
    pulled: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    num_shards: int,
) -> None:
    calls = fake_dvc(tmp_path, monkeypatch)
    ran = run("pull", "--samples", str(number))
    assert ran.status == 0, ran.error
    first, second = calls.read_text().splitlines()
    assert first == (
        "pull data/prepared data/vocab data/verifier_head data/hidden_states/manifest.json"
    )
    needed = {*pulled[:number], pulled[3]}
    assert len(needed) == num_shards
    assert second == " ".join(["pull", *(f"data/hidden_states/{name}" for name in sorted(needed))])
    assert f"{num_shards} of 3 shards are here" in ran.out
    assert f"set train.max_samples to {number} in params.yaml" in ran.out


def test_pull_ends_as_dvc_does(
    run: Command, pulled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_dvc(tmp_path, monkeypatch, status=255)
    assert run("pull", "--samples", "1").status == 255
    assert len(calls.read_text().splitlines()) == 1


def test_pull_of_samples_that_were_not_extracted_says_how_many(
    run: Command, pulled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_dvc(tmp_path, monkeypatch)
    write_manifest(VIEW, replace(BF16, verifier="other"), [])
    ran = run("pull", "--samples", "2")
    assert ran.status == 1
    assert "data/hidden_states holds no hidden states of 3 of 3 samples" in ran.error
