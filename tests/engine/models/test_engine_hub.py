"""Finding checkpoints on the hub: its client is replaced by one that serves a folder, or works on a cache made here."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from espalier.engine.errors import CheckpointError
from espalier.engine.models.hub import HubSettings, locate, locate_with_adapter
from espalier.engine.models.options import LoadFormat

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = ["config.json", "tokenizer.json", "chat_template.jinja"]


class FakeHub:
    """`snapshot_download` of one repository, into a folder named by its commit; remembers how it was asked."""

    def __init__(self, files: dict[str, str], cache: Path) -> None:
        self.files = files
        self.folder = cache / COMMIT
        self.calls: list[dict] = []

    def __call__(self, repo_id: str, *, allow_patterns: list[str], **asked: object) -> str:
        self.calls.append({"repository": repo_id, **asked})
        for name in filter_repo_objects(self.files, allow_patterns=allow_patterns):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(self.files[name])
        return str(self.folder)

    @property
    def downloaded(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FakeHub]:
    """Puts a repository of these files on the hub; an index names the shards given with it."""

    def put(*names: str, **shards: list[str]) -> FakeHub:
        files = dict.fromkeys((*SMALL, *names), "{}")
        for stem, held in shards.items():
            name = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[stem] + ".index.json"
            files[name] = json.dumps({"weight_map": dict(zip("abcdef", held, strict=False))})
        hub = FakeHub(files, tmp_path)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
        monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
        return hub

    return put


ST = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
BIN = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]


@pytest.mark.parametrize("load_format", [LoadFormat.AUTO, LoadFormat.DUMMY])
def test_an_adapter_is_downloaded_whole_also_to_be_inspected(
    load_format: LoadFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    adapter = {"adapter_config.json": json.dumps({"base_model_name_or_path": str(base)})}
    hub = FakeHub({**adapter, "adapter_model.safetensors": "", "training.bin": ""}, tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    assert locate_with_adapter("org/adapter", load_format) == (base, hub.folder)
    assert hub.downloaded == {"adapter_config.json", "adapter_model.safetensors"}


def test_only_what_will_be_read_is_downloaded_when_a_repository_holds_its_weights_twice(serve: Callable[..., FakeHub]):
    hub = serve(*ST, *BIN, "consolidated.safetensors", "original/consolidated.00.pth", safetensors=ST, bin=BIN)
    assert locate("org/name") == hub.folder
    indices = {"model.safetensors.index.json", "pytorch_model.bin.index.json"}
    assert hub.downloaded == {*SMALL, *indices, *ST}


@pytest.mark.parametrize(
    ("load_format", "weights"),
    [
        (LoadFormat.AUTO, {"model.safetensors"}),
        (LoadFormat.SAFETENSORS, {"model.safetensors"}),
        (LoadFormat.BIN, {"pytorch_model.bin"}),
        (LoadFormat.DUMMY, set()),
    ],
)
def test_the_format_that_is_asked_for_is_downloaded(
    load_format: LoadFormat, weights: set[str], serve: Callable[..., FakeHub]
):
    hub = serve("model.safetensors", "pytorch_model.bin")
    locate("org/name", load_format)
    assert hub.downloaded == {*SMALL, *weights}


def test_a_repository_of_bin_shards_only_is_downloaded_as_such(serve: Callable[..., FakeHub]):
    hub = serve(*BIN, "training_args.bin", bin=BIN)
    locate("org/name")
    assert hub.downloaded == {*SMALL, "pytorch_model.bin.index.json", *BIN}


def test_a_single_safetensors_file_is_taken_before_shards_of_bin(serve: Callable[..., FakeHub]):
    hub = serve("model.safetensors", *BIN, bin=BIN)
    locate("org/name")
    assert hub.downloaded == {*SMALL, "pytorch_model.bin.index.json", "model.safetensors"}


def test_a_revision_stands_after_the_name_and_its_weights_are_of_the_same_commit(serve: Callable[..., FakeHub]):
    hub = serve("model.safetensors")
    locate("org/name@refs/pr/7", hub=HubSettings(cache_dir=Path("elsewhere")))
    assert {call["repository"] for call in hub.calls} == {"org/name"}
    assert {call["cache_dir"] for call in hub.calls} == {Path("elsewhere")}
    assert [call["revision"] for call in hub.calls] == ["refs/pr/7"] + [COMMIT] * (len(hub.calls) - 1)


GGUFS = (
    "name-Q4_K_M.gguf",
    "name-Q4_K_S.gguf",
    "name.q8_0.gguf",
    "F16/name-F16-00001-of-00002.gguf",
    "F16/name-F16-00002-of-00002.gguf",
)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("org/name:Q4_K_M", GGUFS[:1]),
        ("org/name:q4_k_s", GGUFS[1:2]),
        ("org/name:Q8_0@main", GGUFS[2:3]),
        ("org/name:name.q8_0.gguf", GGUFS[2:3]),
        ("org/name:F16", GGUFS[3:]),
    ],
)
def test_a_gguf_file_is_named_by_its_quantisation(serve: Callable[..., FakeHub], name: str, files: tuple[str, ...]):
    hub = serve("model.safetensors", *GGUFS)
    assert locate(name) == hub.folder / files[0]
    assert hub.downloaded == set(files)
    assert hub.calls[0]["revision"] == ("main" if "@" in name else None)
    locate("org/name:Q4_K_M")  # another of the same repository is already there
    assert locate(name) == hub.folder / files[0]


def test_a_quantisation_that_a_repository_lacks(serve: Callable[..., FakeHub]):
    serve(*GGUFS)
    with pytest.raises(CheckpointError, match=r"org/name has no GGUF file 'Q4_K'"):
        locate("org/name:Q4_K")


def test_a_folder_is_a_folder_even_with_an_at_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("org/name@main").mkdir(parents=True)
    assert locate("org/name@main") == Path("org/name@main")


@pytest.mark.parametrize(
    "name", ["org/", "org/name@", "a/b/c", "org/name@a b", "org/name:", "org/name:a/b", "nothing-here", "../x"]
)
def test_what_is_no_name_is_refused_with_the_kinds_there_are(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"not a folder, not a GGUF file, not a hub id like org/name, .*org/name:Q4_K_M, .*demo-"
    ):
        locate(name)


def _http(kind: type[errors.HfHubHTTPError], status: int) -> Exception:
    request = httpx2.Request("GET", "https://huggingface.co/api/models/org/name")
    return kind("refused", response=httpx2.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (_http(errors.GatedRepoError, 403), r"org/name is gated: accept its terms .*co/org/name, then log in"),
        (_http(errors.RepositoryNotFoundError, 401), r"org/name is not on the Hugging Face hub, or private"),
        (_http(errors.RevisionNotFoundError, 404), r"org/name has no revision 'old'"),
        (errors.LocalEntryNotFoundError("no route"), r"cannot be reached, and its cache has no whole org/name"),
        (_http(errors.HfHubHTTPError, 503), r"could not download org/name .*: refused"),
        (OSError("disk full"), r"could not download org/name .*: disk full"),
    ],
)
def test_what_the_hub_refuses_is_an_error_that_says_what_to_do(
    error: Exception, advice: str, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    with pytest.raises(CheckpointError, match=advice):
        locate("org/name@old")


# Offline, with the real client on a cache made by hand.


@pytest.fixture
def cache(tmp_path: Path, tiny_checkpoints: dict[str, Path]) -> Path:
    """The hub's cache with one checkpoint, as its client lays it out."""
    stored = tmp_path / "cache" / "models--org--name"
    shutil.copytree(tiny_checkpoints["qwen2-tied"], stored / "snapshots" / COMMIT)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(COMMIT)
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["org/name", "org/name@main", f"org/name@{COMMIT}"])
def test_offline_the_cache_is_enough(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    found = locate(name, hub=HubSettings(offline=True, cache_dir=cache))
    assert found == cache / "models--org--name" / "snapshots" / COMMIT


@pytest.mark.parametrize("name", ["org/other", "org/name@v2"])
@pytest.mark.parametrize("by_flag", [True, False])
def test_offline_what_is_not_in_the_cache_is_an_error_that_names_the_switches(
    name: str, by_flag: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: not by_flag)  # as HF_HUB_OFFLINE sets it
    with pytest.raises(CheckpointError, match=r"this run is offline.*--offline and HF_HUB_OFFLINE.*--cache-dir"):
        locate(name, hub=HubSettings(offline=by_flag, cache_dir=cache))
