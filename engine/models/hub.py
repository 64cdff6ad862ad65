"""Locations of checkpoints: a folder, a registered name, or the Hugging Face hub and its cache."""

import errno
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import entry_points
from os.path import lexists
from pathlib import Path

from espalier.engine.errors import CheckpointError, nearest, nearest_file
from espalier.engine.models.checkpoint.adapter import WEIGHTS, base_of, is_adapter
from espalier.engine.models.options import GGUF, LoadFormat
from espalier.engine.models.weights import SMALL_FILES, named_files, parts_of, weight_lists

_ENTRY_POINTS = "espalier.checkpoints"
_HUB_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(:(?P<gguf>[\w.-]+))?(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Settings of the Hugging Face hub's client.

    Attributes:
        offline: use the cache and no network; `HF_HUB_OFFLINE=1` does the same.
        cache_dir: where downloads are kept; None for the hub client's own place (`HF_HUB_CACHE`, `HF_HOME`).
    """

    offline: bool = False
    cache_dir: Path | None = None


def locate(name: str, load_format: LoadFormat = LoadFormat.AUTO, hub: HubSettings | None = None) -> Path:
    """The folder of a checkpoint, or its GGUF file; what is on the hub is downloaded once, and only what will be read.

    Args:
        name: a folder, a GGUF file, a name registered under the entry-point group `espalier.checkpoints`, or a Hugging
            Face hub id, `org/name` or `org/name@revision` with a branch, tag or commit. The hub's own paths name a
            revision so, and with two models in one command it says which one it is of. `org/name:Q4_K_M` is the GGUF
            file of this quantisation, or of this name, as llama.cpp and vLLM have it.
        load_format: which weight files to download; none for dummy weights.
        hub: how to use the hub.

    Raises:
        CheckpointError: when the name is none of these, or the download fails; its text says what to do.
    """
    if (found := _on_disk(name)) is not None:
        return found
    for entry in entry_points(group=_ENTRY_POINTS, name=name):
        return entry.load()()
    if not (parts := _hub_parts(name)):
        raise _no_checkpoint(name)
    of, hub = (parts["repository"], parts["revision"]), hub or HubSettings()
    return _download_gguf(*of, parts["gguf"], hub) if parts["gguf"] else _download(*of, load_format, hub)


def require_name(name: str) -> None:
    """Check, without a download, that a checkpoint of this name may be there; of `BASE+ADAPTER`, both.

    Raises:
        CheckpointError: it is neither on this machine, nor registered, nor a hub id.
    """
    base, plus, adapter = name.rpartition("+")
    for part in (base, adapter) if plus and _on_disk(name) is None else (name,):
        if _on_disk(part) is None and part not in entry_points(group=_ENTRY_POINTS).names and not _hub_parts(part):
            raise _no_checkpoint(part)


def _hub_parts(name: str) -> re.Match[str] | None:
    """The parts of a hub id; None for another name, as for that of a file in a folder."""
    parts = _HUB_NAME.fullmatch(name)
    return parts if parts and not parts["repository"].endswith(GGUF) else None


def _no_checkpoint(name: str) -> CheckpointError:
    known = sorted(entry_points(group=_ENTRY_POINTS).names)
    hint = nearest(name, known) or nearest_file(Path(name))
    return CheckpointError(
        f"no checkpoint {name!r}: not a folder, not a GGUF file, not a hub id like org/name, org/name@revision or "
        f"org/name:Q4_K_M, and not one of {', '.join(known)}{hint}"
    )


def locate_with_adapter(
    name: str, load_format: LoadFormat = LoadFormat.AUTO, hub: HubSettings | None = None
) -> tuple[Path, Path | None]:
    """The folder of a checkpoint, and that of the LoRA adapter to merge into it; None where there is none.

    Args:
        name: of a checkpoint; `BASE+ADAPTER`; or of an adapter, whose configuration names its base.
        load_format: see `locate`.
        hub: see `locate`.

    Raises:
        CheckpointError: see `locate`.
    """
    base, plus, adapter = name.rpartition("+")
    if plus and _on_disk(name) is None:
        return locate(base, load_format, hub), locate(adapter, load_format, hub)
    folder = locate(name, load_format, hub)
    return (locate(base_of(folder), load_format, hub), folder) if is_adapter(folder) else (folder, None)


def _on_disk(name: str) -> Path | None:
    """The folder or GGUF file of this name; None where there is none."""
    try:
        if (folder := Path(name).expanduser()).is_dir():
            return folder if lexists(folder / "config.json") else _one_gguf(folder, folder.glob(f"*{GGUF}")) or folder
        return folder if folder.suffix == GGUF and folder.is_file() else None
    except RuntimeError:  # ~ of a user that is not there
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error


def _download(repository: str, revision: str | None, load_format: LoadFormat, hub: HubSettings) -> Path:
    """Download small files first, and only the weight files that they name, so that no weights come twice."""
    folder = _fetch(repository, SMALL_FILES, revision, hub)
    commit = folder.name  # a branch may move between two downloads
    if is_adapter(folder):
        return _fetch(repository, (*WEIGHTS, "adapter_config.json"), commit, hub)
    if load_format is LoadFormat.DUMMY:
        return folder
    for name in weight_lists(load_format):
        if name.endswith(".json") and not (folder / name).is_file():
            continue
        wanted = [file.name for file in named_files(folder / name)]
        _fetch(repository, (*wanted, "config.json"), commit, hub)  # always matches, or the client would warn
        if (folder / wanted[0]).is_file():
            break
    return folder


def _download_gguf(repository: str, revision: str | None, wanted: str, hub: HubSettings) -> Path:
    """Download the file of a name or quantisation, or all its parts."""
    spellings = sorted({wanted, wanted.lower(), wanted.upper()})
    patterns = [f"*[-./]{one}{end}" for one in spellings for end in (GGUF, f"-*-of-*{GGUF}")]
    if wanted.endswith(GGUF):
        patterns = [wanted]
    folder = _fetch(repository, patterns, revision, hub)
    names = {file: f"/{file.relative_to(folder)}" for file in folder.rglob(f"*{GGUF}")}
    fitting = [file for file, name in names.items() if any(fnmatch(name, f"*{pattern}") for pattern in patterns)]
    if (found := _one_gguf(folder, fitting)) is None:
        raise CheckpointError(f"{repository} has no GGUF file {wanted!r}; its page on the hub lists its files")
    return found


def _one_gguf(folder: Path, files: Iterable[Path]) -> Path | None:
    """The GGUF file among those of a folder, or the first of its parts; None where there is none.

    Raises:
        CheckpointError: when there are several.
    """
    firsts = sorted({parts_of(file)[0] for file in files})
    if len(firsts) > 1:
        raise CheckpointError(f"{folder} has several GGUF files: {', '.join(file.name for file in firsts)}; name one")
    return firsts[0] if firsts else None


def _fetch(repository: str, patterns: Iterable[str], revision: str | None, hub: HubSettings) -> Path:
    from huggingface_hub import is_offline_mode, snapshot_download

    offline, wanted = hub.offline or is_offline_mode(), list(patterns)
    try:
        found = snapshot_download(
            repository, revision=revision, cache_dir=hub.cache_dir, local_files_only=offline, allow_patterns=wanted
        )
    except Exception as error:  # the hub client raises many kinds, none of them ours
        raise CheckpointError(_explain(error, repository, revision, offline)) from error
    return Path(found)


def _explain(error: Exception, repository: str, revision: str | None, offline: bool) -> str:
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return (
                f"{repository} is gated: accept its terms on https://huggingface.co/{repository}, then log in with "
                "`hf auth login` or set HF_TOKEN"
            )
        case errors.RepositoryNotFoundError():
            return (
                f"{repository} is not on the Hugging Face hub, or private, nor is there such a folder; check its "
                "spelling, or log in with `hf auth login` or set HF_TOKEN"
            )
        case errors.RevisionNotFoundError():
            return f"{repository} has no revision {revision!r}; after the @ stands a branch, a tag or a whole commit"
        case errors.LocalEntryNotFoundError() if offline:
            return (
                f"{repository} is no folder, and is not, or not wholly, in the hub's cache, and this run is offline; "
                "run once without --offline and HF_HUB_OFFLINE, name the right --cache-dir, or give a folder"
            )
        case errors.LocalEntryNotFoundError():
            return (
                f"the Hugging Face hub cannot be reached, and its cache has no whole {repository}, which is no folder "
                f"either: {error}"
            )
    return f"could not download {repository} from the Hugging Face hub: {error}"
