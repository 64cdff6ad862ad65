"""What an installation holds, from a wheel and from an editable install, and what it pins."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points, files, metadata, requires
from pathlib import Path

import pytest
import yaml
from house_files import ROOT, checkout, installed_path, module_name, project, sources, tracked
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ALLOWED_AT_THE_TOP = {
    *("proto", "kernels", "engine", "prm", "search", "experiments", "examples", "tests", ".ci"),
    *(
        "pyproject.toml",
        "setup.py",
        "requirements.txt",
        "Makefile",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "LICENSE",
        ".gitignore",
        ".pre-commit-config.yaml",
    ),
}
CHECKPOINT_BYTES = 20_000_000
LABORATORY = "experiments/lab/"
"""A folder of an editable install that no wheel holds."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout, so that nothing is left behind in it."""
    copy = tmp_path_factory.mktemp("copy")
    for name in checkout():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (file,) = out.glob("espalier_search-*-py3-none-any.whl")
    return file


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not re.match(r"espalier_search-[^/]*\.dist-info/", name)}


def test_wheel_holds_every_module_and_data_file_of_the_layers_and_nothing_else(wheel_names):
    # Figures, pictures, READMEs and what containers and proxies read are for users of the repository, not for programs.
    for_readers = "experiments/results/", "experiments/deploy/", "README.md", "SWEEP.md", "MODELS.md", LABORATORY
    shipped = [name for name in checkout() if not any(part in str(name) for part in for_readers)]
    expected = {str(path) for name in shipped if (path := installed_path(name))}
    assert wheel_names == expected


def test_the_laboratory_is_in_the_checkout_and_in_no_wheel(wheel_names):
    assert any(name.startswith(LABORATORY) for name in sources())
    assert [name for name in wheel_names if name.startswith(f"espalier/{LABORATORY}")] == []


@pytest.mark.parametrize(
    "name",
    [
        "espalier/py.typed",
        "espalier/kserve/inference.proto",
        "espalier/kserve/inference_pb2.py",
        "espalier/v1/search.proto",
        "espalier/v1/search_pb2.py",
        "espalier/v1/search_pb2.pyi",
        "espalier/v1/search_pb2_grpc.py",
        "espalier/kernels/cpu/attention/paged.py",
        "espalier/experiments/demo/benchmark.jsonl",
        "espalier/experiments/demo/planted_errors/demo-test.jsonl",
        *(
            f"espalier/experiments/demo/{role}/{file}"
            for role in ("generator", "verifier")
            for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
        ),
    ],
)
def test_wheel_holds_what_a_user_needs(wheel_names, name):
    assert name in wheel_names


def test_unpacked_wheel_runs_and_finds_its_own_data(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        "from espalier.experiments import demo\n"
        "from espalier.experiments.cli.main import app\n"
        "for path in (demo.benchmark_path(), demo.generator_path() / 'config.json', demo.verifier_path()):\n"
        "    assert path.exists(), path\n"
        "    print(path)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr
    assert all(Path(line).is_relative_to(tmp_path) for line in run.stdout.splitlines())


def test_every_folder_with_python_files_is_a_listed_package_and_every_listed_package_is_a_folder():
    listed = set(project()["tool"]["setuptools"]["packages"])
    with_python = {str(path.parent).replace("/", ".") for name in sources() if (path := installed_path(name))}
    with_files = {str(path.parent).replace("/", ".") for name in checkout() if (path := installed_path(name))}
    assert with_python <= listed <= with_files


def test_every_package_says_what_it_is_for():
    packages = {Path(name).parent for name in sources()}
    for folder in packages:
        file = ROOT / folder / "__init__.py"
        assert file.is_file(), f"{folder} has no __init__.py"
        assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), f"{folder}/__init__.py says nothing"


def test_modules_resolve_to_this_checkout():
    stale = []
    for name in sources():
        if name.endswith("__main__.py"):
            continue  # its package is looked up beside it
        spec = importlib.util.find_spec(module_name(name))
        if spec is None or not os.path.samefile(spec.origin or os.devnull, ROOT / name):
            stale.append(name)
    assert not stale, f"the editable install does not know {stale}; run: rm .venv/.installed && make install"


def test_type_marker_and_stubs_are_installed_beside_the_modules():
    spec = importlib.util.find_spec("espalier")
    assert spec is not None
    assert spec.origin is not None
    for name in ("py.typed", "v1/search_pb2.pyi", "v1/search.proto"):
        assert (Path(spec.origin).parent / name).is_file(), name


def test_console_command_and_checkpoint_names_are_registered():
    (command,) = entry_points(group="console_scripts", name="espalier")
    assert callable(command.load())
    folders = {entry.name: entry.load()() for entry in entry_points(group="espalier.checkpoints")}
    assert set(folders) == {"demo-generator", "demo-thinking-generator", "demo-verifier"}
    assert all((folder / "config.json").is_file() for folder in folders.values())


def test_top_level_holds_exactly_the_agreed_entries():
    assert {name.split("/")[0] for name in tracked()} == ALLOWED_AT_THE_TOP


def test_the_hooks_of_pre_commit_mend_what_make_lint_would_find(tmp_path):
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    bad = tmp_path / "bad.py"
    bad.write_text("import sys\nx  =  'a'\n", encoding="utf-8")
    for hook in hooks:
        program, *arguments = hook["entry"].split()
        assert program == ".venv/bin/ruff"
        ruff = Path(sys.executable).with_name("ruff")
        subprocess.run([ruff, *arguments, "--config", ROOT / "pyproject.toml", bad], check=True, capture_output=True)
    assert bad.read_text(encoding="utf-8") == 'x = "a"\n'


def test_the_tests_of_one_room_can_be_run_alone():
    command = ["make", "--dry-run", "test", "ROOM=search/voting", f"PYTHON={sys.executable}"]
    recipe = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "pytest tests/search/voting -m" in recipe


def test_checkpoints_are_small():
    weights = [name for name in checkout() if name.endswith((".safetensors", ".bin", ".pt"))]
    assert weights
    assert {name: size for name in weights if (size := (ROOT / name).stat().st_size) > CHECKPOINT_BYTES} == {}


def _pins() -> Iterator[tuple[str, Requirement]]:
    of_tests = ("", "experiments/report", "search/service/page")
    folders = ROOT, *(ROOT / "tests" / name for name in of_tests)
    files = [folder / "requirements.txt" for folder in folders]
    for line in (line for file in files for line in file.read_text(encoding="utf-8").splitlines()):
        if text := line.partition("#")[0].strip():
            requirement = Requirement(text)
            yield canonicalize_name(requirement.name), requirement


def test_every_requirement_is_pinned_to_one_version():
    pins = list(_pins())
    assert len({name for name, _ in pins}) == len(pins)
    for _, requirement in pins:
        assert re.fullmatch(r"==[\w.+!]+", str(requirement.specifier)), str(requirement)
    assert "torch" in dict(pins)


def _ranges() -> list[str]:
    p = project()
    return [
        *p["build-system"]["requires"],
        *p["project"]["dependencies"],
        *(text for extra in p["project"]["optional-dependencies"].values() for text in extra),
    ]


@pytest.mark.parametrize("text", _ranges())
def test_pinned_versions_lie_in_the_ranges_of_pyproject(text):
    pins = dict(_pins())
    wanted = Requirement(text)
    name = canonicalize_name(wanted.name)
    assert name in pins, f"no requirements.txt pins {wanted.name}"
    (pin,) = pins[name].specifier
    assert wanted.specifier.contains(Version(pin.version)), f"{pin} is outside {text}"


def with_requirements(names: Iterable[str]) -> set[str]:
    """Distributions and those that they need, extras apart."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        if (name := canonicalize_name(waiting.pop())) not in found:
            found.add(name)
            needed = [Requirement(text) for text in requires(name) or ()]
            waiting += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def test_a_client_needs_no_packages_but_those_that_its_readme_names(wheel, tmp_path):
    text = (ROOT / "search/client/README.md").read_text(encoding="utf-8")
    named = re.search(r"^pip install (?!--)(.+)$", text, re.MULTILINE)
    assert named
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "espalier")
    for name in with_requirements(named[1].split()):
        for file in files(name) or ():
            target = tmp_path / "packages" / file
            if ".." not in file.parts and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(file.locate())
    script = (
        "import sys\n"
        "from espalier import SearchClient\n"
        "from espalier.search.client import NO_RETRIES, ServiceError\n"
        "with SearchClient('127.0.0.1:1', retry=NO_RETRIES) as client:\n"
        "    for call in (client.health, lambda: client.solve('a'), lambda: client.score_session('a')):\n"
        "        try:\n"
        "            call()\n"
        "        except ServiceError as error:\n"
        "            assert error.code == 'UNAVAILABLE', error\n"
        "print(sorted({'torch', 'numpy'} & sys.modules.keys()))\n"
    )
    places = os.pathsep.join(str(tmp_path / name) for name in ("espalier", "packages"))
    run = subprocess.run(  # without site-packages
        [sys.executable, "-S", "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": places}
    )
    assert run.stdout == "[]\n", run.stderr


def test_the_installed_metadata_say_who_made_it_and_what_it_is_for():
    of = metadata("espalier-search")
    assert "Espalier" in of["Author"]
    told = set(of.get_all("Classifier") or ())
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= told
    pinned = {line.split(" :: ")[-1] for line in told if line.startswith("Programming Language :: Python :: 3.")}
    assert min(pinned, key=Version) == str(SpecifierSet(of["Requires-Python"])).removeprefix(">=")
    assert not [line for line in told if line.startswith("License")], "beside a license expression none is allowed"
