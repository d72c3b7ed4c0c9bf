"""The base of a comparison: a commit of the repository, checked out in a temporary git worktree."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from edgefl.errors import ConfigError, near

OPTION = "--edgefl-against"
_PREFIX = "edgefl-base-"
_GUARD = """
trap '' INT TERM HUP
read -r line
git -C "$1" worktree remove --force "$2" > /dev/null 2>&1
rm -rf "$3"
git -C "$1" worktree prune > /dev/null 2>&1
"""
"""Shell script that waits for a line or the end of its input, then removes worktree $2 from repository $1,
and deletes folder $3, which contains the worktree."""


class Base(NamedTuple):
    """A commit to compare with."""

    ref: str
    """The branch, tag or commit that the user named."""
    commit: str
    repository: Path
    """Top folder of the repository."""

    @property
    def name(self) -> str:
        short = self.commit[:9]
        return short if self.commit.startswith(self.ref) else f"{self.ref} ({short})"


def find_base(ref: str, folder: Path) -> Base:
    """Return the last common commit of HEAD and ``ref``, which is a branch, a tag or a commit.

    A branch that is not local is looked up in ``origin``. Raises ConfigError, with a remedy, if git or
    the repository is missing, if this clone does not have the commit, or if the commit is checked out here
    and no file has changed.
    """
    if shutil.which("git") is None:
        raise ConfigError(f"{OPTION}: this needs git to check out the base, but git is not installed")
    top = git(folder, "rev-parse", "--show-toplevel")
    if top.returncode:
        raise ConfigError(f"{OPTION}: {_why(top)}")
    repository = Path(os.path.realpath(top.stdout.strip()))
    commit = _commit(ref, repository)
    head = git(repository, "rev-parse", "--verify", "--quiet", "HEAD^{commit}").stdout.strip()
    common = git(repository, "merge-base", commit, "HEAD")
    if common.returncode:
        raise ConfigError(
            f"{OPTION}: {ref!r} and HEAD have no common commit"
            + (
                _SHALLOW.format("the history is needed")
                if _shallow(repository)
                else "; name an ancestor of HEAD"
            )
        )
    base = common.stdout.strip()
    if base == head and not git(repository, "status", "--porcelain", "--untracked-files=normal").stdout:
        what = f"{ref!r} and HEAD are the same commit" if commit == head else f"{ref!r} contains HEAD"
        raise ConfigError(
            f"{OPTION}: {what}, and no file has changed since, so there is nothing to compare; change a "
            f"file, or name an earlier commit, such as {OPTION}=HEAD~1"
        )
    return Base(ref, base, repository)


_SHALLOW = (
    ": this clone is shallow, and {}; run 'git fetch --unshallow origin', or set 'fetch-depth: 0' for "
    "actions/checkout"
)


def _commit(ref: str, repository: Path) -> str:
    if not ref or ref.startswith("-"):
        raise ConfigError(f"{OPTION}: name a branch, tag or commit (got {ref!r})")
    for name in (ref, f"origin/{ref}"):
        found = git(repository, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        if not found.returncode:
            return found.stdout.strip()
    why = f"{OPTION}: this clone has no branch, tag or commit {ref!r}"
    if _shallow(repository):
        raise ConfigError(why + _SHALLOW.format("does not have all branches"))
    names = git(repository, "for-each-ref", "--format=%(refname:short)").stdout.split()
    known = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise ConfigError(
        f"{why};{near(ref, names)} available: {known or 'none'}; if it has not been fetched, run: "
        "git fetch origin"
    )


def _shallow(repository: Path) -> bool:
    return git(repository, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"


class Checkout:
    """The base's files in a temporary folder.

    The folder is removed by `close`, or when this process ends, even if it is killed.
    """

    def __init__(self, base: Base, build: str | None = None) -> None:
        self.base = base
        self._folder = Path(os.path.realpath(tempfile.mkdtemp(prefix=_PREFIX)))
        self.root = self._folder / base.repository.name
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "edgefl-guard", base.repository, self.root, self._folder],
            stdin=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches the tests, but not the guard
            env=_environment(),
        )
        try:
            made = git(base.repository, "worktree", "add", "--detach", "--force", str(self.root), base.commit)
            if made.returncode:
                raise ConfigError(f"{OPTION}: {base.name} cannot be checked out: {_why(made)}")
            if build is not None:
                _build(build, self.root)
        except BaseException:
            self.close()
            raise

    def why_without(self, file: Path) -> str:
        """Return why the base cannot contain a file: git ignores it, or it is in another repository.

        Return an empty string for a file that the base has or that is new.
        """
        repository = self.base.repository
        if not file.is_relative_to(repository) or (self.root / file.relative_to(repository)).exists():
            return ""
        top = git(file.parent, "rev-parse", "--show-toplevel")
        if top.returncode or os.path.realpath(top.stdout.strip()) != str(repository):
            return f"{file} is in another repository, such as a submodule"
        ignored = git(repository, "check-ignore", "--quiet", str(file)).returncode == 0
        return f"git ignores {file}" if ignored else ""

    def close(self) -> None:
        """Remove the files."""
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the guard was killed
            # A process that the tests have forked and left running may keep the pipe open.
            self._guard.stdin.write(b"\n")
            self._guard.stdin.close()
        self._guard.wait()


def _build(command: str, root: Path) -> None:
    # A program that the command leaves in the background would keep pipes open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        done = subprocess.run(
            command,
            shell=True,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            check=False,
            env=_outside_hooks(),
        )
        output.seek(0)
        errors.seek(0)
        text = b"\n".join((output.read(), errors.read())).decode(errors="replace")
    if done.returncode:
        line = shlex.quote(" ".join(command.split()))
        raise ConfigError(
            f"--edgefl-build: {line} failed in the base's checkout with exit code {done.returncode}: "
            f"{_last_line(text)}"
        )


def git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git without hooks, and without variables such as GIT_DIR, which git sets for its hooks."""
    command = ["git", "-c", "core.hooksPath=/dev/null", "-C", str(folder), *arguments]
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env=_environment(),
    )


def _environment() -> Mapping[str, str]:
    return {**_outside_hooks(), "LC_ALL": "C"}


def _outside_hooks() -> Mapping[str, str]:
    """Return the environment without the variables that point a git hook to the head's repository."""
    hooks = ("GIT_DIR", "GIT_INDEX", "GIT_WORK")
    return {name: value for name, value in os.environ.items() if not name.startswith(hooks)}


def _why(done: subprocess.CompletedProcess[str]) -> str:
    """Return git's error message; if another user owns the repository, also the remedy that git prints."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith(("fatal:", "error:"))), _last_line(done.stderr))
    way = next((line for line in lines if line.startswith("git config")), "")
    return reason.partition(": ")[2] + (f"; run: {way}" if way else "")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
