"""What `pip install` gives: setup.cfg, the disk and the built wheel say the same."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points, requires
from importlib.resources import files
from pathlib import Path

import pytest

from mindstream.plugin.config_docs import between_markers, field_table

ROOT = Path(__file__).parents[1]
PACKAGES = ("plugin", "backends", "handlers", "model_configs")


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def listed_packages() -> set[str]:
    return set(setup_cfg()["options"]["packages"].split())


def packages_on_disk() -> set[str]:
    folders = (p.parent for top in PACKAGES for p in (ROOT / top).rglob("__init__.py"))
    return {"mindstream." + ".".join(f.relative_to(ROOT).parts) for f in folders}


def test_setup_cfg_lists_every_package() -> None:
    """A missing one works in the editable install and is absent from the wheel."""
    assert listed_packages() == packages_on_disk()


def test_every_folder_of_modules_is_a_package() -> None:
    homeless = {
        str(p.parent.relative_to(ROOT))
        for top in PACKAGES
        for p in (ROOT / top).rglob("*.py")
        if not (p.parent / "__init__.py").exists()
    }
    assert not homeless


def test_type_checkers_see_every_top_package() -> None:
    for top in PACKAGES:
        assert (ROOT / ".typecheck/mindstream" / top).resolve() == ROOT / top


@pytest.mark.parametrize("group", ["mindstream.backends", "console_scripts"])
def test_entry_points_resolve(group: str) -> None:
    section = setup_cfg()["options.entry_points"][group]
    ours = dict(line.split(" = ") for line in section.strip().splitlines())
    installed = {point.name: point for point in entry_points(group=group)}
    for name, value in ours.items():
        assert installed[name].value == value, "run: pip install -e ."
        assert callable(installed[name].load())


def test_package_data_is_found_through_the_package() -> None:
    names = {entry.name for entry in files("mindstream.model_configs").iterdir()}
    assert {"README.md", "echo.yaml", "smollm2-135m.yaml"} <= names


def test_constraints_pin_every_requirement() -> None:
    lines = (ROOT / "requirements/constraints.txt").read_text().splitlines()
    pinned = {_plain(line.partition("==")[0]) for line in lines if not line.startswith("#")}
    wanted = {_plain(_name(text)) for text in requires("mindstream") or ()} - {"mindstream"}
    assert wanted <= pinned


def _name(requirement: str) -> str:
    for mark in "<>=!~;[ ":
        requirement = requirement.partition(mark)[0]
    return requirement


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def test_the_field_table_is_that_of_the_code() -> None:
    readme = (ROOT / "model_configs/README.md").read_text(encoding="utf-8")
    assert between_markers(readme) == field_table(), (
        "run: python -m mindstream.plugin.config_docs --write model_configs/README.md"
    )


def test_a_wheel_holds_every_module_and_yaml(tmp_path: Path) -> None:
    """Built without the kernels, whose build has tests of its own."""
    source = tmp_path / "source"
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "-z",
            *PACKAGES,
            "setup.cfg",
            "setup.py",
            "pyproject.toml",
            "README.md",
        ],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    tracked = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    for file in filter(Path.is_file, tracked):
        target = source / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*build, "--wheel-dir", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "MINDSTREAM_NO_KERNELS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("mindstream-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    expected = {
        f"mindstream/{file.relative_to(ROOT)}"
        for file in tracked
        if file.suffix in (".py", ".yaml") and file.relative_to(ROOT).parts[0] in PACKAGES
    }
    assert expected <= packed
    assert not {entry for entry in packed if entry.split("/")[0] in (*PACKAGES, "tests")}
