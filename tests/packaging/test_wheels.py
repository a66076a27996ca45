"""Each distribution works when only its wheel and its dependencies are installed."""

from __future__ import annotations

import json
import shutil
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import uses
from projects import FOLDERS, ROOT, files, package_of, with_dependencies

AGREED = ("Version", "License-Expression", "License-File", "Requires-Python", "Classifier", "Description-Content-Type")
IN_EVERY_RUN = {("specdec-proposer-eagle",)}
TRIED_ALONE = [pytest.param(names, marks=() if names in IN_EVERY_RUN else pytest.mark.nightly) for names in uses.USES]
WHO_IS_HERE = """if True:
    import importlib.metadata, importlib.util, json, sys
    packages = json.loads(sys.argv[1])
    specs = {name: importlib.util.find_spec(name) for name in packages}
    installed = {each.name for each in importlib.metadata.distributions() if each.name.startswith("specdec")}
    print(json.dumps([{name: spec.origin for name, spec in specs.items() if spec}, sorted(installed), sys.path]))
"""


def wheel_of(distribution: str, wheels: Path) -> zipfile.ZipFile:
    (path,) = wheels.glob(f"{package_of(distribution)}-*.whl")
    return zipfile.ZipFile(path)


def metadata_in(wheel: zipfile.ZipFile) -> dict[str, list[str]]:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    message = message_from_bytes(wheel.read(name))
    return {key: message.get_all(key, []) for key in AGREED}


@pytest.fixture(scope="session")
def weights(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the embedded model's weights, unpacked from its wheel. The package that finds this model by name
    is not installed."""
    folder = tmp_path_factory.mktemp("weights")
    wheel_of("specdec-model-tiny", wheels).extractall(folder)
    return folder / "specdec_model_tiny" / "weights"


def test_every_distribution_has_a_wheel(wheels):
    assert {path.name.split("-")[0] for path in wheels.iterdir()} == {package_of(name) for name in FOLDERS}


@pytest.mark.parametrize("distribution", FOLDERS)
def test_a_wheel_has_all_files_of_its_package(distribution, wheels):
    package = package_of(distribution)
    folder = FOLDERS[distribution].relative_to(ROOT)
    expected = {str(Path(name).relative_to(folder)) for name in files() if name.startswith(f"{folder}/{package}/")}
    wheel = wheel_of(distribution, wheels)
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected
    assert f"{package}/py.typed" in expected


@pytest.mark.parametrize("distribution", FOLDERS)
def test_a_wheel_has_the_license(distribution, wheels):
    wheel = wheel_of(distribution, wheels)
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def test_wheels_agree(wheels):
    for key in AGREED:
        values = {tuple(metadata_in(wheel_of(distribution, wheels))[key]) for distribution in FOLDERS}
        assert len(values) == 1, (key, values)
        assert () not in values, key


def test_the_same_commit_gives_the_same_bytes(wheels, copy_sources, make_wheels):
    again = make_wheels(copy_sources(), PACKAGES="kernels")
    (path,) = again.iterdir()
    assert path.read_bytes() == (wheels / path.name).read_bytes()
    assert {file.date_time for file in zipfile.ZipFile(path).infolist()} == {(2020, 2, 2, 12, 0, 0)}


def test_every_distribution_is_tried_alone():
    assert {(name,) for name in FOLDERS} <= uses.USES.keys()


@pytest.mark.parametrize("distributions", TRIED_ALONE, ids="+".join)
def test_a_distribution_works_with_its_dependencies_alone(distributions, environment, wheels, weights, tmp_path):
    environment.install("--find-links", wheels, *distributions)

    # No other package of ours is there, and those that are come from nowhere but the environment.
    expected = with_dependencies(distributions)
    python, packages = environment.bin / "python", [package_of(name) for name in FOLDERS]
    origins, installed, path = json.loads(environment.run(python, "-c", WHO_IS_HERE, json.dumps(packages)))
    assert (set(installed), set(origins)) == (expected, {package_of(name) for name in expected})
    assert all(Path(origin).is_relative_to(environment.folder) for origin in origins.values())
    sources = {str(folder) for folder in FOLDERS.values()} | {str(ROOT)}
    assert not sources & set(path)

    shutil.copy(ROOT / "core" / "tests" / "example_proposer.py", tmp_path / "recent.py")
    shutil.copy(uses.__file__, tmp_path)
    environment.run(python, "uses.py", weights, *distributions)
