"""Versions and dates agree in all files, and no documented command installs natten_jax from an index."""

from __future__ import annotations

import datetime
import re
import tomllib
from pathlib import Path

import yaml
from packaging.version import Version

from natten_jax import __version__

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
#: Version and date of every release, newest first.
RELEASES = re.findall(r"^## \[(\d[^\]]*)\] - (\S+)$", CHANGELOG, re.MULTILINE)
TEXTS = [
    path
    for pattern in ("*.md", "docs/**/*.md", "docs/**/*.ipynb", "examples/*", "natten_jax/**/*.py", "flax_modules/*.py")
    for path in sorted(ROOT.glob(pattern))
    if path.is_file() and path.suffix in (".md", ".ipynb", ".py")
]


def test_every_release_has_a_number_and_a_date_in_order() -> None:
    headings = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert headings == ["[Unreleased]", *(f"[{version}] - {date}" for version, date in RELEASES)]
    assert len(RELEASES) >= 2
    for order in ([Version(version) for version, _ in RELEASES], [datetime.date.fromisoformat(d) for _, d in RELEASES]):
        assert order == sorted(order, reverse=True)


def test_the_version_is_the_next_one_while_there_are_unreleased_changes() -> None:
    version, newest = Version(__version__), Version(RELEASES[0][0])
    unreleased = CHANGELOG.partition("## [Unreleased]")[2].partition("\n## ")[0].strip()
    if unreleased:
        assert version.is_devrelease and Version(version.base_version) > newest
    else:
        assert version == newest or version.is_devrelease


def test_the_citation_is_of_the_newest_release() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["version"], str(citation["date-released"])) == RELEASES[0]
    # The project has not decided on a license, public addresses or a DOI.
    assert not {"license", "url", "repository-code", "doi"} & set(citation)


def test_pages_name_wheels_of_this_version() -> None:
    named = {name for path in TEXTS for name in re.findall(r"(\d[\w.]*)\+cu1\d", path.read_text())}
    assert named == {__version__}


def test_no_page_installs_unpublished_packages_from_an_index() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "urls" not in project, "once there is an address, pages may name it"
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in TEXTS
        for line in path.read_text().splitlines()
        if re.search(r"pip install\b.*?[ '\"\\]natten_jax(?![-/\w])", line) and "--find-links" not in line
    ]
    assert not wrong
