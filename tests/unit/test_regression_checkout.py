"""Finding the base of a comparison: each error is one line that says what to do."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from edgefl.errors import ConfigError
from edgefl.regression import stem
from edgefl.regression.checkout import Checkout, find_base


def git(top: Path, *arguments: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "protocol.file.allow=always")
    command = ["git", "-C", str(top), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A repository with two commits on main, and one commit on a branch that starts at the first of them."""
    made = tmp_path / "project"
    made.mkdir()
    git(made, "init", "-q", "-b", "main")
    for name in ("one", "two"):
        commit(made, name)
    git(made, "checkout", "-q", "-b", "feature", "HEAD~1")
    commit(made, "three")
    return made


def commit(top: Path, text: str) -> None:
    (top / "a.txt").write_text(text)
    git(top, "add", "a.txt")
    git(top, "commit", "-q", "-m", text)


def why(ref: str, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        find_base(ref, folder)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("--edgefl-against: ")
    return str(caught.value)


def test_the_base_is_the_last_common_commit(top: Path) -> None:
    """Commits that were added to main later are not part of the changes under test."""
    base = find_base("main", top)
    assert base.commit == git(top, "rev-parse", "main~1")
    assert base.name == f"main ({base.commit[:9]})"
    assert find_base(base.commit[:12], top).name == base.commit[:9]


def test_the_checkout_is_removed_while_a_forked_process_goes_on(top: Path) -> None:
    """For example, a server that a test has started with multiprocessing; it has copies of all pipes."""
    made = Checkout(find_base("main", top))
    copy = os.dup(made._guard.stdin.fileno())
    made.close()
    assert not made.root.exists()
    os.close(copy)


def test_a_branch_of_the_origin_is_found_by_its_name(top: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--branch", "feature", f"file://{top}", "clone")
    assert find_base("main", tmp_path / "clone").commit == git(top, "rev-parse", "main~1")


def test_the_error_for_a_shallow_clone_says_how_to_fetch(top: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth=1", "--branch", "feature", f"file://{top}", "clone")
    shallow = why("main", tmp_path / "clone")
    assert "this clone is shallow" in shallow
    assert "fetch-depth: 0" in shallow
    git(tmp_path / "clone", "fetch", "-q", "--depth=1", "origin", "main")
    assert "no common commit: this clone is shallow" in why("FETCH_HEAD", tmp_path / "clone")


def test_a_typing_mistake_names_the_branches(top: Path) -> None:
    mistake = "no branch, tag or commit 'mian'; did you mean 'main'? available: feature, main"
    assert mistake in why("mian", top)
    assert "(got '--all')" in why("--all", top)
    assert "(got '')" in why("", top)


def test_a_head_without_changes_is_refused(top: Path) -> None:
    git(top, "config", "status.showUntrackedFiles", "no")
    assert "there is nothing to compare" in why("feature", top)
    (top / "new.txt").write_text("a file that is not added yet")
    assert find_base("feature", top).commit == git(top, "rev-parse", "feature")
    (top / "new.txt").unlink()
    git(top, "checkout", "-q", "main~1")
    assert "'main' contains HEAD" in why("main", top)
    (top / "a.txt").write_text("changed")
    assert find_base("main", top).commit == git(top, "rev-parse", "HEAD")


def test_a_missing_repository_or_git_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "not a git repository" in why("main", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git is not installed" in why("main", tmp_path)


def test_histories_without_a_common_commit_are_refused(top: Path) -> None:
    git(top, "checkout", "-q", "--orphan", "other")
    commit(top, "unrelated")
    assert "'main' and HEAD have no common commit; name an ancestor of HEAD" in why("main", top)


def test_the_checkout_has_the_commits_files_and_is_removed(top: Path) -> None:
    checkout = Checkout(find_base("main", top))
    assert (checkout.root / "a.txt").read_text() == "one"
    assert str(checkout.root) in git(top, "worktree", "list")
    checkout.close()
    assert not checkout.root.parent.exists()
    assert str(checkout.root) not in git(top, "worktree", "list")


def test_a_build_that_fails_is_named_with_its_last_line(top: Path) -> None:
    for output, shown in (("no compiler", "no compiler"), (r"caf\351", "caf\N{REPLACEMENT CHARACTER}")):
        with pytest.raises(ConfigError, match=f"^--edgefl-build: .* with exit code 3: {shown}$"):
            Checkout(find_base("main", top), f"printf '{output}'; exit 3")
    with pytest.raises(ConfigError, match=r"with exit code 3: no compiler$"):
        Checkout(find_base("main", top), "echo no compiler >&2; echo compiling; exit 3")
    assert git(top, "worktree", "list").count("\n") == 0


def test_a_program_that_a_build_leaves_in_the_background_is_not_waited_for(top: Path) -> None:
    checkout = Checkout(find_base("main", top), "sleep 30 & echo $! > pid")
    program = psutil.Process(int((checkout.root / "pid").read_text()))
    assert program.status() != psutil.STATUS_ZOMBIE
    program.kill()
    program.wait()
    checkout.close()


def test_a_build_does_not_use_the_index_of_the_hook_that_runs_the_tests(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = find_base("main", top)
    monkeypatch.setenv("GIT_INDEX_FILE", str(top / "index"))
    Checkout(base, 'test -z "$GIT_INDEX_FILE"').close()


def test_installed_copies_may_be_packages_modules_and_extensions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stem, "INSTALLED", (f"{tmp_path}{os.sep}",))
    record = "pkg/__init__.py,sha256=a,1\nmod.py,sha256=b,2\nfast.cpython-311-x86_64-linux-gnu.so,,\n"
    for name, editable in (("copied", False), ("linked", True)):
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        origin = {"url": Path("/project").as_uri(), "dir_info": {"editable": editable}}
        (folder / "direct_url.json").write_text(json.dumps(origin))
        (folder / "RECORD").write_text(record if not editable else "own.py,,\n")
    assert stem._copies_of("/project") == {"pkg", "mod", "fast"}
